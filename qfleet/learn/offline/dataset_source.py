"""Batches from a data set, in epochs: every item (a step, or a window) is used once per epoch. Shapes: N items.

Nothing acts. The source's clock is the number of items it has given away, its position: batches of any size leave
none out. `steps` of the run are the recorded steps that these items learn from.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from qfleet.data import Array, Batch, Rollout, Sequences, Spec, State
from qfleet.data.state_reader import saved_count
from qfleet.datasets.epochs import EpochOrder, owners_of
from qfleet.datasets.format import open_dataset
from qfleet.learn.batch_source import StepRecorder
from qfleet.learn.offline.epoch_batches import EpochBatches
from qfleet.learn.offline.open_shards import make_order, open_shards
from qfleet.learn.offline.shard_cache import ShardCache
from qfleet.learn.offline.step_cutter import StepCutter
from qfleet.learn.offline.windows import WindowCutter, dataset_windows
from qfleet.plan.schema import DatasetReplay, Plan
from qfleet.replay import Replay, SequenceCut, make_n_step


@dataclass(eq=False)
class DatasetSource:
    """Cuts batches from the shards of a data set, in the seeded order of its epochs."""

    replay: Replay  # stays empty
    order: EpochOrder
    shards: ShardCache
    batches: EpochBatches
    batch_size: int
    whole: bool = True  # else several learners read their own parts of a batch: it has positions only
    position: int = 0  # items given away
    steps: int = 0  # that these items learn from
    recorder: StepRecorder | None = None  # never: nothing acts
    warnings: list[str] = field(default_factory=list)  # that nobody has read yet
    _counts_before: dict[str, int] = field(default_factory=dict)

    def insert(self, rollout: Rollout) -> None:
        """Nothing acts, so nothing is inserted."""
        raise TypeError("a data set does not grow while it is learned from")

    def seal(self, worker: int) -> int:
        """There are no actors that could be lost."""
        return 0

    def next_batch(self, in_flight_steps: int) -> Batch | Sequences:
        """The next items; a batch may begin in one epoch and end in the next."""
        begin = self.position
        self.position += self.batch_size
        self.steps += self.count_steps(begin)
        if self.whole:
            return self.batches.next(begin, self.batch_size)
        return positions_only(self.batches.in_batch_order(np.arange(begin, self.position)))

    def count_steps(self, begin: int) -> int:
        """The steps that the items from a position on learn from."""
        cutter = self.batches.cutter
        if not isinstance(cutter, WindowCutter):
            return self.position - begin
        return cutter.count_steps(*self.order.locate(np.arange(begin, self.position)))

    def owners_at(self, positions: Array, owners: Array, shares: tuple[float, ...]) -> Array:  # [N]
        """The learner that reads each position: as in `owners`, but as far as possible of own shards."""
        return owners_of(self.order, positions, owners, shares)

    def batch_at(self, positions: Array) -> Batch | Sequences:
        """The items at these positions, whose numbers are the ids of the batch."""
        return self.batches.batch_at(positions)

    def after_update(self, batch: Batch | Sequences, priority: Array) -> None:
        """Nothing to record: every item is used equally often."""

    def set_priorities(self, ids: Array, priority: Array) -> None:
        """Ignored, for the same reason."""

    def take_metrics(self) -> dict[str, float | None]:
        """Epochs so far, files opened and decoded since the last call, and the bytes of those that are open."""
        counts = {"shard_loads": self.shards.num_loads, "shards_decoded": self.shards.num_decoded}
        since = {name: count - self._counts_before.get(name, 0) for name, count in counts.items()}
        self._counts_before = counts
        mapped = self.shards.num_bytes(mapped=True)
        sizes = {"shard_bytes": self.shards.num_bytes() - mapped, "mapped_bytes": mapped}
        return {"epoch": self.position / len(self.order), **since, **sizes}

    def take_warnings(self) -> list[str]:
        """What a reader should know, since the last call."""
        found = self.warnings.copy()
        self.warnings.clear()
        return found

    def close(self) -> None:
        """Release the shards."""
        self.shards.close()
        self.replay.close()

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
    warnings: list[str] = []
    files = dataset.require_files(settings.split)
    shards = open_shards(dataset, files, recorded_spec(replay.spec), settings, warnings.append)
    n_step = make_n_step(plan)
    cutter: StepCutter | WindowCutter = StepCutter(shards, n_step)
    counts = None
    if isinstance(replay.cut, SequenceCut):
        windows = dataset_windows(dataset, files, replay.cut)
        counts = tuple(map(len, windows))
        cutter = WindowCutter(shards, windows, replay.cut, n_step, replay.spec.state[0])
    order = make_order(dataset, shards, settings, plan.learners.num, plan.seed, counts)
    batches = EpochBatches(order, shards, cutter)
    whole = plan.learners.num == 1
    return DatasetSource(replay, order, shards, batches, plan.algo.batch_size, whole, warnings=warnings)


def recorded_spec(spec: Spec) -> Spec:
    """The spec of what is recorded: no memory of a policy."""
    return replace(spec, state=())
