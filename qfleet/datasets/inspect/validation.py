"""Every hash and every rule of a data set; what is wrong, and where."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from qfleet.datasets.format import DataFile, Dataset, IndexRow, RecordedEpisode, episode_problems
from qfleet.errors import StorageError


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and in which file or episode."""

    place: str
    text: str


def validate_dataset(dataset: Dataset, show: Callable[[int, int], object] = lambda done, num: None) -> list[Problem]:
    """Every problem of a data set; none if it is whole. Memory: one data file at a time."""
    problems = []
    try:
        problems += index_problems(dataset)
        dataset.statistics  # noqa: B018
    except StorageError as error:
        return [Problem(dataset.place.url, error.what)]
    files = dataset.files()
    for done, file in enumerate(files, 1):
        problems += file_problems(dataset, file)
        show(done, len(files))
    return problems


def index_problems(dataset: Dataset) -> list[Problem]:
    """Is every episode listed once, in a file that the manifest lists?"""
    names = {file.name: file for file in dataset.manifest.files}
    found = [
        Problem(id, "two episodes have this id")
        for id, num in Counter(row.id for row in dataset.index).items()
        if num > 1
    ]
    for row in dataset.index:
        file = names.get(row.file)
        if file is None:
            found.append(Problem(row.id, f"its file {row.file} is not in the manifest"))
        elif file.split != row.split:
            found.append(Problem(row.id, f"its split is {row.split}, and its file is of split {file.split}"))
    counts = Counter(row.file for row in dataset.index)
    for name, file in names.items():
        if counts[name] != file.episodes:
            found.append(Problem(name, f"the index has {counts[name]} episodes in it, the manifest {file.episodes}"))
    return found


def file_problems(dataset: Dataset, file: DataFile) -> list[Problem]:
    """Does a data file have its hash, and does each of its episodes keep the rules?"""
    rows = {row.id: row for row in dataset.index if row.file == file.name}
    try:
        return [
            Problem(f"{file.name}, episode {episode.id}", text)
            for episode in dataset.episodes(file)
            for text in [*episode_problems(episode), *value_problems(dataset, episode), *_differences(episode, rows)]
        ]
    except StorageError as error:
        return [Problem(file.name, error.what)]


def value_problems(dataset: Dataset, episode: RecordedEpisode) -> Iterator[str]:
    """Actions outside their range, and actions that the mask forbids."""
    num = dataset.manifest.spec.spec().num_actions
    if ((episode.action < 0) | (episode.action >= num)).any():
        yield f"an action is not one of {num}"
    elif episode.mask is not None and not episode.mask[np.arange(episode.num_steps), episode.action].all():
        yield "an action was not allowed by its mask"


def _differences(episode: RecordedEpisode, rows: dict[str, IndexRow]) -> Iterator[str]:
    row = rows[episode.id]
    if row.length != episode.num_steps:
        yield f"the index says {row.length} steps, and there are {episode.num_steps}"
    elif row.hash != episode.content_hash():
        yield "its content does not have the hash that the index lists"
