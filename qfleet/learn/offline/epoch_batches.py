"""Cuts transitions of a data set, at positions of its epochs, into batches. Shapes: N positions, Q queues.

The items of a batch are in the order of their queues. Batches that follow each other are found together, and cut
together if they are small: one call then cuts what all of them have of a shard. Neither changes what a batch holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from qfleet.data import Array, Batch, Sequences
from qfleet.datasets.epochs import EpochOrder
from qfleet.learn.batch_split import select_items
from qfleet.learn.offline.shard_cache import ShardCache
from qfleet.learn.offline.step_cutter import Part

CHUNK_ITEMS = 8_192  # that are found together
CUT_ITEMS = 2_048  # that are cut together, so that they stay near the processor
CUT_BYTES = 4 << 20  # of their observations


@dataclass(eq=False)
class Chunk:
    """Batches of `size` consecutive positions each, of one epoch."""

    begin: int
    size: int
    ids: Array  # [N], the positions, in the order of the batches
    counts: Array  # [batches, Q], how many transitions of each queue a batch has
    parts: list[list[Part]]  # of each queue
    ready: list[Batch | Sequences] = field(default_factory=list)  # those that were cut last
    ready_at: int = 0  # the number of the first of them

    def parts_of(self, first: int, end: int) -> list[Part]:
        """The shards and rows of the batches [first, end)."""
        begins = self.counts[:first].sum(axis=0).tolist()
        ends = self.counts[:end].sum(axis=0).tolist()
        found: list[Part] = []
        for parts, begin, stop in zip(self.parts, begins, ends, strict=True):
            found += sliced(parts, begin, stop)
        return found

    def places(self, first: int, end: int) -> Array:
        """The place of each of these items, laid end to end by queues, in the batches, which follow each other."""
        own = self.counts[first:end]
        counts = own.ravel()
        starts = (np.cumsum(counts) - counts).reshape(own.shape).T.ravel()  # by queue and batch
        counts = own.T.ravel()
        found: Array = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(len(own) * self.size)
        return found


def sliced(parts: Sequence[Part], begin: int, end: int) -> list[Part]:
    """Items [begin, end) of these parts laid end to end."""
    if len(parts) == 1:
        return [(parts[0][0], parts[0][1][begin:end])] if begin < end else []
    found = []
    start = 0
    for shard, rows in parts:
        if max(begin, start) < min(end, start + len(rows)):
            found.append((shard, rows[max(begin - start, 0) : end - start]))
        start += len(rows)
    return found


class Cutter(Protocol):
    """Cuts items of shards."""

    @property
    def rows_per_item(self) -> int:
        """Observations of an item."""

    def cut(self, parts: Sequence[Part], places: Array, ids: Array) -> Batch | Sequences:
        """The items of all parts, laid end to end, as a batch in which each has its place."""


@dataclass(eq=False)
class EpochBatches:
    """Batches at positions; it reads the shards that come next ahead of need."""

    order: EpochOrder
    shards: ShardCache
    cutter: Cutter
    _chunk: Chunk | None = None
    _queues: set[int] = field(default_factory=set)  # that were read since shards were wanted last
    _loads: int = -1  # when shards were wanted last

    def next(self, begin: int, size: int) -> Batch | Sequences:
        """The batch of the `size` positions from `begin` on."""
        left = (len(self.order) - begin % len(self.order)) // size
        if left == 0:  # it begins in one epoch and ends in the next
            return self.batch_at(np.arange(begin, begin + size))
        chunk = self._chunk
        number, rest = divmod(begin - chunk.begin, size) if chunk is not None else (-1, 0)
        if chunk is None or chunk.size != size or rest or not 0 <= number < len(chunk.counts):
            number = 0
            chunk = self._chunk = self.find(begin, size, min(left, max(1, CHUNK_ITEMS // size)))
        if not 0 <= number - chunk.ready_at < len(chunk.ready):
            self.make_ready(chunk, number)
        return chunk.ready[number - chunk.ready_at]

    def find(self, begin: int, size: int, num: int) -> Chunk:
        """The next `num` batches."""
        queues, parts = self.order.consecutive(begin, num * size)
        keys = np.repeat(np.arange(num) * len(parts), size) + queues
        ids = begin + np.argsort(keys.astype(np.int32), kind="stable")
        return Chunk(begin, size, ids, np.bincount(keys, minlength=num * len(parts)).reshape(num, -1), parts)

    def make_ready(self, chunk: Chunk, first: int) -> None:
        """Cut the batch with this number, and others that follow it."""
        size = chunk.size
        num = max(1, min(CUT_BYTES // self.batch_bytes(size), CUT_ITEMS // size))
        end = min(len(chunk.counts), first + num)
        ids = chunk.ids[first * size : end * size]
        whole = self.cutter.cut(chunk.parts_of(first, end), chunk.places(first, end), ids)
        chunk.ready_at = first
        chunk.ready = divided(whole, size)
        self.read_ahead(np.flatnonzero(chunk.counts[first:end].sum(axis=0)), chunk.begin + end * size - 1)

    def batch_bytes(self, size: int) -> int:
        """Bytes of the observations of a batch."""
        spec = self.shards.spec
        return self.cutter.rows_per_item * size * int(np.prod(spec.input_shape)) * np.dtype(spec.dtype).itemsize

    def batch_at(self, positions: Array) -> Batch | Sequences:
        """The transitions at these positions, whose numbers are the ids of the batch."""
        queues, numbers = self.order.places(positions)
        shards, rows = self.order.find(positions // len(self.order), queues, numbers)
        by_queue = np.argsort(queues, kind="stable")
        shards = shards[by_queue]
        ends = np.append(np.flatnonzero(np.diff(shards)) + 1, len(shards))
        pieces = np.split(rows[by_queue], ends[:-1])
        parts = list(zip(shards[ends - 1].tolist(), pieces, strict=True))
        batch = self.cutter.cut(parts, np.arange(len(positions)), positions[by_queue])
        self.read_ahead(np.unique(queues), int(positions.max()))
        return batch

    def in_batch_order(self, positions: Array) -> Array:  # [N]
        """These positions in the order of a batch."""
        return positions[np.argsort(self.order.places(positions)[0], kind="stable")]

    def read_ahead(self, queues: Array, position: int) -> None:
        """When a shard was opened, begin to read those that the same queues open next."""
        self._queues.update(queues.tolist())
        if self.shards.num_loads != self._loads:
            self._loads = self.shards.num_loads
            self.shards.read_ahead([shard for shard, queue in self.order.next_after(position) if queue in self._queues])
            self._queues.clear()


def divided(whole: Batch | Sequences, size: int) -> list[Batch | Sequences]:
    """Consecutive items of a batch as batches of `size` items."""
    if isinstance(whole, Sequences):
        return [select_items(whole, slice(begin, begin + size)) for begin in range(0, len(whole.ids), size)]
    arrays = {name: getattr(whole, name) for name in Batch.__slots__}
    known = {name: array for name, array in arrays.items() if array is not None}
    starts = range(0, len(whole.ids), size)
    return [Batch(**{name: array[begin : begin + size] for name, array in known.items()}) for begin in starts]
