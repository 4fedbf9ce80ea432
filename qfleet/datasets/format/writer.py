"""Writing a data set: data files first, then index and statistics, the manifest last.

Row groups never cut an episode. Without a manifest there is no data set: files of a writer that was killed are
overwritten by the next one.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from qfleet.datasets.format.arrow import require_arrow
from qfleet.datasets.format.episode import RecordedEpisode
from qfleet.datasets.format.fitting import fitted_episode
from qfleet.datasets.format.index import IndexRow, write_index
from qfleet.datasets.format.manifest import (
    FORMAT,
    INDEX,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_STATISTICS_BYTES,
    STATISTICS,
    DataFile,
    DatasetManifest,
    Description,
    Setting,
    Split,
    column_ranges,
    read_manifest,
    version_of,
    write_manifest,
)
from qfleet.datasets.format.statistics import Statistics, merge_statistics, statistics_of_episodes
from qfleet.datasets.format.tables import Layout, Ranges, episode_table
from qfleet.datasets.storage import Place
from qfleet.errors import UsageError

FILE_BYTES = 64 << 20  # of one data file before compression, so that every reader knows what it needs
GROUP_BYTES = 4 << 20  # of one row group before compression
LEVEL = 3  # of Zstandard


@dataclass(eq=False)
class WrittenFiles:
    """Data files that were written, with the index of their episodes and their statistics by split."""

    files: list[DataFile] = field(default_factory=list)
    index: list[IndexRow] = field(default_factory=list)
    statistics: dict[str, Statistics] = field(default_factory=dict)

    def add(self, other: "WrittenFiles") -> None:
        """Add what another writer has written."""
        self.files += other.files
        self.index += other.index
        for split, statistics in other.statistics.items():
            before = [self.statistics[split]] if split in self.statistics else []
            merged = merge_statistics([*before, statistics])
            if merged is not None:
                self.statistics[split] = merged


@dataclass(eq=False)
class _OpenFile:
    """One data file, in memory until it is complete."""

    layout: Layout
    sink: Any
    writer: Any
    group: list[RecordedEpisode] = field(default_factory=list)
    group_bytes: int = 0
    num_bytes: int = 0  # before compression
    num_groups: int = 0
    rows: int = 0
    index: list[tuple[RecordedEpisode, int, int]] = field(default_factory=list)  # row group, first row
    statistics: Statistics | None = None

    def add(self, episode: RecordedEpisode) -> None:
        self.index.append((episode, self.num_groups, self.rows))
        self.group.append(episode)
        self.group_bytes += episode.num_bytes
        self.num_bytes += episode.num_bytes
        self.rows += episode.num_steps + 1
        if self.group_bytes >= GROUP_BYTES:
            self.end_group()

    def end_group(self) -> None:
        if not self.group:
            return
        part = statistics_of_episodes(self.group, self.layout.num_actions)
        self.statistics = merge_statistics([part] if self.statistics is None else [self.statistics, part])
        table = require_arrow().concat_tables([episode_table(each, self.layout) for each in self.group])
        self.writer.write_table(table, row_group_size=len(table))
        self.group.clear()
        self.group_bytes = 0
        self.num_groups += 1

    def end(self) -> bytes:
        self.end_group()
        self.writer.close()
        return bytes(self.sink.getvalue())


@dataclass(eq=False)
class EpisodeWriter:
    """Writes episodes into data files `data/PREFIXsplit-number.parquet`, at most `file_bytes` each if they fit."""

    place: Place
    description: Description
    prefix: str = ""
    file_bytes: int = FILE_BYTES
    written: WrittenFiles = field(default_factory=WrittenFiles)
    _open: dict[Split, _OpenFile] = field(default_factory=dict)
    _numbers: dict[Split, int] = field(default_factory=dict)

    def add(self, episode: RecordedEpisode, split: Split = "all") -> None:
        """Add an episode to a split; refuses one that breaks the format's rules."""
        episode = self._fitted(episode)
        file = self._open.get(split)
        if file is not None and file.num_bytes + episode.num_bytes > self.file_bytes:
            self._end_file(split)
            file = None
        if file is None:
            file = self._open[split] = _open_file(self.description.layout)
        file.add(episode)

    def _fitted(self, episode: RecordedEpisode) -> RecordedEpisode:
        try:
            return fitted_episode(episode, self.description.layout, self._ranges)
        except ValueError as error:
            raise UsageError(
                f"episode {episode.id[:200]!r} cannot be written: {error}",
                "A data set holds whole episodes of finite numbers: T actions between T + 1 observations.",
                "Correct the source of the episode, or leave it out.",
            ) from error

    @cached_property
    def _ranges(self) -> Ranges:
        return column_ranges(self.description)

    def finish(self) -> WrittenFiles:
        """End the files that are open; returns what was written."""
        for split in sorted(self._open):
            self._end_file(split)
        return self.written

    def _end_file(self, split: Split) -> None:
        file = self._open.pop(split)
        number = self._numbers.get(split, 0)
        self._numbers[split] = number + 1
        name = f"data/{self.prefix}{split}-{number:05d}.parquet"
        entry = put_file(self.place, name, file.end())
        steps = sum(episode.num_steps for episode, _, _ in file.index)
        entry = msgspec.structs.replace(entry, rows=file.rows, episodes=len(file.index), steps=steps, split=split)
        rows = [_index_row(episode, name, group, row, split, self.description) for episode, group, row in file.index]
        statistics: dict[str, Statistics] = {} if file.statistics is None else {split: file.statistics}
        self.written.add(WrittenFiles([entry], rows, statistics))


def _open_file(layout: Layout) -> _OpenFile:
    return _OpenFile(layout, *open_parquet(layout.schema()))


def open_parquet(schema: Any, *, store_schema: bool = True) -> tuple[Any, Any]:
    """A buffer in memory, and the Parquet writer of a data file in it; Arrow's schema may be beside it."""
    pa = require_arrow()
    sink = pa.BufferOutputStream()
    options = {"compression": "zstd", "compression_level": LEVEL, "use_dictionary": ["episode"]}
    return sink, pa.parquet.ParquetWriter(sink, schema, store_schema=store_schema, **options)


def _index_row(
    episode: RecordedEpisode, file: str, group: int, row: int, split: Split, description: Description
) -> IndexRow:
    return IndexRow(
        id=episode.id,
        file=file,
        row_group=group,
        row=row,
        length=episode.num_steps,
        undiscounted_return=episode.undiscounted_return,
        terminated=episode.terminated,
        truncated=episode.truncated,
        seed=episode.seed,
        world=episode.env_id or description.env_id,
        behaviour=episode.behaviour,
        split=split,
        hash=episode.content_hash(),
    )


def put_file(place: Place, name: str, data: bytes) -> DataFile:
    """Write a file of a data set."""
    place.write(name, data)
    return DataFile(name, len(data), hashlib.sha256(data).hexdigest())


def require_free(place: Place) -> None:
    """Refuse a place where there is a data set already."""
    if place.exists(MANIFEST):
        raise UsageError(
            f"{place.url} holds a data set already",
            "A data set never changes: its version is the hash of its manifest.",
            "Choose another folder.",
        )


def publish(
    place: Place,
    description: Description,
    written: WrittenFiles,
    settings: Mapping[str, Setting],
    source: str = "",
) -> str:
    """Write index, statistics, and last the manifest; returns the version."""
    if len({row.id for row in written.index}) < len(written.index):
        raise UsageError(
            "two episodes have the same id",
            "An id names one episode of a data set: its hash decides the split.",
            "Give the episodes other ids.",
        )
    manifest = DatasetManifest(
        format=FORMAT,
        env_id=description.env_id,
        spec=description.saved_spec(),
        observations=description.observations,
        spaces=description.saved_spaces(),
        files=tuple(written.files),
        index=put_file(place, INDEX, write_index(written.index)),
        statistics=put_file(place, STATISTICS, msgspec.json.encode(written.statistics, order="sorted")),
        num_episodes=len(written.index),
        num_steps=sum(file.steps for file in written.files),
        settings=dict(settings),
        source=source,
    )
    data = write_manifest(manifest)
    _require_readable(data, manifest)
    if not place.write_new(MANIFEST, data):
        require_free(place)
    return version_of(data)


def _require_readable(data: bytes, manifest: DatasetManifest) -> None:
    """Refuse to publish what no reader would take."""
    try:
        if len(data) > MAX_MANIFEST_BYTES:
            raise ValueError(f"it has {len(data):,} bytes, and {MAX_MANIFEST_BYTES:,} are the most")
        if manifest.statistics.bytes > MAX_STATISTICS_BYTES:
            raise ValueError(f"its statistics have {manifest.statistics.bytes:,} bytes, too many")
        read_manifest(data)
    except ValueError as error:
        raise UsageError(
            f"this data set cannot be published: {error}",
            "Every reader has limits, which docs/datasets.md lists.",
            "Divide it into several data sets, or give the command other settings.",
        ) from error


def write_dataset(
    place: Place,
    description: Description,
    episodes: Iterable[RecordedEpisode],
    settings: Mapping[str, Setting],
    file_bytes: int = FILE_BYTES,
) -> str:
    """Write a data set without splits; returns its version."""
    require_free(place)
    writer = EpisodeWriter(place, description, file_bytes=file_bytes)
    for episode in episodes:
        writer.add(episode)
    return publish(place, description, writer.finish(), settings)
