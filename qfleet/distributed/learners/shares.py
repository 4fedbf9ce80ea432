"""Shares of a batch: which learner gets which items, and the weight of its gradient. No IO. Shapes: N items."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from qfleet.data import Array
from qfleet.replay import SamplerTotals

SPEED_WEIGHT = 0.1
BALANCE_UPDATES = 50
MIN_SHARE_CHANGE = 0.1
SLOW_FRACTION = 0.6  # of the fastest learner's speed: slower ones are logged


@lru_cache(maxsize=64)
def assign_items(items: int, shares: tuple[float, ...]) -> Array:  # [N]
    """The rank of each item: interleaved as evenly as the shares allow, so that all ranks get items of all ages.

    Every rank gets at least one item: a learner without any would make no gradient to wait for.
    """
    learners = len(shares)
    if len(set(shares)) == 1:
        return np.arange(items) % learners
    wanted = np.asarray(shares, float) / sum(shares)
    got = np.zeros(learners)
    owners = np.empty(items, np.int64)
    for item in range(items):
        missing = np.flatnonzero(got == 0)
        behind = wanted * (item + 1) - got
        owners[item] = rank = int(missing[0] if len(missing) >= items - item else np.argmax(behind))
        got[rank] += 1
    return owners


def share_of_batch(owners: Array, rank: int, learners: int) -> float:
    """The weight of this rank's mean gradient in the average over all ranks: 1 for equal shares."""
    return float(np.count_nonzero(owners == rank)) * learners / len(owners)


class LearnerSpeeds:
    """Moving means of the learners' speeds, and the shares that follow from them every `BALANCE_UPDATES`."""

    def __init__(self, num: int, *, balance: bool) -> None:
        self.num = num
        self.balance = balance
        self.shares = (1.0,) * num  # by rank, the mean is 1
        self.speeds: list[float | None] = [None] * num  # items per second
        self.updates = 0
        self.slow: set[int] = set()  # ranks that were slow at the last check

    def note(self, rank: int, items: int, seconds: float) -> None:
        """Add one measurement of a rank."""
        now = items / max(seconds, 1e-9)
        before = self.speeds[rank]
        self.speeds[rank] = now if before is None else before + SPEED_WEIGHT * (now - before)

    def rebalance(self) -> list[tuple[int, float]]:
        """Count an update and set new shares if due; ranks that have become slow, with speeds relative to the best."""
        self.updates += 1
        known = [speed for speed in self.speeds if speed is not None]
        if self.updates % BALANCE_UPDATES or len(known) < self.num:
            return []
        if self.balance:
            self.set_shares(known)
        slow = {rank: speed / max(known) for rank, speed in enumerate(known) if speed <= SLOW_FRACTION * max(known)}
        fresh = [(rank, part) for rank, part in slow.items() if rank not in self.slow]
        self.slow = set(slow)
        return fresh

    def set_shares(self, known: list[float]) -> None:
        """Set shares by speed, if one of them changes by a tenth or more."""
        mean = sum(known) / self.num
        fair = tuple(speed / mean for speed in known)
        if max(abs(new - old) / old for new, old in zip(fair, self.shares, strict=True)) >= MIN_SHARE_CHANGE:
            self.shares = fair


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Totals over the replays of all actor-learners, and the largest importance weight in their batches."""

    learners: int
    items: int
    mass: float
    top: float


def weight_scale(items: int, mass: float, own: SamplerTotals) -> float:
    """The factor from an actor-learner's importance weights to those of one replay with these totals."""
    return float((items * own.mass / (mass * own.items)) ** -own.beta)


def totals_of(replays: Sequence[SamplerTotals]) -> BatchTotals:
    """The totals of all replays."""
    items = sum(replay.items for replay in replays)
    mass = sum(replay.mass for replay in replays)
    top = max(weight_scale(items, mass, replay) * replay.top for replay in replays)
    return BatchTotals(len(replays), items, mass, top)


def share_of_replay(totals: BatchTotals, own: SamplerTotals) -> float:
    """The weight of an actor-learner's mean gradient in the average over all of them.

    As if items were sampled from all replays in proportion to their priority mass: an actor-learner counts by its part
    of the mass, and its importance weights, which were divided by their largest, are scaled to the largest of all.
    """
    part = own.mass / totals.mass
    return totals.learners * part * weight_scale(totals.items, totals.mass, own) * own.top / totals.top


KnownPriorities = tuple[Array, Array]  # ids and their priorities


def join_priorities(ids: Array, owners: Array, own: Array, late: list[KnownPriorities]) -> Array:  # [N]
    """The priorities of a batch, NaN where they are missing; those found in `late` are removed from it."""
    priority = np.full(len(ids), np.nan, np.float32)
    priority[owners == 0] = own
    for rank in range(1, int(owners.max(initial=0)) + 1):
        theirs = ids[owners == rank]
        at = next((at for at, (found, _) in enumerate(late) if np.array_equal(found, theirs)), None)
        if at is not None:
            priority[owners == rank] = late.pop(at)[1]
    return priority


def pieces_in_range(sizes: Sequence[int], begin: int, end: int) -> list[tuple[int, int]]:
    """The part [begin, end) of tensors of these sizes laid end to end: index of each tensor, and how many numbers."""
    cuts = np.clip(np.concatenate([[0], np.cumsum(sizes)]), begin, end)
    return [(at, int(length)) for at, length in enumerate(np.diff(cuts)) if length]
