"""Replay: what is remembered and what is learned from."""

import numpy as np

from qfleet.data import Spec
from qfleet.plan.schema import Plan, PrioritizedSampler
from qfleet.replay.replay import Replay
from qfleet.replay.samplers import Prioritized, Sampler, Uniform
from qfleet.replay.store import Store, ring_rows, row_bytes


def make_sampler(plan: Plan) -> Sampler:
    """The sampler the plan names."""
    match plan.replay.sampler:
        case PrioritizedSampler() as chosen:
            return Prioritized(
                plan.replay.capacity,
                alpha=chosen.alpha,
                beta_start=chosen.beta_start,
                beta_end=chosen.beta_end,
                beta_updates=chosen.beta_updates,
                eps=chosen.eps,
            )
        case _:
            return Uniform()


def make_replay(plan: Plan, spec: Spec, lanes: int, rng: np.random.Generator) -> Replay:
    """The replay the plan describes."""
    return Replay(
        spec,
        lanes,
        plan.replay.capacity,
        make_sampler(plan),
        rng,
        n_step=plan.algo.n_step,
        discount=plan.algo.discount,
        clip_reward=plan.env.clip_reward,
    )


__all__ = [
    "Prioritized",
    "Replay",
    "Sampler",
    "Store",
    "Uniform",
    "make_replay",
    "make_sampler",
    "ring_rows",
    "row_bytes",
]
