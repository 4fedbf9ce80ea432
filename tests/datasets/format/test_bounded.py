"""Limits on what is decoded: by what the file really holds, not by what its footer says."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qfleet.datasets.format.bounded import BoundedParquet, text_list
from qfleet.datasets.format.pages import CompactReader, chunk_bytes
from tests.support.recorded import make_dataset

SCHEMA = pa.schema([pa.field("id", pa.string()), pa.field("n", pa.int64())])


def written(ids: list[str], **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": ids, "n": range(len(ids))}, schema=SCHEMA), sink, **options)
    return sink.getvalue()


@pytest.mark.parametrize(
    "options", [{}, {"use_dictionary": False}, {"data_page_version": "2.0"}, {"row_group_size": 3}]
)
def test_texts_come_back(options: dict[str, object]) -> None:
    ids = ["a", "ü", "a", "", "b"] * 2
    tables = list(BoundedParquet(written(ids, **options), SCHEMA, 10, 16).groups())
    assert [text for table in tables for text in text_list(table["id"])] == ids


def test_rows_that_would_not_fit_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(ValueError, match="10 rows would take 10,737,418,240 bytes"):
        BoundedParquet(written(["a"] * 10), SCHEMA, 10, 1 << 30)


def test_pages_are_counted_as_they_are() -> None:
    data = written(["x" * 1_000] * 50, use_dictionary=False, compression="zstd")
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0)
    begin = column.data_page_offset
    assert 50_000 < chunk_bytes(memoryview(data), begin, begin + column.total_compressed_size) < 51_000


@pytest.mark.parametrize("data", [b"", b"\x15", b"\x15" + b"\xff" * 12, b"\x1c" * 9, b"\x19\x00", b"\x15\x06\x00"])
def test_other_bytes_are_no_pages(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"page|outside"):
        chunk_bytes(memoryview(data), 0, len(data))


def test_a_struct_is_read() -> None:
    assert CompactReader(memoryview(b"\x15\x04\x15\x80\x01\x2c\x15\x0e\x00\x00"), 0).struct() == {
        1: 2,
        2: 64,
        4: {1: 7},
    }


def test_every_file_of_a_data_set_is_within_the_limits(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", [1, 40, 7], file_bytes=200)
    assert [row.id for row in dataset.index] == ["e0", "e1", "e2"]
    assert sum(len(rows.t) for file in dataset.files() for rows in dataset.rows(file)) == 51
