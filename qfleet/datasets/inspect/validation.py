"""Every hash and every rule of a data set; what is wrong, and where."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from qfleet.datasets.format import (
    DataFile,
    Dataset,
    IndexRow,
    Moments,
    RecordedEpisode,
    Statistics,
    StepRows,
    index_difference,
    merge_statistics,
    statistics_of_episodes,
)
from qfleet.errors import StorageError

MAX_PROBLEMS = 1_000  # that are listed
RETURN_TOLERANCE = 1e-9  # of the sum of sizes of rewards: sums depend on their order
TOLERANCE = 1e-6  # of means and deviations, which depend on the order in which they were merged


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and in which file; where they are known, the row group, the episode and the row of the file."""

    file: str
    text: str
    row_group: int | None = None
    episode: str | None = None
    row: int | None = None

    @property
    def place(self) -> str:
        """Where it is, in words."""
        parts = {"row group": self.row_group, "episode": self.episode, "row": self.row}
        return ", ".join([self.file, *(f"{name} {value}" for name, value in parts.items() if value is not None)])


@dataclass(eq=False)
class _Found:
    """What was seen so far."""

    problems: list[Problem] = field(default_factory=list)
    statistics: dict[str, Statistics] = field(default_factory=dict)

    def add(self, split: str, episodes: list[RecordedEpisode], num_actions: int) -> None:
        part = statistics_of_episodes(episodes, num_actions)
        merged = merge_statistics([*([self.statistics[split]] if split in self.statistics else []), part])
        if merged is not None:
            self.statistics[split] = merged


def validate_dataset(dataset: Dataset, show: Callable[[int, int], object] = lambda done, num: None) -> list[Problem]:
    """The problems of a data set, at most 1,000; none if it is whole. Memory: one data file at a time."""
    found = _Found()
    for name in ("index", "statistics"):
        try:
            getattr(dataset, name)
        except StorageError as error:
            found.problems.append(Problem(getattr(dataset.manifest, name).name, _text(error)))
    if found.problems:
        return found.problems
    files = dataset.files()
    for done, file in enumerate(files, 1):
        try:
            _check_file(dataset, file, found)
        except StorageError as error:
            found.problems.append(Problem(file.name, _text(error)))
        if len(found.problems) >= MAX_PROBLEMS:
            return found.problems[:MAX_PROBLEMS]
        show(done, len(files))
    return found.problems or list(_statistics_problems(dataset, found.statistics))


def _text(error: StorageError) -> str:
    return f"{error.what}. {error.why}".rstrip(".")


def _check_file(dataset: Dataset, file: DataFile, found: _Found) -> None:
    """Does a data file have its hash, and does each of its episodes keep the rules?"""
    known: dict[int, list[IndexRow]] = {}
    for row in dataset.indexed(file):
        known.setdefault(row.row_group, []).append(row)
    begin = 0
    for group, rows in enumerate(dataset.row_groups(file)):
        listed = known.pop(group, [])
        problems = list(_group_problems(dataset, rows, listed, (group, begin)))
        episodes = [] if problems else rows.episodes()
        for episode, row in zip(episodes, listed, strict=True) if episodes else ():
            problems += [(text, episode.id, row.row) for text in _differences(episode, row)]
        if episodes and not problems:
            found.add(file.split, episodes, dataset.manifest.layout.num_actions)
        found.problems += [Problem(file.name, text, group, id, row) for text, id, row in problems]
        begin += len(rows.t)
    for listed in known.values():
        text = "the index lists it in a row group that the file does not have"
        found.problems += [Problem(file.name, text, row.row_group, row.id, row.row) for row in listed]


def _group_problems(
    dataset: Dataset, rows: StepRows, listed: list[IndexRow], place: tuple[int, int]
) -> Iterator[tuple[str, str | None, int | None]]:
    """What is wrong with the rows of a row group, the episode and the row in the file."""
    group, begin = place
    layout = dataset.manifest.layout
    problems = rows.problems() or rows.value_problems(layout.num_actions, dataset.ranges)
    yield from ((each.text, each.episode, begin + each.row) for each in problems)
    if problems:
        return
    known = iter(listed)
    for start, end in pairwise(rows.starts()):
        id = rows.episode[start]
        if difference := index_difference(next(known, None), id, (group, begin + start, end - start - 1)):
            yield difference, id, begin + start
            return
    for missing in known:
        yield "the index lists it here, and it is not in the file", missing.id, missing.row


def _differences(episode: RecordedEpisode, row: IndexRow) -> Iterator[str]:
    if (row.terminated, row.truncated) != (episode.terminated, episode.truncated):
        yield "the index says that it ended in another way"
    if episode.mask is not None and not episode.mask[np.arange(episode.num_steps), episode.action].all():
        yield "an action was not allowed by its mask"
    size = float(np.abs(episode.reward).sum())
    if abs(row.undiscounted_return - episode.undiscounted_return) > RETURN_TOLERANCE * size:
        yield f"the index says return {row.undiscounted_return:g}, and its rewards make {episode.undiscounted_return:g}"
    elif row.hash != episode.content_hash():
        yield "its content does not have the hash that the index lists"


def _statistics_problems(dataset: Dataset, real: dict[str, Statistics]) -> Iterator[Problem]:
    """Where the statistics are not those of the data."""
    file = dataset.manifest.statistics.name
    for split, listed in dataset.statistics.items():
        found = real[split]
        named = {"reward": (listed.reward, found.reward), "returns": (listed.returns, found.returns)}
        named |= {"lengths": (listed.lengths, found.lengths)}
        named |= {name: (each, found.observations[name]) for name, each in listed.observations.items()}
        if listed.actions != found.actions:
            yield Problem(file, f"split {split}: the counts of actions are not those of the data")
        for name, (mine, theirs) in named.items():
            if different := _different_field(mine, theirs):
                yield Problem(file, f"split {split}, {name}: {different} is not that of the data")


def _different_field(listed: Moments, real: Moments) -> str | None:
    for name in ("count", "min", "max", "num_not_finite"):
        if getattr(listed, name) != getattr(real, name):
            return name
    if listed.sketch and listed.sketch != real.sketch:
        return "sketch"
    for at, num in enumerate(real.count):
        spread = math.sqrt(real.m2[at] / max(1, num)) + abs(real.mean[at])
        if abs(listed.mean[at] - real.mean[at]) > TOLERANCE * spread:
            return "mean"
        if abs(listed.m2[at] - real.m2[at]) > TOLERANCE * num * spread * max(spread, 1e-300):
            return "m2"
    return None
