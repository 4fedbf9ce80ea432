"""The order of transitions in an epoch: a pure function of seed, epoch and position.

Shuffled on two levels: the shards of an epoch are in random order, a few at a time are open, and the transitions of all
open shards are mixed. Both orders are new in every epoch. Positions count on through the epochs: position p is
transition p % len(order) of epoch p // len(order), so a position is all that has to be saved, whatever the number of
learners.
"""

from dataclasses import dataclass, field

import numpy as np

from qfleet.data import Array

_SHARDS = 0  # stream of the order of shards
_ROWS = 1  # stream of the order in a group of open shards


def owners_by_shard(owners: Array, shards: Array) -> Array:  # [N], [N] -> [N]
    """The same number of transitions for each learner, but neighbours in as few shards as possible."""
    found = np.empty_like(owners)
    found[np.argsort(shards, kind="stable")] = np.sort(owners)
    return found


@dataclass(eq=False)
class EpochOrder:
    """The order of the transitions of several shards; it holds the permutation of one group of open shards."""

    counts: tuple[int, ...]  # transitions of each shard
    seed: int
    open_shards: int = 1  # most shards whose transitions are mixed
    _cached: tuple[tuple[int, int], Array] = field(default=((-1, -1), np.zeros(0, np.int64)))

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise ValueError("every shard has at least one transition")

    def __len__(self) -> int:
        """The number of transitions in an epoch."""
        return sum(self.counts)

    def locate(self, positions: Array) -> tuple[Array, Array]:
        """The shard and the number in it of the transitions at these positions, all [N]."""
        shards = np.empty(len(positions), np.int64)
        rows = np.empty(len(positions), np.int64)
        epochs = positions // len(self)
        for epoch in np.unique(epochs).tolist():
            chosen = np.flatnonzero(epochs == epoch)
            self._locate_in(epoch, positions[chosen] - epoch * len(self), chosen, shards, rows)
        return shards, rows

    def _locate_in(self, epoch: int, places: Array, chosen: Array, shards: Array, rows: Array) -> None:
        groups = self.groups(epoch)
        ends = self._ends(groups)
        numbers = np.searchsorted(ends, places, side="right")
        for number in np.unique(numbers).tolist():
            here = numbers == number
            counts = np.asarray(self.counts)[groups[number]]
            begins = np.cumsum(counts) - counts
            mixed = self.mixed_order(epoch, number)[places[here] - (ends[number] - counts.sum())]
            at = np.searchsorted(begins, mixed, side="right") - 1
            shards[chosen[here]] = groups[number][at]
            rows[chosen[here]] = mixed - begins[at]

    def groups(self, epoch: int) -> list[Array]:
        """The shards in the order of an epoch, in groups of nearly equal size that are open at the same time."""
        num = -(-len(self.counts) // self.open_shards)
        return np.array_split(self._rng(_SHARDS, epoch).permutation(len(self.counts)), num)

    def shards_after(self, position: int) -> tuple[list[int], list[int]]:
        """The shards that are open at a position, and those that are opened next."""
        epoch, place = divmod(position, len(self))
        groups = self.groups(epoch)
        number = int(np.searchsorted(self._ends(groups), place, side="right"))
        following = groups[number + 1] if number + 1 < len(groups) else self.groups(epoch + 1)[0]
        return groups[number].tolist(), following.tolist()

    def mixed_order(self, epoch: int, number: int) -> Array:
        """The transitions of one group of shards, laid end to end, in the order of an epoch."""
        if self._cached[0] != (epoch, number):
            num = int(np.asarray(self.counts)[self.groups(epoch)[number]].sum())
            self._cached = ((epoch, number), self._rng(_ROWS, epoch, number).permutation(num))
        return self._cached[1]

    def _ends(self, groups: list[Array]) -> Array:
        return np.cumsum([np.asarray(self.counts)[group].sum() for group in groups])

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, *key])))
