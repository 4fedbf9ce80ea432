"""Parquet files from anywhere, decoded within limits.

Before anything is decoded, the schema, the counts of rows and the sizes of all pages are checked. Texts are decoded as
dictionaries, so that a long one is in memory once, however many rows it has.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from qfleet.datasets.format.arrow import require_arrow
from qfleet.datasets.format.pages import chunk_bytes

MAX_DECODED_BYTES = 1 << 30  # of one file
MAX_TEXT_BYTES = 4_096  # of an id, a name or a hash


class BoundedParquet:
    """A Parquet file of one schema and a known number of rows."""

    def __init__(self, data: bytes, schema: Any, num_rows: int, row_bytes: int) -> None:
        pa = require_arrow()
        self.texts = [field.name for field in schema if pa.types.is_string(field.type)]
        try:
            self.file = pa.parquet.ParquetFile(pa.BufferReader(data), read_dictionary=self.texts)
        except KeyError as error:
            raise ValueError(f"it has no column {str(error)[:200]}, which the manifest wants") from error
        self._require_schema(schema)
        self._require_rows(num_rows)
        self._require_size(memoryview(data), num_rows, row_bytes)

    def groups(self) -> Iterator[Any]:
        """The tables of the row groups."""
        for number in range(self.file.num_row_groups):
            table = self.file.read_row_group(number, use_threads=False)
            for name in self.texts:
                _require_short_texts(name, table.column(name))
            yield table

    def _require_schema(self, schema: Any) -> None:
        pa = require_arrow()
        found = self.file.schema_arrow
        plain = [
            field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in found
        ]
        if not pa.schema(plain).equals(schema):
            expected = ", ".join(f"{field.name} {field.type}" for field in schema)
            names = ", ".join(f"{field.name} {field.type}" for field in plain)
            raise ValueError(f"its columns are not those of the manifest: {names[:200]} instead of {expected[:300]}")

    def _require_rows(self, num_rows: int) -> None:
        metadata = self.file.metadata
        groups = [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]
        if metadata.num_rows != num_rows or sum(groups) != num_rows:
            raise ValueError(f"it has {metadata.num_rows:,} rows, and the manifest says {num_rows:,}")
        if min(groups, default=1) < 1:
            raise ValueError("a row group of it has no rows")

    def _require_size(self, data: memoryview, num_rows: int, row_bytes: int) -> None:
        """Refuse more memory than is allowed, and more than this number of rows can need."""
        if num_rows * row_bytes > MAX_DECODED_BYTES:
            raise ValueError(
                f"its {num_rows:,} rows would take {num_rows * row_bytes:,} bytes of memory, and "
                f"{MAX_DECODED_BYTES:,} are the most"
            )
        found = sum(self._decoded_bytes(data))
        allowed = num_rows * (2 * row_bytes + 1_024) + (1 << 20)
        if found > allowed:
            raise ValueError(f"it would take {found:,} bytes of memory, more than {num_rows:,} of its rows can have")

    def _decoded_bytes(self, data: memoryview) -> Iterator[int]:
        metadata = self.file.metadata
        for group in range(metadata.num_row_groups):
            for at in range(metadata.num_columns):
                column = metadata.row_group(group).column(at)
                begin = column.data_page_offset
                if column.has_dictionary_page and column.dictionary_page_offset is not None:
                    begin = min(begin, column.dictionary_page_offset)
                yield chunk_bytes(data, begin, begin + column.total_compressed_size)


def _require_short_texts(name: str, column: Any) -> None:
    for chunk in column.chunks:
        longest = max(map(len, chunk.dictionary.cast("binary").to_pylist()), default=0)
        if longest > MAX_TEXT_BYTES:
            raise ValueError(f"a text in its column {name} has {longest:,} bytes, and {MAX_TEXT_BYTES:,} are the most")


def text_list(column: Any) -> list[str]:
    """The texts of a column that is in dictionaries, each in memory once."""
    found: list[str] = []
    for chunk in column.chunks:
        values = np.array(chunk.dictionary.to_pylist(), np.object_)
        found += values[chunk.indices.to_numpy(zero_copy_only=False)].tolist()
    return found
