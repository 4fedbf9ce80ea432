"""The order of transitions in an epoch: a pure function of seed, epoch and position.

Shuffled on two levels: the shards of every queue are in random order, and so are the transitions of a shard. Both
orders are new in every epoch. All queues are read at the same time, each at the pace at which it ends with the epoch,
so that any few hundred transitions come from every queue in proportion. Positions count on through the epochs: position
p is transition p % len(order) of epoch p // len(order), so a position is all that has to be saved, whatever the number
of learners.

Shapes: N positions, Q queues.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from qfleet.data import Array
from qfleet.datasets.epochs.queues import make_queues

BLOCK = 1_024  # positions whose queues are found together
_SHARDS = 0  # stream of the order of shards
_ROWS = 1  # stream of the order in a shard


@lru_cache(maxsize=256)
def interleaved(counts: tuple[int, ...]) -> tuple[Array, Array]:
    """A number of transitions from each queue, mixed as evenly as possible: the queue of each, and its number in it."""
    queues = np.repeat(np.arange(len(counts)), counts)
    numbers = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((numbers + 0.5) / np.asarray(counts)[queues], kind="stable")
    return queues[order], numbers[order]


@dataclass(eq=False)
class EpochOrder:
    """The order of the transitions of several shards; it holds the permutations of those that are open."""

    counts: tuple[int, ...]  # transitions of each shard
    seed: int
    open_shards: int = 1  # of how many shards transitions are mixed
    groups: tuple[int, ...] = ()  # the learner that each shard was prepared for, if they were
    queues: list[Array] = field(init=False)
    sizes: Array = field(init=False)  # [Q], transitions of each queue
    _permutations: "OrderedDict[tuple[int, ...], Array]" = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise ValueError("every shard has at least one transition")
        self.queues = make_queues(self.counts, self.open_shards, self.groups)
        self.sizes = np.array([sum(self.counts[shard] for shard in queue) for queue in self.queues])
        self._num = sum(self.counts)
        self._num_blocks = -(-self._num // BLOCK)
        blocks = np.arange(self._num_blocks + 1)
        self._ends = sum((self._before(blocks, size) for size in self.sizes.tolist()), np.zeros(len(blocks), np.int64))

    def __len__(self) -> int:
        """The number of transitions in an epoch."""
        return self._num

    def locate(self, positions: Array) -> tuple[Array, Array]:
        """The shard and the number in it of the transitions at these positions, all [N]."""
        queues, numbers = self.places(positions)
        return self.find(positions // self._num, queues, numbers)

    def find(self, epochs: Array, queues: Array, numbers: Array) -> tuple[Array, Array]:
        """The shard and the number in it of transitions with these numbers in the epochs of queues, all [N]."""
        shards = np.empty(len(queues), np.int64)
        rows = np.empty(len(queues), np.int64)
        for epoch in np.unique(epochs).tolist():
            for queue in range(len(self.queues)):
                here = np.flatnonzero((queues == queue) & (epochs == epoch))
                if len(here):
                    shards[here], rows[here] = self._locate_in(epoch, queue, numbers[here])
        return shards, rows

    def places(self, positions: Array) -> tuple[Array, Array]:
        """The queue of the transitions at these positions, and their number in its epoch, all [N]."""
        within = positions % self._num
        blocks = np.searchsorted(self._ends, within, side="right") - 1
        queues = np.empty(len(positions), np.int64)
        numbers = np.empty(len(positions), np.int64)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            before = self._before(block, self.sizes)
            counts = self._before(block + 1, self.sizes) - before
            own, number = interleaved(tuple(counts.tolist()))
            at = within[here] - self._ends[block]
            queues[here] = own[at]
            numbers[here] = number[at] + before[own[at]]
        return queues, numbers

    def consecutive(self, begin: int, num: int) -> tuple[Array, list[list[tuple[int, Array]]]]:
        """The queue of `num` consecutive positions of one epoch [N], and of every queue its shards and rows, in order.

        As `locate` says, but much sooner: a queue's transitions follow each other in the permutations of its shards.
        """
        epoch, place = divmod(begin, self._num)
        if place + num > self._num:
            raise ValueError("these positions are not of one epoch")
        queues = np.empty(num, np.int64)
        starts = np.full(len(self.queues), -1)
        filled = 0
        block = int(np.searchsorted(self._ends, place, side="right")) - 1
        while filled < num:
            before = self._before(block, self.sizes)
            own, number = interleaved(tuple((self._before(block + 1, self.sizes) - before).tolist()))
            at = place + filled - int(self._ends[block])
            size = min(len(own) - at, num - filled)
            queues[filled : filled + size] = own[at : at + size]
            if (starts < 0).any():
                names, first = np.unique(own[at : at + size], return_index=True)
                fresh = starts[names] < 0
                starts[names[fresh]] = (before[names] + number[at + first])[fresh]
            filled += size
            block += 1
        counts = np.bincount(queues, minlength=len(self.queues))
        ends = (starts + counts).tolist()
        return queues, [
            self._range(epoch, q, begin, end) for q, (begin, end) in enumerate(zip(starts, ends, strict=True))
        ]

    def _range(self, epoch: int, queue: int, begin: int, end: int) -> list[tuple[int, Array]]:
        """The shards and rows of the transitions [begin, end) of a queue."""
        found = []
        start = 0
        for shard in self.shards_of(epoch, queue).tolist():
            stop = start + self.counts[shard]
            if max(begin, start) < min(end, stop):
                found.append((shard, self.rows_of(epoch, shard)[max(begin - start, 0) : end - start]))
            start = stop
        return found

    def _before(self, block: Array | int, size: Array | int) -> Array:
        """How many of a queue's transitions come before a block: in proportion, rounded."""
        found: Array = (2 * block * size + self._num_blocks) // (2 * self._num_blocks)  # type: ignore[assignment]
        return found

    def _locate_in(self, epoch: int, queue: int, numbers: Array) -> tuple[Array, Array]:
        ordered = self.shards_of(epoch, queue)
        ends = np.cumsum(np.asarray(self.counts)[ordered])
        at = np.searchsorted(ends, numbers, side="right")
        rows = np.empty(len(numbers), np.int64)
        for number in np.unique(at).tolist():
            here = at == number
            shard = int(ordered[number])
            rows[here] = self.rows_of(epoch, shard)[numbers[here] - (ends[number] - self.counts[shard])]
        return ordered[at], rows

    def shards_of(self, epoch: int, queue: int) -> Array:
        """The shards of a queue in the order of an epoch."""
        return self.queues[queue][self._permutation(len(self.queues[queue]), _SHARDS, epoch, queue)]

    def rows_of(self, epoch: int, shard: int) -> Array:
        """The transitions of a shard in the order of an epoch."""
        return self._permutation(self.counts[shard], _ROWS, epoch, shard)

    def _permutation(self, num: int, *key: int) -> Array:
        if key not in self._permutations:
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, *key])))
            self._permutations[key] = rng.permutation(num)
        self._permutations.move_to_end(key)
        while len(self._permutations) > 4 * len(self.queues):
            self._permutations.popitem(last=False)
        return self._permutations[key]

    def open_at(self, position: int) -> list[int]:
        """The shard of every queue that is open at a position, or was just finished."""
        return [self._opened(*divmod(position, self._num), queue)[0] for queue in range(len(self.queues))]

    def next_after(self, position: int) -> list[tuple[int, int]]:
        """The shard that every queue opens next, and the queue; those that are needed first come first."""
        found = []
        for queue in range(len(self.queues)):
            _, following, left = self._opened(*divmod(position, self._num), queue)
            found.append((left / int(self.sizes[queue]), following, queue))
        return [(shard, queue) for _, shard, queue in sorted(found)]

    def _opened(self, epoch: int, place: int, queue: int) -> tuple[int, int, int]:
        """A queue's open shard, the one that follows it, and how many transitions are left in the open one."""
        number = int(self.sizes[queue]) * place // self._num
        ordered = self.shards_of(epoch, queue)
        ends = np.cumsum(np.asarray(self.counts)[ordered])
        at = int(np.searchsorted(ends, number, side="right"))
        following = ordered[at + 1] if at + 1 < len(ordered) else self.shards_of(epoch + 1, queue)[0]
        return int(ordered[at]), int(following), int(ends[at]) - number
