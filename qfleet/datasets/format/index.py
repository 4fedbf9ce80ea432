"""`episodes.parquet`: where every episode is, and what is known of it."""

from dataclasses import dataclass, fields
from typing import Any

from qfleet.datasets.format.arrow import require_arrow


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


def read_index(data: bytes) -> list[IndexRow]:
    """The rows of an index; ValueError if it has another schema."""
    pa = require_arrow()
    table = pa.parquet.read_table(pa.BufferReader(data))
    if not table.schema.equals(index_schema()):
        raise ValueError(f"its columns are not those of an index: {', '.join(table.schema.names)[:200]}")
    return [IndexRow(**row) for row in table.to_pylist()]
