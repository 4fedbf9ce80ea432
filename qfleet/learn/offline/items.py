"""What an item of a data set is: a single step, or a window of steps. Shapes: N items, W windows of a file.

Both are cut from decoded files by what cuts batches from the replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qfleet.data import Array, Batch, Sequences, Spec
from qfleet.datasets.format import DataFile, Dataset, IndexRow
from qfleet.learn.offline.shards import DataShard
from qfleet.replay import Cut, NStepReturn, SequenceCut, StepCut


class DatasetItems(Protocol):
    """The items of several data files."""

    @property
    def counts(self) -> tuple[int, ...]:
        """The items of each file."""

    def count_steps(self, shards: Array, numbers: Array) -> int:
        """The recorded steps that these items [N] learn from."""

    def cut(self, shard: DataShard, shard_number: int, numbers: Array, ids: Array) -> Batch | Sequences:
        """These items of a file as a batch."""


@dataclass(frozen=True, eq=False)
class StepItems:
    """Every step is an item."""

    counts: tuple[int, ...]
    step_cut: StepCut
    n_step: NStepReturn

    def count_steps(self, shards: Array, numbers: Array) -> int:
        """As many as items."""
        return len(numbers)

    def cut(self, shard: DataShard, shard_number: int, numbers: Array, ids: Array) -> Batch:
        """These steps of a file as a batch."""
        weight = np.ones(len(numbers), np.float32)
        return self.step_cut.cut(shard.store, shard.items[numbers], self.n_step, weight, ids)


@dataclass(frozen=True, eq=False)
class EpisodeWindows:
    """The windows of a file's episodes, in order: rows of the file, all [W]."""

    first: Array  # of the episode's first observation
    begin: Array  # of the first step that is learned from
    end: Array  # of the episode's final observation
    length: int  # steps that are learned from, unless the episode ends before

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.begin)

    @property
    def num_steps(self) -> Array:  # [W]
        """The steps that each window learns from."""
        found: Array = np.minimum(self.end - self.begin, self.length)
        return found


def episode_windows(first: Array, lengths: Array, length: int, stride: int) -> EpisodeWindows:
    """Windows that begin with the episode, then every `stride` steps until its last step is in one.

    `first` are the rows of the episodes' first observations, and `lengths` their numbers of steps.
    """
    counts = 1 + np.maximum(0, -(-(lengths - length) // stride))
    before = np.repeat(np.cumsum(counts) - counts, counts)
    number = np.arange(len(before)) - before  # of the window in its episode
    start = np.repeat(first, counts)
    return EpisodeWindows(start, start + number * stride, start + np.repeat(lengths, counts), length)


@dataclass(frozen=True, eq=False)
class WindowItems:
    """Windows are items: with a `stride` of `length` steps every step is in one of them."""

    windows: tuple[EpisodeWindows, ...]  # of each file
    sequence_cut: SequenceCut
    n_step: NStepReturn
    state_size: int

    @property
    def counts(self) -> tuple[int, ...]:
        """The windows of each file."""
        return tuple(map(len, self.windows))

    def count_steps(self, shards: Array, numbers: Array) -> int:
        """The steps that these windows learn from; one that is in two windows counts twice."""
        found = 0
        for shard in np.unique(shards).tolist():
            found += int(self.windows[shard].num_steps[numbers[shards == shard]].sum())
        return found

    def cut(self, shard: DataShard, shard_number: int, numbers: Array, ids: Array) -> Sequences:
        """These windows of a file as a batch."""
        own = self.windows[shard_number]
        places = (own.first[numbers], own.begin[numbers], own.end[numbers])
        return cut_windows(self.sequence_cut, shard, places, self.n_step, ids, self.state_size)


def cut_windows(
    cut: SequenceCut,
    shard: DataShard,
    places: tuple[Array, Array, Array],  # first, begin and end as in `EpisodeWindows`
    n_step: NStepReturn,
    ids: Array,
    state_size: int,
) -> Sequences:
    """Windows that never leave their episode: rows outside of it are blank, marked `last`, and not learned from.

    The memory is blank after a `last` row, so a burn-in that reaches back to the episode's beginning starts there with
    a memory of zeros, as who acts does. A longer episode's window begins with zeros too: no memory was recorded.
    """
    first, begin, end = places
    items = begin - cut.burn_in  # a row before the file is read from its end, and blanked
    batch = cut.cut(shard.store, items, n_step, np.ones(len(items), np.float32), ids)
    rows = items + np.arange(cut.rows)[:, None]
    outside = (rows < first) | (rows > end)  # [rows, N]
    batch.obs[outside] = 0
    batch.action[outside] = 0
    batch.gain[outside] = 0.0
    batch.last[outside] = True
    if batch.mask is not None:
        batch.mask[outside] = True
    learned = outside[cut.burn_in : cut.burn_in + cut.length]
    batch.reward[learned] = 0.0
    batch.discount[learned] = 0.0
    own_rows = np.broadcast_to(np.arange(cut.burn_in, cut.burn_in + cut.length)[:, None], learned.shape)
    batch.ahead[learned] = own_rows[learned]
    batch.state = np.zeros((len(items), state_size), np.float32)
    return batch


def make_items(dataset: Dataset, files: Sequence[DataFile], cut: Cut, n_step: NStepReturn, spec: Spec) -> DatasetItems:
    """The items of these files, by their index: no file is decoded."""
    if isinstance(cut, StepCut):
        return StepItems(tuple(file.steps for file in files), cut, n_step)
    named: dict[str, list[IndexRow]] = {file.name: [] for file in files}
    for row in dataset.index:
        if row.file in named:
            named[row.file].append(row)
    found = []
    for rows in named.values():
        first = np.array([row.row for row in rows], np.int64)
        lengths = np.array([row.length for row in rows], np.int64)
        found.append(episode_windows(first, lengths, cut.length, cut.stride))
    return WindowItems(tuple(found), cut, n_step, int(np.prod(spec.state)) if spec.state else 0)
