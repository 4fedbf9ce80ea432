"""Windows of recorded episodes, and batches of them (`algo.view.type=sequences`).

Shapes: N items, W windows of a file.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qfleet.data import Array, Sequences
from qfleet.datasets.format import DataFile, Dataset, IndexRow
from qfleet.learn.batch_split import join_batches
from qfleet.learn.offline.shard_cache import ShardCache
from qfleet.learn.offline.shards import DataShard
from qfleet.learn.offline.step_cutter import Part
from qfleet.replay import NStepReturn, SequenceCut


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


def dataset_windows(dataset: Dataset, files: Sequence[DataFile], cut: SequenceCut) -> tuple[EpisodeWindows, ...]:
    """The windows of each of these files, by their index: no file is decoded."""
    named: dict[str, list[IndexRow]] = {file.name: [] for file in files}
    for row in dataset.index:
        if row.file in named:
            named[row.file].append(row)
    found = []
    for rows in named.values():
        first = np.array([row.row for row in rows], np.int64)
        lengths = np.array([row.length for row in rows], np.int64)
        found.append(episode_windows(first, lengths, cut.length, cut.stride))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class WindowCutter:
    """Cuts windows of several shards; with a `stride` of `length` steps every step is in one of them."""

    shards: ShardCache
    windows: tuple[EpisodeWindows, ...]  # of each shard
    window_cut: SequenceCut
    n_step: NStepReturn
    state_size: int

    @property
    def rows_per_item(self) -> int:
        """Observations of an item."""
        return self.window_cut.rows

    def cut(self, parts: Sequence[Part], places: Array, ids: Array) -> Sequences:
        """The windows of all parts, laid end to end, as a batch in which each has its place."""
        found = []
        for number, chosen in parts:
            own = self.windows[number]
            rows = (own.first[chosen], own.begin[chosen], own.end[chosen])
            shard = self.shards.shard(number)
            found.append(cut_windows(self.window_cut, shard, rows, self.n_step, chosen, self.state_size))
        batch = join_batches(found, np.argsort(places))
        if not isinstance(batch, Sequences):
            raise TypeError("windows are sequences")
        batch.ids = ids
        return batch

    def count_steps(self, shards: Array, numbers: Array) -> int:
        """The steps that these windows [N] learn from; one that is in two windows counts twice."""
        found = 0
        for shard in np.unique(shards).tolist():
            found += int(self.windows[shard].num_steps[numbers[shards == shard]].sum())
        return found


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
