"""Every hash and every rule of a data set; what is wrong, and where."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from qfleet.datasets.format import DataFile, Dataset, IndexRow, RecordedEpisode
from qfleet.errors import StorageError


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and in which file or episode."""

    place: str
    text: str


def validate_dataset(dataset: Dataset, show: Callable[[int, int], object] = lambda done, num: None) -> list[Problem]:
    """The problems of a data set, of each file the first; none if it is whole. Memory: one data file at a time."""
    for read in (lambda: dataset.index, lambda: dataset.statistics):
        try:
            read()
        except StorageError as error:
            return [Problem(dataset.place.url, error.what)]
    problems = []
    files = dataset.files()
    for done, file in enumerate(files, 1):
        problems += file_problems(dataset, file)
        show(done, len(files))
    return problems


def file_problems(dataset: Dataset, file: DataFile) -> list[Problem]:
    """Does a data file have its hash, and does each of its episodes keep the rules?"""
    rows = {row.id: row for row in dataset.index if row.file == file.name}
    found: list[Problem] = []
    try:
        for episode in dataset.episodes(file):
            place = f"{file.name}, episode {episode.id}"
            found += [Problem(place, text) for text in _differences(episode, rows[episode.id])]
    except StorageError as error:
        found.append(Problem(file.name, f"{error.what}. {error.why}".rstrip(".")))
    return found


def _differences(episode: RecordedEpisode, row: IndexRow) -> Iterator[str]:
    if (row.terminated, row.truncated) != (episode.terminated, episode.truncated):
        yield "the index says that it ended in another way"
    if episode.mask is not None and not episode.mask[np.arange(episode.num_steps), episode.action].all():
        yield "an action was not allowed by its mask"
    if row.undiscounted_return != episode.undiscounted_return:
        yield f"the index says return {row.undiscounted_return:g}, and its rewards make {episode.undiscounted_return:g}"
    elif row.hash != episode.content_hash():
        yield "its content does not have the hash that the index lists"
