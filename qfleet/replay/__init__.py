"""Replay buffer: store, samplers, and how batches are cut from stored rows."""

import copy

import numpy as np

from qfleet.data import Spec
from qfleet.plan import largest_n_step
from qfleet.plan.schema import (
    Algo,
    DatasetReplay,
    DuplicatesFilter,
    FreshReplay,
    NoBonus,
    Plan,
    PrioritizedSampler,
    SequencesView,
)
from qfleet.plan.schema import BufferReplay as Buffer
from qfleet.replay.custom_sampler import CheckedSampler, CustomSampler
from qfleet.replay.cuts import Cut, NStepReturn, SequenceCut, StepCut
from qfleet.replay.duplicates import DuplicateFilter
from qfleet.replay.mirror import Mirror
from qfleet.replay.packed import CompressionSavings
from qfleet.replay.replay import Replay, Span, queue_length, saved_spans
from qfleet.replay.samplers import Prioritized, Sampler, SamplerTotals, Uniform
from qfleet.replay.store import ALL, Store, frame_bytes, ring_rows
from qfleet.replay.tree import tree_levels


def make_cut(algo: Algo) -> Cut:
    """The cut that the plan needs: items are complete when the largest n that the plan can reach is."""
    n = largest_n_step(algo)
    if isinstance(algo.view, SequencesView):
        view = algo.view
        return SequenceCut(n, view.burn_in, view.length, view.stride, view.eta)
    return StepCut(n)


def make_n_step(plan: Plan) -> NStepReturn:
    """How the plan sums rewards at its end, when nothing is annealed. A bonus is added to clipped rewards."""
    clip = plan.env.clip_reward and isinstance(plan.algo.bonus, NoBonus)
    return NStepReturn(plan.algo.n_step, plan.algo.discount, clip, plan.algo.rescale)


def make_sampler(buffer: Buffer, items: int, custom: CustomSampler | None = None) -> Sampler:
    """The sampler that the plan names, or a copy of the user's own, for at most `items` items."""
    if custom is not None:
        return CheckedSampler(copy.deepcopy(custom))
    sampler = buffer.sampler
    if not isinstance(sampler, PrioritizedSampler):
        return Uniform()
    names = ("alpha", "beta_start", "beta_end", "beta_updates", "eps")
    return Prioritized(items, **{name: getattr(sampler, name) for name in names})


def make_replay(
    plan: Plan, spec: Spec, lanes: int, rng: np.random.Generator, custom: CustomSampler | None = None
) -> Replay:
    """The replay that the plan describes; for learning from fresh rows, one that holds only these."""
    # A bonus is added to clipped rewards, not clipped with them.
    clip = plan.env.clip_reward and isinstance(plan.algo.bonus, NoBonus)
    if isinstance(plan.replay, FreshReplay):
        cut: Cut = SequenceCut(1, 0, plan.replay.rows, plan.replay.rows)
        n_step = NStepReturn(1, plan.algo.discount, clip)
        return Replay(spec, lanes, plan.replay.rows * lanes, Uniform(), rng, cut=cut, n_step=n_step, values=True)
    cut = make_cut(plan.algo)
    if isinstance(plan.replay, DatasetReplay):  # it stays empty: batches are cut from the shards of the data set
        return Replay(spec, 1, 1, Uniform(), rng, cut=cut, n_step=make_n_step(plan))
    sampler = plan.replay.sampler
    chosen = plan.replay.filter
    filter = DuplicateFilter(chosen.copies, still=chosen.still) if isinstance(chosen, DuplicatesFilter) else None
    return Replay(
        spec,
        lanes,
        plan.replay.capacity,
        make_sampler(plan.replay, cut.items_in(plan.replay.capacity), custom),
        rng,
        cut=cut,
        n_step=make_n_step(plan),
        actor_priority=isinstance(sampler, PrioritizedSampler) and sampler.initial == "actor",
        filter=filter,
        gains=bool(spec.state) and not isinstance(plan.algo.bonus, NoBonus),
        compress=plan.replay.compress,
    )


__all__ = [
    "ALL",
    "CompressionSavings",
    "CustomSampler",
    "Cut",
    "Mirror",
    "NStepReturn",
    "Prioritized",
    "Replay",
    "Sampler",
    "SamplerTotals",
    "SequenceCut",
    "Span",
    "StepCut",
    "Store",
    "Uniform",
    "frame_bytes",
    "make_cut",
    "make_n_step",
    "make_replay",
    "queue_length",
    "ring_rows",
    "saved_spans",
    "tree_levels",
]
