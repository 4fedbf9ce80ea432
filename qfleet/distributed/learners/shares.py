"""Who learns from which items of a batch, and how much that counts. No IO. Shapes: N items."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from qfleet.data import Array
from qfleet.replay import SamplerTotals

SPEED_WEIGHT = 0.1
BALANCE_UPDATES = 50
WORTH = 0.1
SLOW = 0.6  # of the fastest one's speed, and below


@lru_cache(maxsize=64)
def owners_of(items: int, shares: tuple[float, ...]) -> Array:  # [N]
    """Who learns from each item: in turns as even as the shares allow, so that everybody sees all ages that were drawn.

    Everybody gets one at least: a learner that has none would be waited for in vain.
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


def share_of(owners: Array, rank: int, learners: int) -> float:
    """How much this rank's mean gradient counts beside those of the others, which are averaged: 1 for equal parts."""
    return float(np.count_nonzero(owners == rank)) * learners / len(owners)


class LearnerSpeeds:
    """How fast learners are, and the shares that follow from it; a moving mean, looked at every so many updates."""

    def __init__(self, num: int, *, balance: bool) -> None:
        self.num = num
        self.balance = balance
        self.shares = (1.0,) * num  # by rank, the mean is 1
        self.speeds: list[float | None] = [None] * num  # items per second
        self.updates = 0
        self.slow: set[int] = set()  # ranks that were slow when they were last looked at

    def note(self, rank: int, items: int, seconds: float) -> None:
        """A rank computed so many items in so many seconds."""
        now = items / max(seconds, 1e-9)
        before = self.speeds[rank]
        self.speeds[rank] = now if before is None else before + SPEED_WEIGHT * (now - before)

    def settle(self) -> list[tuple[int, float]]:
        """After an update: new shares, if they follow speeds; who has become slow, beside the fastest one's speed."""
        self.updates += 1
        known = [speed for speed in self.speeds if speed is not None]
        if self.updates % BALANCE_UPDATES or len(known) < self.num:
            return []
        if self.balance:
            self.divide(known)
        slow = {rank: speed / max(known) for rank, speed in enumerate(known) if speed <= SLOW * max(known)}
        fresh = [(rank, part) for rank, part in slow.items() if rank not in self.slow]
        self.slow = set(slow)
        return fresh

    def divide(self, known: list[float]) -> None:
        """Shares by speed, if those there are are off by a tenth."""
        mean = sum(known) / self.num
        fair = tuple(speed / mean for speed in known)
        if max(abs(new - old) / old for new, old in zip(fair, self.shares, strict=True)) >= WORTH:
            self.shares = fair


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """What all bundles hold together, and the largest importance weight among their batches."""

    learners: int
    items: int
    mass: float
    top: float


def lift(items: int, mass: float, own: SamplerTotals) -> float:
    """What a bundle's importance weights are multiplied by, to be those of one replay with so much in it."""
    return float((items * own.mass / (mass * own.items)) ** -own.beta)


def totals_of(stocks: Sequence[SamplerTotals]) -> BatchTotals:
    """All bundles together."""
    items = sum(stock.items for stock in stocks)
    mass = sum(stock.mass for stock in stocks)
    return BatchTotals(len(stocks), items, mass, max(lift(items, mass, stock) * stock.top for stock in stocks))


def share_in(totals: BatchTotals, own: SamplerTotals) -> float:
    """How much a bundle's mean gradient counts beside those of the others, which are averaged.

    As if items were drawn from all replays in proportion to their part of the whole mass: a bundle counts by its part
    of the mass, and its weights, which its batch had divided by their largest, are put on the scale of all.
    """
    part = own.mass / totals.mass
    return totals.learners * part * lift(totals.items, totals.mass, own) * own.top / totals.top


Known = tuple[Array, Array]  # ids and their priorities


def joined(ids: Array, owners: Array, own: Array, late: list[Known]) -> Array:  # [N]
    """The priorities of a batch as far as they are known; what was found of it is taken out of `late`."""
    priority = np.full(len(ids), np.nan, np.float32)
    priority[owners == 0] = own
    for rank in range(1, int(owners.max(initial=0)) + 1):
        theirs = ids[owners == rank]
        at = next((at for at, (found, _) in enumerate(late) if np.array_equal(found, theirs)), None)
        if at is not None:
            priority[owners == rank] = late.pop(at)[1]
    return priority


def pieces_of(sizes: Sequence[int], begin: int, end: int) -> list[tuple[int, int]]:
    """What the numbers [begin, end) have of tensors of these sizes, laid end to end: which tensor, and how many."""
    cuts = np.clip(np.concatenate([[0], np.cumsum(sizes)]), begin, end)
    return [(at, int(length)) for at, length in enumerate(np.diff(cuts)) if length]
