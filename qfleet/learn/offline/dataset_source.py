"""Batches from a data set, in epochs: every transition is used once per epoch. Shapes: N items.

Nothing acts. The source's clock is the number of transitions it has given away: that is `steps` of the run, and the
whole state.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qfleet.data import Array, Batch, Rollout, Sequences, State
from qfleet.data.state_reader import saved_count
from qfleet.datasets.epochs import EpochOrder
from qfleet.datasets.format import Dataset, open_dataset
from qfleet.errors import UsageError
from qfleet.learn.batch_source import StepRecorder
from qfleet.learn.offline.shards import ShardCache
from qfleet.plan.schema import DatasetReplay, Plan
from qfleet.replay import NStepReturn, Replay, StepCut, Store, make_n_step


@dataclass(eq=False)
class DatasetSource:
    """Cuts batches from the shards of a data set, in the seeded order of its epochs."""

    replay: Replay  # stays empty
    order: EpochOrder
    shards: ShardCache
    cut: StepCut
    n_step: NStepReturn
    batch_size: int
    whole: bool = True  # else several learners read their own parts of a batch: it has positions only
    steps: int = 0  # transitions given away: the position in the epochs
    recorder: StepRecorder | None = None  # never: nothing acts
    _loads_before: int = field(default=0)

    def insert(self, rollout: Rollout) -> None:
        """Nothing acts, so nothing is inserted."""
        raise TypeError("a data set does not grow while it is learned from")

    def seal(self, worker: int) -> int:
        """There are no actors that could be lost."""
        return 0

    def next_batch(self, in_flight_steps: int) -> Batch:
        """The next transitions; a batch may begin in one epoch and end in the next."""
        positions = np.arange(self.steps, self.steps + self.batch_size)
        self.steps += self.batch_size
        return self.batch_at(positions) if self.whole else positions_only(positions)

    def shards_at(self, positions: Array) -> Array:  # [N]
        """The shards in which the transitions at these positions are."""
        return self.order.locate(positions)[0]

    def batch_at(self, positions: Array) -> Batch:
        """The transitions at these positions, whose numbers are the ids of the batch."""
        shards, rows = self.order.locate(positions)
        first = int(shards[0])
        if (shards == first).all():
            return self._cut(first, rows, positions)
        chosen = [np.flatnonzero(shards == shard) for shard in np.unique(shards).tolist()]
        parts = [self._cut(int(shards[part[0]]), rows[part], positions[part]) for part in chosen]
        return joined(parts, np.argsort(np.concatenate(chosen)))

    def _cut(self, number: int, rows: Array, ids: Array) -> Batch:
        shard = self.shards.shard(number)
        return self.cut.cut(shard.store, shard.items[rows], self.n_step, np.ones(len(rows), np.float32), ids)

    def after_update(self, batch: Batch | Sequences, priority: Array) -> None:
        """Nothing to record: every transition is used equally often."""

    def take_metrics(self) -> dict[str, float | None]:
        """Epochs so far, files decoded since the last call, and the bytes of those in memory."""
        loads = self.shards.num_loads - self._loads_before
        self._loads_before = self.shards.num_loads
        return {"epoch": self.steps / len(self.order), "shard_loads": loads, "shard_bytes": self.shards.num_bytes()}

    def state_dict(self) -> State:
        """The position; `replay` is there for readers of all kinds of sources."""
        return {"steps": self.steps, "batch_size": self.batch_size, "replay": self.replay.state_dict()}

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> None:
        """Restore the position."""
        self.steps = saved_count(state, "steps")


def positions_only(positions: Array) -> Batch:
    """A batch that says which transitions are next, for learners that read them themselves."""
    none = np.zeros(0, np.float32)
    return Batch(none, np.zeros(0, np.int64), none, none, none, none, positions)


def joined(parts: list[Batch], order: Array) -> Batch:
    """Several batches as one, whose items are then taken in this order."""
    fields: dict[str, Any] = {}
    for name in Batch.__slots__:
        values = [getattr(part, name) for part in parts]
        fields[name] = None if values[0] is None else np.concatenate(values)[order]
    return Batch(**fields)


def make_dataset_source(plan: Plan, replay: Replay) -> DatasetSource:
    """The source of a plan with `replay.type=dataset`."""
    settings = plan.replay
    if not isinstance(settings, DatasetReplay) or not isinstance(replay.cut, StepCut):
        raise TypeError("this plan learns from no data set of single steps")
    dataset = open_dataset(settings.path, settings.version)
    files = dataset.require_files(settings.split)
    cache = ShardCache(dataset, files, replay.spec, settings.cache_bytes)
    require_open_shards(dataset, cache, settings.open_shards)
    order = EpochOrder(tuple(file.steps for file in files), plan.seed, settings.open_shards)
    size = plan.algo.batch_size
    return DatasetSource(replay, order, cache, replay.cut, make_n_step(plan), size, whole=plan.learners.num == 1)


def require_open_shards(dataset: Dataset, cache: ShardCache, num: int) -> None:
    """Refuse a cache that cannot hold the largest shards that may be open at the same time."""
    rows = sorted((file.rows for file in cache.files), reverse=True)[:num]
    need = sum(rows) * row_bytes(cache)
    if need > cache.max_bytes:
        raise UsageError(
            f"replay.cache_bytes={cache.max_bytes} is too small for {dataset.place.url}",
            f"Its {len(rows)} largest files take {need:,} bytes when they are decoded, and replay.open_shards={num}.",
            f"Use replay.cache_bytes={need} or more, fewer replay.open_shards, or prepare it with smaller files.",
        )


def row_bytes(cache: ShardCache) -> int:
    """Bytes of one decoded row."""
    return Store(cache.spec, 1, 1).row_bytes + 8
