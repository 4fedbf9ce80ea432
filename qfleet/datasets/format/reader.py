"""Reading a data set: one version of it, every file checked against the manifest. Memory: one file at a time."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec

from qfleet.datasets.format.arrow import require_arrow
from qfleet.datasets.format.bounded import BoundedParquet
from qfleet.datasets.format.episode import RecordedEpisode
from qfleet.datasets.format.index import EpisodePlace, IndexRow, index_problem, read_index
from qfleet.datasets.format.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_STATISTICS_BYTES,
    DataFile,
    DatasetManifest,
    Split,
    column_ranges,
    describe,
    read_manifest,
    version_of,
)
from qfleet.datasets.format.statistics import Statistics, statistics_problem
from qfleet.datasets.format.tables import Ranges, StepRows, read_rows
from qfleet.datasets.storage import ContentCache, Place, RemoteFolder, open_place, user_cache
from qfleet.errors import StorageError, UsageError

MAX_FILE_BYTES = 1 << 30  # of one file, compressed


@dataclass(eq=False)
class Dataset:
    """One version of a data set."""

    place: Place
    manifest: DatasetManifest
    version: str
    cache: ContentCache | None = None  # of files that come over the network

    def files(self, split: Split | None = None) -> list[DataFile]:
        """The data files, of one split or all."""
        return [file for file in self.manifest.files if split is None or file.split == split]

    def require_files(self, split: Split) -> list[DataFile]:
        """The data files of a split that must have steps; `all` means every file."""
        found = self.files(None if split == "all" else split)
        if not found:
            there = sorted({file.split for file in self.manifest.files})
            raise UsageError(
                f"{self.place.url} has no split `{split}`",
                f"Its episodes are in: {', '.join(there) or 'none, it is empty'}.",
                "Split it with `qfleet data prepare`, or use replay.split=all.",
            )
        return found

    @cached_property
    def index(self) -> list[IndexRow]:
        """All episodes, in the order of the files."""
        with ClearErrors(self.place, self.manifest.index.name):
            rows = read_index(self.read(self.manifest.index), self.manifest.num_episodes)
            if problem := index_problem(rows, {file.name: file for file in self.manifest.files}):
                raise ValueError(problem)
            return rows

    @cached_property
    def statistics(self) -> dict[str, Statistics]:
        """Statistics by split."""
        with ClearErrors(self.place, self.manifest.statistics.name):
            entry = self.manifest.statistics
            if entry.bytes > MAX_STATISTICS_BYTES:
                raise ValueError(f"it has {entry.bytes:,} bytes, and {MAX_STATISTICS_BYTES:,} are the most")
            found = msgspec.json.decode(self.read(entry), type=dict[Split, Statistics])
            require_statistics(found, self.manifest)
            return {str(split): each for split, each in found.items()}

    def read(self, file: DataFile) -> bytes:
        """The bytes of a file, which has the size and the hash of the manifest."""
        limit = min(file.bytes, MAX_FILE_BYTES)
        if self.cache is not None and (kept := self.cache.get(file.sha256, limit)) is not None:
            return kept
        data = self.place.read(file.name, limit)
        if len(data) != file.bytes or hashlib.sha256(data).hexdigest() != file.sha256:
            raise damaged(self.place, file.name, "its bytes are not those that the manifest lists")
        if self.cache is not None:
            self.cache.put(file.sha256, data)
        return data

    def rows(self, file: DataFile) -> Iterator[StepRows]:
        """The rows of a data file, a row group at a time; they are whole episodes, those of the index."""
        for _, rows in self.tables(file, self.indexed(file)):
            yield rows

    def tables(self, file: DataFile, episodes: Iterable[EpisodePlace]) -> Iterator[tuple[Any, StepRows]]:
        """The Arrow table and the rows of each row group of a data file, which must hold these episodes."""
        layout = self.manifest.layout
        known = iter(episodes)
        begin = 0
        with ClearErrors(self.place, file.name):
            for group, (table, rows) in enumerate(self._groups(file)):
                if problems := rows.problems() or rows.value_problems(layout.num_actions, self.ranges):
                    raise ValueError(f"row group {group}, {problems[0]}")
                for start, end in pairwise(rows.starts()):
                    place = (group, begin + start, end - start - 1)
                    if difference := index_difference(next(known, None), rows.episode[start], place):
                        raise ValueError(difference)
                begin += len(rows.t)
                yield table, rows
            if missing := next(known, None):
                raise ValueError(f"it lacks the episode {missing.id!r} of the index")

    def row_groups(self, file: DataFile) -> Iterator[StepRows]:
        """The rows of a data file, a row group at a time, as they are: nothing but their types is checked."""
        for _, rows in self._groups(file):
            yield rows

    def _groups(self, file: DataFile) -> Iterator[tuple[Any, StepRows]]:
        layout = self.manifest.layout
        with ClearErrors(self.place, file.name):
            parquet = BoundedParquet(self.read(file), layout.schema(), file.rows, layout.row_bytes)
            for table in parquet.groups():
                yield table, read_rows(table, layout)

    def indexed(self, file: DataFile) -> list[IndexRow]:
        """The episodes of a data file, as the index lists them."""
        return self._index_by_file.get(file.name, [])

    def episodes(self, file: DataFile) -> Iterator[RecordedEpisode]:
        """The episodes of a data file, with what the index knows of them."""
        known = iter(self.indexed(file))
        for rows in self.rows(file):
            for episode in rows.episodes():
                row = next(known)
                yield replace(episode, seed=row.seed, env_id=row.world, behaviour=row.behaviour)

    @cached_property
    def ranges(self) -> Ranges:
        """The lowest and highest numbers of columns that hold choices."""
        return column_ranges(describe(self.manifest))

    @cached_property
    def _index_by_file(self) -> dict[str, list[IndexRow]]:
        found: dict[str, list[IndexRow]] = {}
        for row in self.index:
            found.setdefault(row.file, []).append(row)
        return found

    def episode(self, id: str) -> RecordedEpisode:
        """One episode by its id."""
        row = next((each for each in self.index if each.id == id), None)
        if row is None:
            raise UsageError(
                f"{self.place.url} has no episode {id!r}",
                f"It has {len(self.index):,} others.",
                "See `qfleet data inspect` for their ids.",
            )
        file = next(each for each in self.manifest.files if each.name == row.file)
        return next(episode for episode in self.episodes(file) if episode.id == id)


def index_difference(row: EpisodePlace | None, id: str, place: tuple[int, int, int]) -> str | None:
    """Why an episode is not the one that the index lists: its row group, its first row in the file, and its length."""
    if row is None or row.id != id:
        return f"the index does not list its episode {id!r} in this place"
    if (row.row_group, row.row, row.length) != place:
        return (
            f"the index says that episode {id!r} has {row.length:,} steps from row {row.row:,} of row group "
            f"{row.row_group:,} on, and there are {place[2]:,} from row {place[1]:,} of {place[0]:,}"
        )
    return None


def require_statistics(found: dict[Split, Statistics], manifest: DatasetManifest) -> None:
    """Refuse statistics of other splits, columns or counts than the manifest's; ValueError."""
    for split in ("all", "train", "validation", "test"):
        files = [file for file in manifest.files if file.split == split]
        if (split in found) != bool(files):
            raise ValueError(f"it should have statistics of the split {split} if and only if the manifest does")
        if files:
            counts = (sum(file.episodes for file in files), sum(file.steps for file in files))
            shapes = {each.name: each.shape for each in manifest.observations}
            if problem := statistics_problem(found[split], shapes, manifest.layout.num_actions, counts):
                raise ValueError(f"its split {split}: {problem}")


class ClearErrors:
    """Turns what pyarrow and msgspec raise for a file that is not as it should be into one clear error."""

    def __init__(self, place: Place, name: str) -> None:
        self.place = place
        self.name = name

    def __enter__(self) -> None:
        """Nothing to begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the clear error; ArrowInvalid is a ValueError, other errors of Arrow are listed."""
        if error is not None and isinstance(error, (ValueError, TypeError, KeyError, *_arrow_errors())):
            raise damaged(self.place, self.name, " ".join(str(error).split())[:300]) from error


def _arrow_errors() -> tuple[type[BaseException], ...]:
    return (require_arrow().ArrowException, OSError, MemoryError, OverflowError)


def damaged(place: Place, name: str, reason: str) -> StorageError:
    """The error for a file of a data set that cannot be used."""
    return StorageError(
        f"{name} in the data set {place.url} cannot be used: {reason}",
        "It is damaged, or it was made by something else.",
        "Copy the data set again from its origin; `qfleet data validate` checks all of its files.",
    )


def open_dataset(url: str | Place, version: str | None = None) -> Dataset:
    """The data set at a URL; with a `version`, refused if it is another one."""
    place = open_place(url) if isinstance(url, str) else url
    if not place.exists(MANIFEST):
        raise StorageError(
            f"there is no data set at {place.url}",
            f"It has no {MANIFEST}, which is written last: the path is wrong, or its writer did not finish.",
            "Check the path, or make the data set again; what a killed writer left is overwritten.",
        )
    data = place.read(MANIFEST, MAX_MANIFEST_BYTES)
    try:
        manifest = read_manifest(data)
    except ValueError as error:
        raise damaged(place, MANIFEST, str(error)) from error
    found = version_of(data)
    if version is not None and found != version:
        raise StorageError(
            f"{place.url} holds another data set than before",
            f"Its version is {found[:12]}, and this run began with version {version[:12]}.",
            "Give the path of that version (replay.path=...), or start a new run.",
        )
    return Dataset(place, manifest, found, user_cache() if isinstance(place, RemoteFolder) else None)
