"""The order of transitions in an epoch: a pure function of seed, epoch and position.

Shuffled on two levels: the shards of an epoch are in random order, and so are the transitions of each shard. Both
orders are new in every epoch. Positions count on through the epochs: position p is transition p % len(order) of epoch
p // len(order), so a position is all that has to be saved, whatever the number of learners.
"""

from dataclasses import dataclass, field

import numpy as np

from qfleet.data import Array

_SHARDS = 0  # stream of the order of shards
_ROWS = 1  # stream of the order in a shard


def learner_positions(begin: int, end: int, rank: int, num: int) -> Array:
    """The positions of [begin, end) that learner `rank` of `num` learns from: each belongs to exactly one.

    They are strided, as the parts of a batch are (`learn/batch_split.py`).
    """
    return np.arange(begin + rank, end, num)


@dataclass(eq=False)
class EpochOrder:
    """The order of the transitions of several shards; it holds one permutation of one shard at a time."""

    counts: tuple[int, ...]  # transitions of each shard
    seed: int
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
        order = self.shard_order(epoch)
        ends = np.cumsum(np.asarray(self.counts)[order])
        numbers = np.searchsorted(ends, places, side="right")
        for number in np.unique(numbers).tolist():
            shard = int(order[number])
            here = numbers == number
            begin = int(ends[number]) - self.counts[shard]
            shards[chosen[here]] = shard
            rows[chosen[here]] = self.row_order(epoch, shard)[places[here] - begin]

    def shard_order(self, epoch: int) -> Array:
        """The shards in the order of an epoch."""
        return self._rng(_SHARDS, epoch).permutation(len(self.counts))

    def row_order(self, epoch: int, shard: int) -> Array:
        """The transitions of a shard in the order of an epoch."""
        if self._cached[0] != (epoch, shard):
            self._cached = ((epoch, shard), self._rng(_ROWS, epoch, shard).permutation(self.counts[shard]))
        return self._cached[1]

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, *key])))
