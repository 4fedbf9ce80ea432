"""Reading a data set: one version of it, every file checked against the manifest. Memory: one file at a time."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from qfleet.datasets.format.arrow import require_arrow
from qfleet.datasets.format.episode import RecordedEpisode
from qfleet.datasets.format.index import IndexRow, read_index
from qfleet.datasets.format.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    DataFile,
    DatasetManifest,
    Split,
    read_manifest,
    version_of,
)
from qfleet.datasets.format.statistics import Statistics
from qfleet.datasets.format.tables import StepRows, read_rows
from qfleet.datasets.storage import Place, open_place
from qfleet.errors import StorageError, UsageError

MAX_FILE_BYTES = 1 << 30  # of one file, compressed
MAX_DECODED_BYTES = 4 << 30  # of one data file, as its own footer states it
MAX_ROW_BYTES = 1 << 10  # of one row beside its observations and mask


@dataclass(eq=False)
class Dataset:
    """One version of a data set."""

    place: Place
    manifest: DatasetManifest
    version: str

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
            return read_index(self.read(self.manifest.index))

    @cached_property
    def statistics(self) -> dict[str, Statistics]:
        """Statistics by split."""
        with ClearErrors(self.place, self.manifest.statistics.name):
            return msgspec.json.decode(self.read(self.manifest.statistics), type=dict[str, Statistics])

    def read(self, file: DataFile) -> bytes:
        """The bytes of a file, which has the size and the hash of the manifest."""
        data = self.place.read(file.name, min(file.bytes, MAX_FILE_BYTES))
        if len(data) != file.bytes or hashlib.sha256(data).hexdigest() != file.sha256:
            raise damaged(self.place, file.name, "its bytes are not those that the manifest lists")
        return data

    def rows(self, file: DataFile) -> Iterator[StepRows]:
        """The rows of a data file, a row group at a time."""
        with ClearErrors(self.place, file.name):
            parquet = require_arrow().parquet.ParquetFile(require_arrow().BufferReader(self.read(file)))
            self._require_size(parquet, file)
            for group in range(parquet.num_row_groups):
                rows = read_rows(parquet.read_row_group(group, use_threads=False), self.manifest.layout)
                if problems := rows.problems():
                    raise ValueError(problems[0])
                yield rows

    def _require_size(self, parquet: Any, file: DataFile) -> None:
        """Refuse a file whose footer has other rows than the manifest, or more bytes than such rows can have."""
        found = parquet.metadata.num_rows
        if found != file.rows:
            raise ValueError(f"it has {found:,} rows, and the manifest says {file.rows:,}")
        groups = [parquet.metadata.row_group(at).total_byte_size for at in range(parquet.num_row_groups)]
        layout = self.manifest.layout
        row = sum(column.num_bytes for column in layout.observations) + layout.num_actions * layout.masked
        if sum(groups) > min(MAX_DECODED_BYTES, found * (2 * row + MAX_ROW_BYTES) + (1 << 20)):
            raise ValueError(f"it would take {sum(groups):,} bytes of memory, more than {found:,} of its rows can have")

    def episodes(self, file: DataFile) -> Iterator[RecordedEpisode]:
        """The episodes of a data file, with what the index knows of them."""
        known = self._index_by_file.get(file.name, [])
        number = -1
        for number, episode in enumerate(self._bare(file)):
            row = known[number] if number < len(known) else None
            if row is None or row.id != episode.id:
                raise damaged(
                    self.place, file.name, f"the index does not list its episode {episode.id!r} in this place"
                )
            yield replace(episode, seed=row.seed, env_id=row.world, behaviour=row.behaviour)
        if number + 1 < len(known):
            raise damaged(self.place, file.name, f"it lacks the episode {known[number + 1].id!r} of the index")

    def _bare(self, file: DataFile) -> Iterator[RecordedEpisode]:
        for rows in self.rows(file):
            yield from rows.episodes()

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
    return Dataset(place, manifest, found)
