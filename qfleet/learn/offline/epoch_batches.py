"""Cuts transitions of a data set, at positions of its epochs, into batches. Shapes: N positions.

The items of a batch are in the order of their shards, so that each shard's are cut in one call. Small batches are cut
several at a time. Neither changes what a batch holds.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qfleet.data import Array, Batch
from qfleet.datasets.epochs import EpochOrder
from qfleet.learn.offline.shard_cache import ShardCache
from qfleet.replay import NStepReturn, StepCut

CHUNK_ITEMS = 4_096
CHUNK_BYTES = 1 << 20  # of the observations in batches that are cut together


@dataclass(eq=False)
class EpochBatches:
    """Batches at positions; it reads the shards that come next ahead of need."""

    order: EpochOrder
    shards: ShardCache
    cut: StepCut
    n_step: NStepReturn
    _chunk: list[Batch] = field(default_factory=list)  # the next batches, the last one first
    _chunk_at: tuple[int, int] = (-1, 0)  # position of the next one, and its size
    _queues: set[int] = field(default_factory=set)  # that were read since shards were wanted last
    _loads: int = -1  # when shards were wanted last

    def next(self, begin: int, size: int) -> Batch:
        """The batch of the `size` positions from `begin` on."""
        if not self._chunk or self._chunk_at != (begin, size):
            num = self.batches_per_chunk(size)
            self._chunk = self.split(np.arange(begin, begin + num * size), num)[::-1]
        self._chunk_at = (begin + size, size)
        return self._chunk.pop()

    def batches_per_chunk(self, size: int) -> int:
        """How many batches are cut together."""
        spec = self.shards.spec
        if spec.stack > 1 or spec.masked:
            return 1
        item_bytes = 2 * int(np.prod(spec.obs)) * np.dtype(spec.dtype).itemsize
        return max(1, min(CHUNK_ITEMS, CHUNK_BYTES // item_bytes) // size)

    def split(self, positions: Array, num: int) -> list[Batch]:
        """The transitions at these positions as `num` batches of equal size."""
        queues, shards, rows = self.located(positions)
        by_shard = np.argsort(shards, kind="stable")
        whole = self.cut_sorted(shards[by_shard], rows[by_shard], positions[by_shard])
        self.read_ahead(queues, int(positions[-1]))
        if num == 1:
            return [whole]
        size = len(positions) // num
        by_batch = np.argsort(by_shard // size, kind="stable")
        names = [name for name in Batch.__slots__ if getattr(whole, name) is not None]
        taken = {name: getattr(whole, name).take(by_batch, axis=0) for name in names}
        return [
            Batch(**{name: array[begin : begin + size] for name, array in taken.items()})
            for begin in range(0, len(positions), size)
        ]

    def batch_at(self, positions: Array) -> Batch:
        """The transitions at these positions, whose numbers are the ids of the batch."""
        return self.split(positions, 1)[0]

    def in_shard_order(self, positions: Array) -> Array:  # [N]
        """These positions in the order of a batch."""
        return positions[np.argsort(self.located(positions)[1], kind="stable")]

    def located(self, positions: Array) -> tuple[Array, Array, Array]:
        """Queue, shard, and number in the shard."""
        queues, numbers = self.order.places(positions)
        return queues, *self.order.find(positions // len(self.order), queues, numbers)

    def cut_sorted(self, shards: Array, rows: Array, ids: Array) -> Batch:
        """Rows of shards, of which all of a shard follow each other."""
        ends = np.append(np.flatnonzero(np.diff(shards)) + 1, len(shards)).tolist()
        parts: list[tuple[Any, Array]] = []
        begin = 0
        for end in ends:
            shard = self.shards.shard(int(shards[begin]))
            parts.append((shard.store, shard.items[rows[begin:end]]))
            begin = end
        return self.cut.cut_parts(parts, self.n_step, ids)

    def read_ahead(self, queues: Array, position: int) -> None:
        """When a shard was opened, begin to read those that the same queues open next."""
        self._queues.update(np.unique(queues).tolist())
        if self.shards.num_loads != self._loads:
            self._loads = self.shards.num_loads
            self.shards.read_ahead([shard for shard, queue in self.order.next_after(position) if queue in self._queues])
            self._queues.clear()
