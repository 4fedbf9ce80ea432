"""Steps of several shards as one batch. Shapes: N items."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qfleet.data import Array, Batch, Spec
from qfleet.learn.offline.shard_cache import ShardCache
from qfleet.learn.offline.shards import DataShard
from qfleet.learn.offline.step_kernels import cut_rows
from qfleet.replay import NStepReturn
from qfleet.replay.cuts import empty_batch, flat_frames

Part = tuple[int, Array]  # a shard, and the numbers of steps of it


@dataclass(eq=False)
class StepCutter:
    """Cuts single steps with up to n rewards."""

    shards: ShardCache
    n_step: NStepReturn
    rows_per_item = 2  # observations of an item

    def cut(self, parts: Sequence[Part], places: Array, ids: Array) -> Batch:
        """The steps of all parts, laid end to end, as a batch in which each has its place."""
        spec = self.shards.spec
        batch = empty_batch(spec, len(ids), overlap=self.n_step.n == 1 and spec.stack > 1)
        rows, ends = np.empty((2, len(ids)), np.int64)
        if spec.masked:
            batch.mask, batch.next_mask = np.empty((2, len(ids), spec.num_actions), np.bool_)
        begin = 0
        for number, numbers in parts:
            chosen = places[begin : begin + len(numbers)]
            self.cut_shard(self.shards.shard(number), numbers, chosen, batch, (rows, ends))
            begin += len(numbers)
        batch.weight = np.ones(len(ids), np.float32)
        batch.ids = ids
        return batch

    def cut_shard(
        self, shard: DataShard, numbers: Array, places: Array, batch: Batch, rows: tuple[Array, Array]
    ) -> None:
        """Write steps of one shard to these places of the batch, and where they begin and end."""
        store = shard.store
        columns = (store.frames, store.table, store.heads, store.action, store.reward, store.discount, store.last)
        obs, next_obs = flat_frames(batch, store.frames.dtype)
        out = (obs, batch.action, batch.reward, batch.discount, next_obs, *rows)
        cut_rows(columns, shard.items, numbers, places, self.n_step.numbers, self.spec.stack, out)
        if store.mask is not None and batch.mask is not None and batch.next_mask is not None:
            batch.mask[places] = store.mask[rows[0][places], 0]
            batch.next_mask[places] = store.mask[rows[1][places], 0]

    @property
    def spec(self) -> Spec:
        """The spec of the observations."""
        return self.shards.spec
