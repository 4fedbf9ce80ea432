"""Batches from a data set, in epochs: every item (a step, or a window) is used once per epoch. Shapes: N items.

Nothing acts. The source's clock is the number of items it has given away, its position: batches of any size leave
none out. `steps` of the run are the recorded steps that these items learn from.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from qfleet.data import Array, Batch, Rollout, Sequences, Spec, State
from qfleet.data.state_reader import saved_count
from qfleet.datasets.epochs import EpochOrder
from qfleet.datasets.format import Dataset, open_dataset
from qfleet.errors import UsageError
from qfleet.learn.batch_split import join_batches
from qfleet.learn.offline.items import DatasetItems, make_items
from qfleet.learn.offline.shards import ShardCache
from qfleet.plan.schema import DatasetReplay, Plan
from qfleet.replay import Replay, Store, make_n_step


@dataclass(eq=False)
class DatasetSource:
    """Cuts batches from the shards of a data set, in the seeded order of its epochs."""

    replay: Replay  # stays empty
    order: EpochOrder
    shards: ShardCache
    items: DatasetItems
    batch_size: int
    whole: bool = True  # else several learners read their own parts of a batch: it has positions only
    position: int = 0  # items given away
    steps: int = 0  # that these items learn from
    _loads_before: int = field(default=0)

    def insert(self, rollout: Rollout) -> None:
        """Nothing acts, so nothing is inserted."""
        raise TypeError("a data set does not grow while it is learned from")

    def seal(self, worker: int) -> int:
        """There are no actors that could be lost."""
        return 0

    def next_batch(self, in_flight_steps: int) -> Batch | Sequences:
        """The next items; a batch may begin in one epoch and end in the next."""
        positions = np.arange(self.position, self.position + self.batch_size)
        places = self.order.locate(positions)
        self.position += self.batch_size
        self.steps += self.items.count_steps(*places)
        return self._batch(positions, *places) if self.whole else positions_only(positions)

    def shards_at(self, positions: Array) -> Array:  # [N]
        """The shards in which the items at these positions are."""
        return self.order.locate(positions)[0]

    def batch_at(self, positions: Array) -> Batch | Sequences:
        """The items at these positions, whose numbers are the ids of the batch."""
        return self._batch(positions, *self.order.locate(positions))

    def _batch(self, positions: Array, shards: Array, rows: Array) -> Batch | Sequences:
        first = int(shards[0])
        if (shards == first).all():
            return self._cut(first, rows, positions)
        chosen = [np.flatnonzero(shards == shard) for shard in np.unique(shards).tolist()]
        parts = [self._cut(int(shards[part[0]]), rows[part], positions[part]) for part in chosen]
        return join_batches(parts, np.argsort(np.concatenate(chosen)))

    def _cut(self, number: int, rows: Array, ids: Array) -> Batch | Sequences:
        return self.items.cut(self.shards.shard(number), number, rows, ids)

    def after_update(self, batch: Batch | Sequences, priority: Array) -> None:
        """Nothing to record: every item is used equally often."""

    def set_priorities(self, ids: Array, priority: Array) -> None:
        """Ignored, for the same reason."""

    def take_metrics(self) -> dict[str, float | None]:
        """Epochs so far, files decoded since the last call, and the bytes of those in memory."""
        loads = self.shards.num_loads - self._loads_before
        self._loads_before = self.shards.num_loads
        return {"epoch": self.position / len(self.order), "shard_loads": loads, "shard_bytes": self.shards.num_bytes()}

    def state_dict(self) -> State:
        """The position; `replay` is there for readers of all kinds of sources."""
        counts = {"steps": self.steps, "position": self.position, "batch_size": self.batch_size}
        return {**counts, "replay": self.replay.state_dict()}

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> None:
        """Restore the position; older versions knew steps only, which were all items."""
        self.steps = saved_count(state, "steps")
        self.position = saved_count(state, "position") if "position" in state else self.steps
        self.batch_size = saved_count(state, "batch_size", low=1)


def positions_only(positions: Array) -> Batch:
    """A batch that says which transitions are next, for learners that read them themselves."""
    none = np.zeros(0, np.float32)
    return Batch(none, np.zeros(0, np.int64), none, none, none, none, positions)


def make_dataset_source(plan: Plan, replay: Replay) -> DatasetSource:
    """The source of a plan with `replay.type=dataset` that learns in epochs."""
    settings = plan.replay
    if not isinstance(settings, DatasetReplay):
        raise TypeError("this plan learns from no data set")
    dataset = open_dataset(settings.path, settings.version)
    files = dataset.require_files(settings.split)
    cache = ShardCache(dataset, files, recorded_spec(replay.spec), settings.cache_bytes)
    require_open_shards(dataset, cache, settings.open_shards)
    items = make_items(dataset, files, replay.cut, make_n_step(plan), replay.spec)
    order = EpochOrder(items.counts, plan.seed, settings.open_shards)
    return DatasetSource(replay, order, cache, items, plan.algo.batch_size, whole=plan.learners.num == 1)


def recorded_spec(spec: Spec) -> Spec:
    """The spec of what is recorded: no memory of a policy."""
    return replace(spec, state=())


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
