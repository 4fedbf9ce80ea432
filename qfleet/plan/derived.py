"""Quantities derived from several settings of a plan."""

import math
from fractions import Fraction

from qfleet.plan.schema import Algo, DatasetReplay, ExponentialAnneal, FreshReplay, Plan, SequencesView


def updates_per_step(plan: Plan) -> Fraction:
    """Updates per environment step, as an exact fraction."""
    if isinstance(plan.replay, FreshReplay):
        return Fraction(plan.replay.epochs * plan.replay.minibatches, plan.replay.rows * plan.env.num)
    if isinstance(plan.replay, DatasetReplay):
        return Fraction(1, plan.algo.batch_size * item_steps(plan))  # more windows may be shorter than their length
    return Fraction(str(plan.replay.samples_per_insert)) / (plan.algo.batch_size * item_steps(plan))


def largest_n_step(algo: Algo) -> int:
    """The largest n that the plan reaches."""
    return max(algo.n_step, algo.anneal.n_step) if isinstance(algo.anneal, ExponentialAnneal) else algo.n_step


def item_steps(plan: Plan) -> int:
    """Steps that one sampled item contributes to the loss."""
    return plan.algo.view.length if isinstance(plan.algo.view, SequencesView) else 1


def item_stride(plan: Plan) -> int:
    """Steps between the beginnings of two items in the replay."""
    return plan.algo.view.stride if isinstance(plan.algo.view, SequencesView) else 1


def known_updates(plan: Plan) -> float:
    """Updates of the whole run; infinite while its end is a number of epochs, whose steps are not counted yet."""
    return math.inf if plan.until.epochs is not None else total_updates(plan)


def total_updates(plan: Plan) -> int:
    """Updates of the whole run, if it ends by `until.steps`."""
    start = 0 if isinstance(plan.replay, FreshReplay | DatasetReplay) else plan.algo.learn_start_steps
    return math.floor(updates_per_step(plan) * max(0, plan.until.steps - start))
