"""Bytes changed at random: every reader says that a file is damaged, or reads it; nothing else happens."""

import json
import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.data import Spec
from qfleet.datasets.convert.foreign_tables import BatchSizes, read_table
from qfleet.datasets.format import open_dataset
from qfleet.datasets.format.index import read_index
from qfleet.datasets.format.manifest import read_manifest
from qfleet.datasets.format.pages import CompactReader, chunk_bytes
from qfleet.datasets.inspect import validate_dataset
from qfleet.errors import QfleetError
from tests.hostile.cases.data_sets import DATA, INDEX, STATISTICS, seal
from tests.support.recorded import make_dataset

SPEC = Spec((2, 3), "uint8", (2, 2), masked=True)


@cache
def good(name: str) -> bytes:
    """A file of a data set."""
    with tempfile.TemporaryDirectory() as folder:
        make_dataset(Path(folder) / "a", [3, 1, 5], spec=SPEC)
        return (Path(folder) / "a" / name).read_bytes()


def mutated(data: bytes, seed: int) -> bytes:
    """A few bytes changed, put in, left out or repeated."""
    rng = random.Random(seed)
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(max(1, len(found)))
        match rng.randrange(5):
            case 0:
                found[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                found[at : at + 1] = rng.choice((b"\x00", b"\xff", b"\x7f", b"\x80", b"9", b'"', b"-", b"[", b"}"))
            case 2:
                del found[at : at + rng.randint(1, 12)]
            case 3:
                found[at:at] = found[at : at + rng.randint(1, 40)]
            case _:
                found[at:at] = rng.randbytes(rng.randint(1, 8))
    return bytes(found)


READERS: dict[str, tuple[str, Callable[[bytes], object]]] = {
    "manifest": ("manifest.json", read_manifest),
    "pages": (DATA, lambda data: chunk_bytes(memoryview(data), 4, len(data))),
    "header of a page": (DATA, lambda data: CompactReader(memoryview(data), 4).struct()),
    "batch": (DATA, lambda data: BatchSizes.of(data[:200], memoryview(data))),
}


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_a_reader_refuses_or_reads(name: str, seed: int) -> None:
    file, read = READERS[name]
    error = refusal(lambda: read(mutated(good(file), seed)), ValueError)
    assert error is None or 0 < len(str(error)) < 3_000


def refusal(call: Callable[[], object], *kinds: type[Exception]) -> Exception | None:
    """The error of a call, of one of these kinds; None if there is none."""
    try:
        call()
    except kinds as error:
        return error
    return None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_an_index_is_refused_or_read(seed: int) -> None:
    with suppress(ValueError, OSError, pa.ArrowException):
        assert len(read_index(mutated(good(INDEX), seed), 3)) == 3


@pytest.mark.parametrize("name", [DATA, INDEX, STATISTICS, "manifest.json"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_a_changed_file_with_the_right_hash_is_refused_or_read(name: str, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "a"
        make_dataset(place, [3, 1, 5], spec=SPEC)
        (place / name).write_bytes(mutated(good(name), seed))
        if name != "manifest.json":
            seal(place)
        error = refusal(lambda: require_lengths(str(place)), QfleetError)
        assert error is None or getattr(error, "exit_code", None) == 5


def require_lengths(place: str) -> None:
    dataset = open_dataset(place)
    if not validate_dataset(dataset):
        assert [episode.num_steps for file in dataset.files() for episode in dataset.episodes(file)] == [3, 1, 5]


@pytest.mark.parametrize("ending", ["parquet", "arrow", "csv"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_a_changed_table_is_refused_or_read(ending: str, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"a.{ending}").write_bytes(mutated(table_bytes(ending), seed))
        error = refusal(lambda: read_table(Path(folder), f"a.{ending}"), QfleetError)
        assert error is None or getattr(error, "exit_code", None) == 5


@cache
def table_bytes(ending: str) -> bytes:
    """Transitions in a file of another program."""
    rows = {"obs": [[1.0, 2.0]] * 9, "episode": ["a"] * 5 + ["b"] * 4, "reward": [0.5] * 9}
    if ending == "csv":
        return b"obs,episode,reward\n" + b"1.5,a,0.5\n" * 9
    table = pa.table(rows)
    sink = pa.BufferOutputStream()
    if ending == "parquet":
        pa.parquet.write_table(table, sink)
    else:
        with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)
    return bytes(sink.getvalue())


def test_mutations_change_files() -> None:
    assert json.loads(good("manifest.json"))["format"] == 1
    assert len({mutated(good("manifest.json"), seed) for seed in range(50)}) > 45
