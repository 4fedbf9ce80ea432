"""Hostile data sets: what was done to a good one, which commands must refuse it, and what they must say."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA = "data/all-00000.parquet"
INDEX = "episodes.parquet"
STATISTICS = "statistics.json"
ALL = ("inspect", "validate", "prepare", "train")
OF_STATISTICS = ("inspect", "validate")
OF_DATA = ("validate", "prepare", "train")
DEEP = 200_000
Change = Callable[[Path], object]


@dataclass(frozen=True)
class DataCase:
    """A change of a good data set, the commands that refuse it, and a part of their message."""

    name: str
    change: Change
    text: str
    refused_by: tuple[str, ...] = ALL


def manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest."""
    found = json.loads((folder / "manifest.json").read_text())
    change(found)
    (folder / "manifest.json").write_text(json.dumps(found))


def seal(folder: Path, **counts: int) -> None:
    """Give the manifest the sizes and hashes of the files as they are, so that only their content is wrong."""

    def entries(found: dict[str, Any]) -> None:
        for entry in [*found["files"], found["index"], found["statistics"]]:
            data = (folder / entry["name"]).read_bytes()
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        found["files"][0] |= counts
        for name in counts.keys() & {"episodes", "steps"}:
            found[f"num_{name}"] = counts[name]

    manifest(folder, entries)


def in_manifest(change: Callable[[dict[str, Any]], object]) -> Change:
    """A change of the manifest alone."""
    return lambda folder: manifest(folder, change)


def table_of(name: str, change: Callable[[pa.Table], pa.Table], **options: Any) -> Change:
    """A change of a Parquet file; its size and hash are right."""

    def apply(folder: Path) -> None:
        table = change(pq.read_table(folder / name))
        pq.write_table(table, folder / name, **options)
        seal(folder)

    return apply


def bytes_of(name: str, change: Callable[[bytes], bytes], sealed: bool = True) -> Change:
    """A change of a file's bytes; with `sealed` its size and hash are right."""

    def apply(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        if sealed:
            seal(folder)

    return apply


def with_value(column: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    """A table with another value in one place."""

    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(column)
        values = table[column].to_pylist()
        values[row] = value
        return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))

    return change


def with_type(column: str, kind: Any) -> Callable[[pa.Table], pa.Table]:
    """A table with a column of another type."""
    return lambda table: table.set_column(table.schema.get_field_index(column), column, table[column].cast(kind))


def in_place_of(name: str, make: Callable[[Path], object]) -> Change:
    """Something else in the place of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return apply


def linked(name: str) -> Change:
    """A link to the same content elsewhere."""

    def apply(folder: Path) -> None:
        elsewhere = folder.parent / "elsewhere"
        shutil.move(folder / name, elsewhere)
        (folder / name).symlink_to(elsewhere)

    return apply


def many_rows(folder: Path) -> None:
    """Rows that take a few bytes each in the file and gigabytes in memory."""
    table = pq.read_table(folder / DATA)
    row = table.take([0] * 1_000_000)
    with pq.ParquetWriter(folder / DATA, table.schema, compression="zstd") as writer:
        for _ in range(20):
            writer.write_table(row, row_group_size=len(row))
    seal(folder, rows=20_000_000, episodes=12, steps=20_000_000 - 12)


def many_episodes(folder: Path) -> None:
    """An index of more episodes than anybody has."""
    seal(folder, rows=2 * 10**9, episodes=10**9, steps=10**9)


def long_text(folder: Path, num_bytes: int, **options: Any) -> None:
    """Ids of many bytes, which compress to almost nothing."""
    table = pq.read_table(folder / DATA)
    ids = pa.array(["a" * num_bytes, *table["episode"].to_pylist()[1:]])
    pq.write_table(table.set_column(0, table.schema.field(0), ids), folder / DATA, compression="zstd", **options)
    seal(folder)


def lying_footer(folder: Path) -> None:
    """A page of 300 MB whose footer says that it has a few bytes."""
    long_text(folder, 300_000_000, use_dictionary=False)
    metadata = pq.ParquetFile(folder / DATA).metadata.row_group(0)
    data = (folder / DATA).read_bytes()
    body, footer = data[:-200_000], data[-200_000:]
    for size in (metadata.column(0).total_uncompressed_size, metadata.total_byte_size):
        assert varint(size) in footer
        footer = footer.replace(varint(size), varint(100, len(varint(size))))
    (folder / DATA).write_bytes(body + footer)
    assert pq.ParquetFile(folder / DATA).metadata.row_group(0).total_byte_size == 100
    seal(folder)


def varint(value: int, length: int = 0) -> bytes:
    """A number in Thrift's compact protocol, padded to a length."""
    value *= 2
    found = bytearray()
    while value > 127 or len(found) < length - 1:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def with_code(folder: Path) -> None:
    """A type that old versions of pyarrow unpickled when they read the schema."""
    table = pq.read_table(folder / DATA)
    canary = f"cos\nsystem\n(S'touch {folder.parent}/executed'\ntR.".encode()
    field = table.schema.field(2)
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": canary}
    pq.write_table(table.set_column(2, field.with_metadata(extension), table["action"]), folder / DATA)
    manifest(folder, lambda found: found["files"][0].update(sha256="0" * 64))
    seal(folder)


def statistics(change: Callable[[dict[str, Any]], object]) -> Change:
    """A change of the statistics; their size and hash are right."""

    def apply(folder: Path) -> None:
        found = json.loads((folder / STATISTICS).read_text())
        change(found)
        (folder / STATISTICS).write_text(json.dumps(found))
        seal(folder)

    return apply


def obs_bytes(*values: float) -> bytes:
    """An observation of CartPole."""
    import numpy as np

    return np.array(values, "<f4").tobytes()


NAN = float("nan")
CASES = (
    DataCase("manifest-missing", lambda folder: (folder / "manifest.json").unlink(), "there is no data set"),
    DataCase("manifest-is-fifo", in_place_of("manifest.json", os.mkfifo), "there is no data set"),
    DataCase("manifest-is-link", linked("manifest.json"), "there is no data set"),
    DataCase("manifest-not-json", bytes_of("manifest.json", lambda data: data[:-20], False), "manifest.json"),
    DataCase("manifest-not-text", bytes_of("manifest.json", lambda data: b"\xff\xfe" + data, False), "manifest.json"),
    DataCase("manifest-deep", bytes_of("manifest.json", lambda _: b"[" * DEEP + b"]" * DEEP, False), "manifest.json"),
    DataCase(
        "manifest-deep-field",
        bytes_of("manifest.json", lambda data: b'{"x":' + b"[" * DEEP + b"]" * DEEP + b"," + data[1:], False),
        "manifest.json",
    ),
    DataCase(
        "manifest-huge",
        bytes_of("manifest.json", lambda data: data + b" " * (80 << 20), False),
        "67,108,864 are the most",
    ),
    DataCase("format-unknown", in_manifest(lambda found: found.update(format=2)), "its format is 2"),
    DataCase("field-unknown", in_manifest(lambda found: found.update(run="x")), "unknown field"),
    DataCase("path-up", in_manifest(lambda found: found["files"][0].update(name="../a.parquet")), "matching regex"),
    DataCase("path-absolute", in_manifest(lambda found: found["index"].update(name="/etc/passwd")), "matching regex"),
    DataCase("split-unknown", in_manifest(lambda found: found["files"][0].update(split="dev")), "Invalid enum value"),
    DataCase("counts-wrong", in_manifest(lambda found: found.update(num_steps=7)), "num_steps"),
    DataCase("spec-huge", in_manifest(lambda found: found["spec"].update(obs=[8_000_000, 8_000_000])), "its spec has"),
    DataCase("actions-huge", in_manifest(lambda found: found["spec"].update(actions=[2**52, 2**52])), "joint actions"),
    DataCase("episodes-huge", many_episodes, "1,000,000,000 episodes"),
    DataCase("index-link", linked(INDEX), "episodes.parquet"),
    DataCase("index-hash", bytes_of(INDEX, lambda data: data[:40] + b"x" + data[41:], False), "episodes.parquet"),
    DataCase("index-empty", bytes_of(INDEX, lambda _: b""), "episodes.parquet"),
    DataCase("index-two-ids", table_of(INDEX, with_value("id", 1, "e0")), "two episodes have the id 'e0'"),
    DataCase("index-other-file", table_of(INDEX, with_value("file", 1, "../x")), "is not in the manifest"),
    DataCase("index-other-split", table_of(INDEX, with_value("split", 1, "test")), "is of split 'test'"),
    DataCase("index-length", table_of(INDEX, with_value("length", 1, 9)), "the manifest says"),
    DataCase(
        "statistics-lists",
        statistics(lambda found: found["all"]["returns"].update(count=[])),
        STATISTICS,
        OF_STATISTICS,
    ),
    DataCase("statistics-split", statistics(lambda found: found.update(test=found["all"])), STATISTICS, OF_STATISTICS),
    DataCase("statistics-deep", bytes_of(STATISTICS, lambda _: b"[" * DEEP), STATISTICS, OF_STATISTICS),
    DataCase("statistics-huge", bytes_of(STATISTICS, lambda data: data + b" " * (33 << 20)), STATISTICS, OF_STATISTICS),
    DataCase(
        "statistics-sketch",
        statistics(lambda found: found["all"]["returns"].update(sketch=[{"buckets": [3, 3], "counts": [6, 6]}])),
        "rising order",
        OF_STATISTICS,
    ),
    DataCase("data-no-reward", table_of(DATA, with_value("reward", 8, None)), "reward is there without", OF_DATA),
    DataCase("data-one-more-reward", table_of(DATA, with_value("reward", 5, 1.0)), "reward is there without", OF_DATA),
    DataCase("data-gone", lambda folder: (folder / DATA).unlink(), DATA, OF_DATA),
    DataCase("data-is-fifo", in_place_of(DATA, os.mkfifo), "ot a regular file", OF_DATA),
    DataCase("data-is-folder", in_place_of(DATA, os.mkdir), "ot a regular file", OF_DATA),
    DataCase("data-folder-link", linked("data"), "ot a regular file", OF_DATA),
    DataCase("data-cut", bytes_of(DATA, lambda data: data[:-100], False), "its bytes are not those", OF_DATA),
    DataCase(
        "data-bit", bytes_of(DATA, lambda data: bytes([data[0] ^ 1]) + data[1:], False), "its bytes are not", OF_DATA
    ),
    DataCase("data-cut-sealed", bytes_of(DATA, lambda data: data[:-100]), DATA, OF_DATA),
    DataCase("data-no-footer", bytes_of(DATA, lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1"), DATA, OF_DATA),
    DataCase("data-noise", bytes_of(DATA, lambda data: data[:60] + b"\xff" * 60 + data[120:]), DATA, OF_DATA),
    DataCase("data-type", table_of(DATA, with_type("action", pa.int32())), "its columns are not those", OF_DATA),
    DataCase("data-column", table_of(DATA, lambda table: table.drop_columns("reward")), "its columns are not", OF_DATA),
    DataCase("data-rows", table_of(DATA, lambda table: table.slice(0, 6)), "the manifest says 72", OF_DATA),
    DataCase("data-code", with_code, "", ()),
    DataCase("data-nan", table_of(DATA, with_value("reward", 8, NAN)), "not a finite number", OF_DATA),
    DataCase("data-inf", table_of(DATA, with_value("obs", 8, obs_bytes(0, 1, float("inf"), 0))), "not finite", OF_DATA),
    DataCase("data-large-reward", table_of(DATA, with_value("reward", 8, 1e300)), "not a finite number", OF_DATA),
    DataCase("data-action", table_of(DATA, with_value("action", 8, 2)), "an action is not one of 2", OF_DATA),
    DataCase("data-action-below", table_of(DATA, with_value("action", 8, -(2**63))), "an action is not one", OF_DATA),
    DataCase("data-probability", table_of(DATA, with_value("probability", 8, 1.5)), "the probability of some", OF_DATA),
    DataCase(
        "episode-cut",
        table_of(DATA, lambda table: table.take([0, 1, 2, 5, 3, 4, *range(6, 72)])),
        "not in order",
        OF_DATA,
    ),
    DataCase(
        "episode-twice",
        table_of(DATA, lambda table: table.take([*range(6), *range(6), *range(12, 72)])),
        "does not list its episode 'e0'",
        OF_DATA,
    ),
    DataCase("bomb-rows", many_rows, "rows of data/all-00000.parquet take more"),
    DataCase(
        "bomb-page", lambda folder: long_text(folder, 300_000_000, use_dictionary=False), "bytes of memory", OF_DATA
    ),
    DataCase("bomb-lying-footer", lying_footer, "bytes of memory", OF_DATA),
    DataCase("bomb-long-id", lambda folder: long_text(folder, 900_000), "a text in its column episode", OF_DATA),
    DataCase(
        "bomb-encoding",
        table_of(DATA, lambda table: table, use_dictionary=False, column_encoding={"episode": "DELTA_BYTE_ARRAY"}),
        "encoding 7",
        OF_DATA,
    ),
    DataCase(
        "texts-escapes",
        lambda folder: (
            table_of(INDEX, with_value("behaviour", 1, "\x1b[31m\nFORGED line"))(folder),
            manifest(folder, lambda found: found["settings"].update({"made\n\x1b]0;by": "x\r\nFORGED line"})),
        ),
        "",
        (),
    ),
    DataCase("id-escapes", table_of(INDEX, with_value("id", 1, "\x1b[31m\nFORGED line")), DATA, OF_DATA),
)
