"""Hostile sources of `qfleet data import`: what is made, the message, and options of the command."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Make = Callable[[Path], object]
NUM = 1_000


@dataclass(frozen=True)
class SourceCase:
    """A source, what the command says about it, and its exit code."""

    name: str
    make: Make
    text: str
    file: str = "source.parquet"
    code: int = 5


def transitions(num: int = NUM, **columns: Any) -> pa.Table:
    """Rows that would be imported."""
    rows: dict[str, Any] = {"obs": np.full(num, 0.5), "action": np.zeros(num, np.int64), "reward": np.ones(num)}
    return pa.table(rows | {"terminated": np.ones(num, np.bool_)} | columns)


def parquet(make: Callable[[], pa.Table], **options: Any) -> Make:
    """A Parquet file."""
    return lambda path: pq.write_table(make(), path, compression="zstd", **options)


def repeated(value: Any, kind: Any, num: int, times: int) -> Make:
    """A Parquet file whose column `obs` has one value in many rows, in few bytes."""

    def make(path: Path) -> None:
        column = pa.array([value], kind).take(pa.array(np.zeros(num, np.int32)))
        table = transitions(num, obs=column)
        with pq.ParquetWriter(path, table.schema, compression="zstd") as writer:
            for _ in range(times):
                writer.write_table(table, row_group_size=num)

    return make


def arrow(make: Callable[[], pa.Table], compression: str | None = None) -> Make:
    """An Arrow file."""

    def write(path: Path) -> None:
        table = make()
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(path, table.schema, options=options) as writer:
            writer.write_table(table)

    return write


def huge_arrow(path: Path) -> None:
    """A compressed buffer that says it has 2**60 bytes."""
    arrow(lambda: transitions(50_000), "zstd")(path)
    data = path.read_bytes()
    size = struct.pack("<q", 50_000 * 8)
    assert size in data
    path.write_bytes(data.replace(size, struct.pack("<q", 1 << 60)))


def wrong_offsets(path: Path) -> None:
    """Lists whose offsets leave their values."""
    lists = pa.ListArray.from_arrays(pa.array([0, 7, 14], pa.int32()), pa.array(np.arange(14.0)))
    arrow(lambda: transitions(2, obs=lists))(path)
    offsets = struct.pack("<iii", 0, 7, 14)
    data = path.read_bytes()
    assert offsets in data
    path.write_bytes(data.replace(offsets, struct.pack("<iii", 0, 1 << 28, 1 << 30)))


def footer_of(size: int) -> Make:
    """A Parquet file that says how long its footer is."""

    def make(path: Path) -> None:
        data = parquet(transitions)(path) or path.read_bytes()
        path.write_bytes(data[:-8] + size.to_bytes(4, "little") + b"PAR1")

    return make


def many_columns(path: Path) -> None:
    """A million columns."""
    path.write_bytes(b",".join(b"c%d" % number for number in range(1_000_000)) + b"\n1\n")


def csv(text: bytes) -> Make:
    """A CSV file."""
    return lambda path: path.write_bytes(text)


HEAD = b"episode,obs,action,reward,terminated\n"


def linked(make: Make) -> Make:
    """A link to a good file elsewhere."""

    def link(path: Path) -> None:
        elsewhere = path.parent / "elsewhere"
        make(elsewhere)
        path.symlink_to(elsewhere)

    return link


def minari(change: Callable[[h5py.File, Path], object] = lambda file, folder: None, **metadata: Any) -> Make:
    """A data set of Minari in HDF5 with one episode, and a change of it."""

    def make(path: Path) -> None:
        data = path / "data"
        data.mkdir(parents=True)
        box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [0, 0], "high": [1, 1]}
        action = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 2}
        known = {"total_episodes": 1, "total_steps": 3, "data_format": "hdf5", "dataset_id": "a-v0"}
        known |= {"observation_space": json.dumps(box), "action_space": json.dumps(action)}
        (data / "metadata.json").write_text(json.dumps(known | metadata))
        with h5py.File(data / "main_data.hdf5", "w") as file:
            episode = file.create_group("episode_0")
            episode["observations"] = np.zeros((4, 2), np.float32)
            episode["actions"] = np.zeros(3, np.int64)
            episode["rewards"] = np.zeros(3)
            episode["terminations"] = np.array([False, False, True])
            episode["truncations"] = np.zeros(3, np.bool_)
            change(file, data)

    return make


def instead(name: str, make: Callable[[h5py.Group], object]) -> Callable[[h5py.File, Path], object]:
    """Something else in the place of an array."""

    def change(file: h5py.File, folder: Path) -> None:
        del file["episode_0"][name]
        make(file["episode_0"])

    return change


def virtual(group: h5py.Group) -> None:
    """An array that is in another file."""
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", (3,))
    group.create_virtual_dataset("rewards", layout)


def bomb(group: h5py.Group) -> None:
    """Gigabytes of zeros."""
    group.create_dataset("rewards", (1 << 33,), "f8", chunks=(1 << 20,), compression="gzip")


def linked_folder(path: Path) -> None:
    """A data set whose folder of data is elsewhere."""
    elsewhere = path.parent / "elsewhere"
    minari()(elsewhere)
    path.mkdir()
    (path / "data").symlink_to(elsewhere / "data")


def linked_episode(path: Path) -> None:
    """A table of an episode that is a link."""
    minari(data_format="arrow")(path)
    (path / "data/0").mkdir()
    elsewhere = path.parent / "elsewhere.arrow"
    arrow(transitions)(elsewhere)
    (path / "data/0/part-0.arrow").symlink_to(elsewhere)
    (path / "data/0/metadata.json").write_text("{}")


def pickled_type(path: Path) -> None:
    """A type that old versions of pyarrow unpickled, and Ray's for pickled objects."""
    command = f"cos\nsystem\n(S'touch {path.parent}/executed'\ntR.".encode()
    metadata = {b"ARROW:extension:name": b"ray.data.arrow_pickled_object", b"ARROW:extension:metadata": command}
    table = transitions()
    field = pa.field("obs", pa.binary(), metadata=metadata)
    pq.write_table(table.set_column(0, field, pa.array([command] * NUM, pa.binary())), path)


def notes(text: bytes) -> Callable[[], pa.Table]:
    """A table that says it was exported by qfleet."""
    return lambda: transitions().replace_schema_metadata({b"qfleet": text})


def lists_of(num: int) -> pa.Array:
    """Rows of one list of nothing, many times."""
    return pa.FixedSizeListArray.from_arrays(pa.nulls(0), num) if num else pa.nulls(NUM)


TOO_MUCH = "bytes of memory"
CSV = "source.csv"
ARROW = "source.arrow"
FOLDER = "source"
CASES = (
    SourceCase(
        "parquet-cut", lambda path: path.write_bytes((parquet(transitions)(path) or path.read_bytes())[:-9]), ""
    ),
    SourceCase("parquet-empty", lambda path: path.write_bytes(b""), "cannot be imported"),
    SourceCase("parquet-noise", lambda path: path.write_bytes(os.urandom(5_000)), "cannot be imported"),
    SourceCase("parquet-footer-huge", footer_of(0x7FFFFFF0), "its footer has"),
    SourceCase("parquet-rows", repeated(0.5, pa.float64(), 3_000_000, 18), "54,000,000 rows"),
    SourceCase("parquet-bomb-lists", repeated([0.0] * 100_000, pa.list_(pa.float64()), 60, 10), TOO_MUCH),
    SourceCase("parquet-texts", parquet(lambda: transitions(obs=["x" * 50] * NUM)), "and no numbers"),
    SourceCase("parquet-bomb-id", parquet(lambda: transitions(2, episode=["x" * 50_000_000] * 2)), "500 characters"),
    SourceCase(
        "parquet-times", parquet(lambda: transitions(obs=pa.array([0] * NUM, pa.timestamp("s")))), "is not read"
    ),
    SourceCase("parquet-nulls", parquet(lambda: transitions(reward=pa.nulls(NUM, pa.float64()))), "without a value"),
    SourceCase("parquet-nan", parquet(lambda: transitions(reward=[float("nan")] * NUM)), "not a finite number", code=2),
    SourceCase("parquet-ragged", parquet(lambda: transitions(2, obs=[[1.0], [1.0, 2.0]])), "do not have one length"),
    SourceCase("parquet-pickled", pickled_type, "and no numbers"),
    SourceCase("parquet-notes", parquet(notes(b"[" * 100_000)), "cannot be imported"),
    SourceCase("parquet-link", linked(parquet(transitions)), "ot a regular file"),
    SourceCase("parquet-fifo", os.mkfifo, "ot a regular file"),
    SourceCase(
        "parquet-encoding",
        parquet(
            lambda: transitions(episode=["a"] * NUM),
            use_dictionary=False,
            column_encoding={"episode": "DELTA_BYTE_ARRAY"},
        ),
        "encoding 7",
    ),
    SourceCase(
        "arrow-cut", lambda path: path.write_bytes((arrow(transitions)(path) or path.read_bytes())[:700]), "", ARROW
    ),
    SourceCase("arrow-noise", lambda path: path.write_bytes(b"ARROW1\0\0" + os.urandom(5_000)), "cannot be", ARROW),
    SourceCase("arrow-bomb", arrow(lambda: transitions(14_000_000), "zstd"), TOO_MUCH, ARROW),
    SourceCase("arrow-size-lies", huge_arrow, TOO_MUCH, ARROW),
    SourceCase("arrow-offsets", wrong_offsets, "cannot be imported", ARROW),
    SourceCase("arrow-nothing", arrow(lambda: transitions(obs=pa.nulls(NUM))), "without a value", ARROW),
    SourceCase(
        "arrow-union",
        arrow(lambda: transitions(1, obs=pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]))),
        "is not read",
        ARROW,
    ),
    SourceCase("csv-columns", many_columns, "at most 10,000 columns", CSV),
    SourceCase("csv-long-line", csv(HEAD + b"a,0,0,1," + b"1" * (30 << 20) + b"\n"), "cannot be imported", CSV),
    SourceCase("csv-one-line", csv(b"a" * (30 << 20)), "its first line", CSV),
    SourceCase("csv-not-text", csv(HEAD + b"\xff\xfe\xfa,0,0,1,1\n"), "cannot be imported", CSV),
    SourceCase("csv-name-not-text", csv(b"\xff\xfe,obs\n1,2\n"), "cannot be imported", CSV),
    SourceCase("csv-formula", csv(HEAD + b'"=HYPERLINK(""x"")",0,0,1e300,1\n'), "=HYPERLINK", CSV, 2),
    SourceCase("csv-escapes", csv(HEAD + b"\x1b[31mFORGED line,0,0,1e300,1\n"), "cannot be written", CSV, 2),
    SourceCase("csv-huge-action", csv(HEAD + b"a,0,1e18,1,1\n"), "", CSV, 2),
    SourceCase("csv-infinite-action", csv(HEAD + b"a,0,inf,1,1\n"), "not whole numbers", CSV),
    SourceCase(
        "csv-folder", lambda path: (path.mkdir(), (path / "a.csv").symlink_to("/etc/passwd")), "regular", FOLDER
    ),
    SourceCase("minari-link", linked_folder, "", FOLDER),
    SourceCase("minari-episode-link", linked_episode, "regular file", FOLDER),
    SourceCase(
        "minari-soft",
        minari(instead("rewards", lambda to: to.__setitem__("rewards", h5py.SoftLink("/x")))),
        "link",
        FOLDER,
    ),
    SourceCase(
        "minari-external",
        minari(instead("rewards", lambda to: to.__setitem__("rewards", h5py.ExternalLink("/etc/passwd", "x")))),
        "link",
        FOLDER,
    ),
    SourceCase("minari-virtual", minari(instead("rewards", virtual)), "stored in another file", FOLDER),
    SourceCase(
        "minari-raw-file",
        minari(
            instead("rewards", lambda to: to.create_dataset("rewards", (3,), "f8", external=[("/etc/passwd", 0, 24)]))
        ),
        "stored in another file",
        FOLDER,
    ),
    SourceCase("minari-bomb", minari(instead("rewards", bomb)), TOO_MUCH, FOLDER),
    SourceCase(
        "minari-objects",
        minari(instead("rewards", lambda to: to.create_dataset("rewards", data=["a", "b", "c"]))),
        "and no numbers",
        FOLDER,
    ),
    SourceCase("minari-number-group", minari(instead("rewards", lambda to: to.create_group("rewards"))), "", FOLDER),
    SourceCase(
        "minari-lengths", minari(instead("rewards", lambda to: to.__setitem__("rewards", [1.0]))), "steps", FOLDER, 2
    ),
    SourceCase("minari-space-deep", minari(observation_space="[" * 200_000), "no JSON", FOLDER),
    SourceCase("minari-space-huge", minari(action_space='{"type":"Discrete","n":9' + "0" * 5_000 + "}"), "", FOLDER),
    SourceCase("minari-episodes", minari(total_episodes=10**7), "episode_1 is missing", FOLDER),
    SourceCase("minari-format", minari(data_format="../x"), "is not known", FOLDER),
)
