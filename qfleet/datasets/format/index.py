"""`episodes.parquet`: where every episode is, and what is known of it."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from qfleet.datasets.format.arrow import require_arrow
from qfleet.datasets.format.bounded import BoundedParquet, text_list
from qfleet.datasets.format.manifest import DataFile

ROW_BYTES = 128
HASH = re.compile(r"[0-9a-f]{64}")


class EpisodePlace(Protocol):
    """Where an episode is in its file."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def row_group(self) -> int:
        """Its row group."""

    @property
    def row(self) -> int:
        """The first of its rows, counted in the file."""

    @property
    def length(self) -> int:
        """Steps."""


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One episode: its place in a data file, and what is known of it."""

    id: str
    file: str
    row_group: int
    row: int  # the first of its `length` + 1 rows, counted in the file
    length: int  # steps
    undiscounted_return: float
    terminated: bool
    truncated: bool
    seed: int | None
    world: str
    behaviour: str
    split: str
    hash: str  # SHA-256 of its content


def index_schema() -> Any:
    """The Arrow schema of the index."""
    pa = require_arrow()
    text = pa.string()
    kinds = [text, text, pa.int32(), pa.int64(), pa.int64(), pa.float64(), pa.bool_(), pa.bool_(), pa.int64()]
    kinds += [text] * 4
    named = zip(fields(IndexRow), kinds, strict=True)
    return pa.schema([pa.field(each.name, kind, each.name == "seed") for each, kind in named])


def write_index(rows: list[IndexRow]) -> bytes:
    """The bytes of the index."""
    pa = require_arrow()
    columns = {each.name: [getattr(row, each.name) for row in rows] for each in fields(IndexRow)}
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table(columns, schema=index_schema()), sink, compression="zstd")
    return bytes(sink.getvalue())


def read_index(data: bytes, num_episodes: int) -> list[IndexRow]:
    """The rows of an index; ValueError if it has another schema or another number of rows."""
    found: list[IndexRow] = []
    for table in BoundedParquet(data, index_schema(), num_episodes, ROW_BYTES).groups():
        found += [IndexRow(*values) for values in zip(*map(_values, table.columns), strict=True)]
    return found


def _values(column: Any) -> list[Any]:
    return text_list(column) if require_arrow().types.is_dictionary(column.type) else list(column.to_pylist())


def index_problem(rows: list[IndexRow], files: Mapping[str, DataFile]) -> str | None:
    """Why these rows are no index of these files: every episode once, in a file that the manifest lists."""
    ids: set[str] = set()
    order = {name: number for number, name in enumerate(files)}
    before = 0
    for row in rows:
        file = files.get(row.file)
        if row.id in ids:
            return f"two episodes have the id {row.id!r}"
        if file is None:
            return f"the file {row.file!r} of episode {row.id!r} is not in the manifest"
        if file.split != row.split:
            return f"episode {row.id!r} is of split {row.split!r}, and its file {row.file} of split {file.split}"
        if order[row.file] < before:
            return f"episode {row.id!r} is not in the order of the manifest's files"
        if row.length < 1 or row.row_group < 0 or row.row < 0:
            return f"episode {row.id!r} has {row.length:,} steps from row {row.row:,} of row group {row.row_group:,} on"
        if not HASH.fullmatch(row.hash):
            return f"the hash of episode {row.id!r} is not a SHA-256"
        before = order[row.file]
        if not math.isfinite(row.undiscounted_return):
            return f"the return of episode {row.id!r} is not a finite number"
        ids.add(row.id)
    counts = Counter(row.file for row in rows)
    lengths: Counter[str] = Counter()
    for row in rows:
        lengths[row.file] += row.length
    for name, file in files.items():
        if (counts[name], lengths[name]) != (file.episodes, file.steps):
            return (
                f"it has {counts[name]:,} episodes and {lengths[name]:,} steps in {name}, and the manifest "
                f"says {file.episodes:,} and {file.steps:,}"
            )
    return None
