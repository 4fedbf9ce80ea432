"""Tables of other programs, decoded within limits: Parquet, Arrow's files, CSV.

What would be decoded is counted before it is decoded, from the pages and buffers themselves. R rows.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfleet.datasets.convert.foreign import (
    clear_errors,
    open_foreign,
    read_foreign,
    require_decoded_size,
)
from qfleet.datasets.format import require_arrow
from qfleet.datasets.format.pages import chunk_pages

MAX_ROWS = 50_000_000  # of one table
MAX_COLUMNS = 10_000
MAX_FOOTER_BYTES = 16 << 20  # of a Parquet file: what describes it
MAX_BATCHES = 100_000
MAX_LEVELS = 16  # of lists in lists
CSV_BLOCK_BYTES = 4 << 20  # a longer line is refused
_ROOM_BYTES = 256 << 20  # that any file may take, however small it is
_MOST_COMPRESSED = 1_000  # times its own bytes a file may take beyond that
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 16}


def table_names(folder: Path, name: str) -> list[str]:
    """The names of a table's columns; little of the table is decoded for it."""
    with clear_errors(folder / name):
        ending = name.rpartition(".")[2]
        if ending == "csv":
            with open_foreign(folder, name) as file:
                return _csv_names(file)
        return _schema(read_foreign(folder, name), ending).names  # type: ignore[no-any-return]


def read_table(
    folder: Path,
    name: str,
    columns: list[str] | None = None,
    texts: Collection[str] = (),
    numbers: Collection[str] = (),
) -> Any:
    """A Parquet, Arrow or CSV file as an Arrow table: these columns, or all. CSV does not say which are what."""
    with clear_errors(folder / name):
        ending = name.rpartition(".")[2]
        if ending == "csv":
            with open_foreign(folder, name) as file:
                pa = require_arrow()
                types = dict.fromkeys(texts, pa.string()) | dict.fromkeys(numbers, pa.float64())
                return _read_csv(file, columns, types)
        data = read_foreign(folder, name)
        _require_columns(_schema(data, ending), columns)
        return _read_parquet(data, columns) if ending == "parquet" else _read_arrow(data, columns)


def _schema(data: bytes, ending: str) -> Any:
    pa = require_arrow()
    if ending == "parquet":
        footer = int.from_bytes(data[-8:-4], "little")
        if footer > min(MAX_FOOTER_BYTES, len(data)):
            raise ValueError(f"its footer has {footer:,} bytes, and {MAX_FOOTER_BYTES:,} are the most")
        found = pa.parquet.ParquetFile(pa.BufferReader(data)).schema_arrow
    elif ending in ("arrow", "feather"):
        with pa.ipc.open_stream(_stream(data)) as reader:
            found = reader.schema
    else:
        raise ValueError("its name ends neither in .parquet nor in .arrow nor in .csv")
    if len(found) > MAX_COLUMNS:
        raise ValueError(f"it has {len(found):,} columns, and {MAX_COLUMNS:,} are the most")
    return found


def _require_columns(schema: Any, columns: list[str] | None) -> None:
    lacking = [name for name in columns or () if name not in schema.names]
    if lacking:
        raise ValueError(f"it has no column {lacking[0]!r}, but {', '.join(schema.names)[:300]}")
    for field in schema:
        if columns is None or field.name in columns:
            _require_plain(field.type, field.name, 0)


def _require_plain(kind: Any, name: str, level: int) -> None:
    """Refuse types whose values are no numbers, texts, or lists and structs of them."""
    pa = require_arrow()
    types = pa.types
    inner: list[Any] = []
    if isinstance(kind, pa.BaseExtensionType):
        inner = [kind.storage_type]
    elif types.is_struct(kind):
        inner = [kind.field(at).type for at in range(kind.num_fields)]
    elif any(
        test(kind) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_dictionary)
    ):
        inner = [kind.value_type]
    plain = [types.is_integer, types.is_floating, types.is_boolean, types.is_null]
    plain += [types.is_string, types.is_large_string, types.is_binary, types.is_large_binary]
    if level > MAX_LEVELS or not (inner or any(test(kind) for test in plain)):
        raise ValueError(f"column {name!r} holds {str(kind)[:200]}, which is not read")
    for each in inner:
        _require_plain(each, name, level + 1)


def _require_rows(num: int) -> None:
    if num > MAX_ROWS:
        raise ValueError(f"it has {num:,} rows, and {MAX_ROWS:,} are the most")


def _require_size(num_bytes: int, stored: int) -> None:
    """Refuse what takes too much memory, or far more than its own file has."""
    require_decoded_size(num_bytes)
    if num_bytes > _ROOM_BYTES + _MOST_COMPRESSED * stored:
        raise ValueError(f"its {stored:,} bytes would take {num_bytes:,} bytes of memory")


# --- Parquet ---


def _read_parquet(data: bytes, columns: list[str] | None) -> Any:
    pa = require_arrow()
    metadata = pa.parquet.ParquetFile(pa.BufferReader(data)).metadata
    _require_rows(metadata.num_rows)
    leaves = [at for at in range(metadata.num_columns) if _is_wanted(metadata.schema.column(at).path, columns)]
    flat = {at for at in leaves if "." not in metadata.schema.column(at).path}
    _require_size(sum(_leaf_bytes(memoryview(data), metadata, at, at in flat) for at in leaves), len(data))
    texts = [metadata.schema.column(at).path for at in flat if metadata.schema.column(at).physical_type == "BYTE_ARRAY"]
    file = pa.parquet.ParquetFile(pa.BufferReader(data), read_dictionary=texts)
    return _checked(file.read(columns, use_threads=False), len(data))


def _is_wanted(path: str, columns: list[str] | None) -> bool:
    return columns is None or any(path == name or path.startswith(f"{name}.") for name in columns)


def _leaf_bytes(data: memoryview, metadata: Any, at: int, flat: bool) -> int:
    """What the values of a column take. Texts of columns that are `flat` stay in dictionaries."""
    leaf = metadata.schema.column(at)
    width = leaf.length if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS[leaf.physical_type]
    total = 0
    for group in range(metadata.num_row_groups):
        column = metadata.row_group(group).column(at)
        begin = column.data_page_offset
        if column.has_dictionary_page and column.dictionary_page_offset is not None:
            begin = min(begin, column.dictionary_page_offset)
        dictionary = 0
        for page in chunk_pages(data, begin, begin + column.total_compressed_size):
            total += page.decoded_bytes + page.num_values * width
            dictionary += page.decoded_bytes * page.is_dictionary
            if leaf.physical_type == "BYTE_ARRAY" and not flat:
                total += page.num_values * dictionary * page.refers
    return total


def _checked(table: Any, stored: int) -> Any:
    """The table, whose offsets and texts are valid; encoded pictures are no longer in dictionaries."""
    _require_rows(len(table))
    _require_size(table.nbytes, stored)
    table.validate(full=True)
    pa = require_arrow()
    for at, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type) and pa.types.is_binary(field.type.value_type):
            column = table.column(at)
            require_decoded_size(sum(_plain_bytes(chunk) for chunk in column.chunks))
            table = table.set_column(at, field.name, column.cast(field.type.value_type))
    return table


def _plain_bytes(chunk: Any) -> int:
    import pyarrow.compute as compute

    return int(compute.sum(compute.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0)


# --- Arrow ---


def _stream(data: bytes) -> Any:
    """A file's batches in the order in which they are stored: its footer may name one of them many times."""
    return require_arrow().py_buffer(data).slice(8 if data[:6] == b"ARROW1" else 0)


def _read_arrow(data: bytes, columns: list[str] | None) -> Any:
    pa = require_arrow()
    rows = 0
    num_bytes = 0
    messages = pa.ipc.MessageReader.open_stream(_stream(data))
    for number, message in enumerate(messages):
        if number > MAX_BATCHES:
            raise ValueError(f"it has more than {MAX_BATCHES:,} batches")
        found = BatchSizes.of(message.metadata.to_pybytes(), memoryview(message.body or b""))
        rows += found.rows
        num_bytes += found.num_bytes
        _require_rows(rows)
        _require_size(num_bytes, len(data))
    with pa.ipc.open_stream(_stream(data)) as reader:
        table = reader.read_all()
    return _checked(table if columns is None else table.select(columns), len(data))


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Rows and decoded bytes of a message of Arrow's streams, from its flatbuffer."""

    rows: int
    num_bytes: int

    @staticmethod
    def of(metadata: bytes, body: memoryview) -> "BatchSizes":
        """The sizes of a message; none of one that holds no batch. ValueError if it is damaged."""
        message = _FlatTable(metadata, _number(metadata, 0, 4))
        kind = message.number(1, 1)
        if kind not in (_BATCH, _DICTIONARY_BATCH):
            return BatchSizes(0, 0)
        batch = message.table(2)
        if kind == _DICTIONARY_BATCH:
            batch = batch.table(1)
        spans = list(batch.spans(2))
        if batch.place(3) is None:
            return BatchSizes(batch.number(0, 8), sum(length for _, length in spans))
        return BatchSizes(batch.number(0, 8), sum(_decoded(body, *span) for span in spans))


_BATCH = 3
_DICTIONARY_BATCH = 2


def _decoded(body: memoryview, offset: int, length: int) -> int:
    """A compressed buffer begins with the number of its decoded bytes; -1 says that it is not compressed."""
    if length == 0:
        return 0
    size = _number(body, offset, 8)
    return size if 0 <= size < 1 << 63 else length


def _number(data: bytes | memoryview, at: int, size: int) -> int:
    if not 0 <= at <= len(data) - size:
        raise ValueError("the description of a batch is cut off")
    return int.from_bytes(data[at : at + size], "little")


@dataclass(frozen=True, slots=True)
class _FlatTable:
    """A table of a flatbuffer: numbers in it are where its list of places says."""

    data: bytes
    at: int

    def place(self, field: int) -> int | None:
        """Where a field is; None if it is not there."""
        places = self.at - _signed(_number(self.data, self.at, 4))
        if 4 + 2 * field >= _number(self.data, places, 2):
            return None
        offset = _number(self.data, places + 4 + 2 * field, 2)
        return self.at + offset if offset else None

    def number(self, field: int, size: int) -> int:
        """A number without a sign; 0 if it is not there."""
        place = self.place(field)
        return 0 if place is None else _number(self.data, place, size)

    def table(self, field: int) -> "_FlatTable":
        """A table that a field refers to."""
        place = self.place(field)
        if place is None:
            raise ValueError("the description of a batch is not whole")
        return _FlatTable(self.data, place + _number(self.data, place, 4))

    def spans(self, field: int) -> Iterator[tuple[int, int]]:
        """The pairs of two numbers in a list: where a buffer begins, and its length."""
        place = self.place(field)
        if place is None:
            return
        begin = place + _number(self.data, place, 4)
        for number in range(_number(self.data, begin, 4)):
            at = begin + 4 + 16 * number
            yield _number(self.data, at, 8), _number(self.data, at + 8, 8)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


# --- CSV ---


def _csv_names(file: Any) -> list[str]:
    line = file.readline(CSV_BLOCK_BYTES)
    if line.count(b",") >= MAX_COLUMNS or line.count(b'"') % 2 or (not line.endswith(b"\n") and len(line) > 1 << 20):
        raise ValueError(f"its first line is not the names of at most {MAX_COLUMNS:,} columns")
    file.seek(0)
    with _open_csv(file) as reader:
        names: list[str] = reader.schema.names
    return names


def _read_csv(file: Any, columns: list[str] | None, types: dict[str, Any]) -> Any:
    pa = require_arrow()
    names = _csv_names(file)
    if lacking := [name for name in columns or () if name not in names]:
        raise ValueError(f"it has no column {lacking[0]!r}, but {', '.join(names)[:300]}")
    file.seek(0)
    batches = []
    num_bytes = 0
    with _open_csv(file, columns, types) as reader:
        for batch in reader:
            num_bytes += batch.nbytes
            require_decoded_size(num_bytes)
            batches.append(batch)
            _require_rows(sum(map(len, batches)))
        return pa.Table.from_batches(batches, reader.schema)


def _open_csv(file: Any, columns: list[str] | None = None, types: dict[str, Any] | None = None) -> Any:
    import pyarrow.csv as csv

    blocks = csv.ReadOptions(block_size=CSV_BLOCK_BYTES, use_threads=False)
    convert = csv.ConvertOptions(include_columns=columns, column_types=types or {})
    return csv.open_csv(require_arrow().PythonFile(file), blocks, convert_options=convert)
