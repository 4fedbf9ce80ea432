"""How fast `qfleet data prepare` is on one core, beside pyarrow that reads and writes the same files.

`ours` is the whole command in one process, from opening the data set until its manifest is written. `limit` reads every
data file by pyarrow and writes it again with the same compression, on one thread; it checks, splits and counts
nothing. Megabytes are those of rows before compression.
"""

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qfleet.data import Spec
from qfleet.datasets.format import Dataset, Description, open_dataset, require_arrow, spec_columns
from qfleet.datasets.format.block import EpisodeBlock
from qfleet.datasets.format.block_writer import BlockWriter
from qfleet.datasets.format.writer import publish
from qfleet.datasets.prepare import PreparePlan, prepare_dataset
from qfleet.datasets.storage import open_place

BAR = 0.5
LEVEL = 3  # of Zstandard, as in data sets


@dataclass(frozen=True)
class Made:
    """A data set that is made for the measurement: episodes of one length, so many of them."""

    name: str
    spec: Spec
    length: int
    episodes: int


KINDS = (
    Made("prepare", Spec((4,), "float32", (2,)), 200, 5_000),
    Made("prepare, short episodes", Spec((4,), "float32", (2,)), 22, 46_000),
    Made("prepare, pictures", Spec((84, 84), "uint8", (6,)), 1_000, 20),
)


def measure(rounds: int) -> list[dict[str, Any]]:
    """A row for every kind of data and round; ours and the limit take turns."""
    pa = require_arrow()
    threads = (pa.cpu_count(), pa.io_thread_count())
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    folder = Path(tempfile.mkdtemp(prefix="qfleet-prepare-"))
    try:
        return [row for kind in KINDS for row in measure_kind(kind, folder / kind.name.replace(" ", "-"), rounds)]
    finally:
        shutil.rmtree(folder)
        pa.set_cpu_count(threads[0])
        pa.set_io_thread_count(threads[1])


def measure_kind(kind: Made, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """The rows of one kind."""
    dataset = make(kind, folder / "raw")
    size = sum(file.rows for file in dataset.files()) * dataset.manifest.layout.row_bytes / 1e6
    prepare(dataset, folder / "first")  # imports, and pages of memory
    found = []
    for _ in range(rounds):
        limit = size / copy(dataset, folder / "limit")
        ours = size / prepare(dataset, folder / "ours")
        found.append({"row": kind.name, "unit": "MB/s per core", "ours": ours, "limit": limit, "bar": BAR})
    return found


def make(kind: Made, folder: Path) -> Dataset:
    """Write the data set: walks of numbers, or pictures with a few moving squares."""
    rng = np.random.default_rng(1)
    writer = BlockWriter(open_place(folder), Description("Made-v0", kind.spec, spec_columns(kind.spec)))
    for number in range(kind.episodes):
        writer.add(block(kind, number, rng))
    written = writer.finish()
    writer.close()
    publish(writer.place, writer.description, written, {"made_by": "benchmark"})
    return open_dataset(str(folder))


def block(kind: Made, number: int, rng: np.random.Generator) -> EpisodeBlock:
    """One episode."""
    rows = kind.length + 1
    if kind.spec.dtype == "uint8":
        obs = np.full((rows, *kind.spec.obs), 87, np.uint8)
        for row, (x, y, paddle) in enumerate(rng.integers(0, 68, (rows, 3)).tolist()):
            obs[row, x : x + 3, y : y + 3] = 236
            obs[row, paddle : paddle + 16, 4:6] = 130
    else:
        obs = np.cumsum(rng.normal(0, 0.05, (rows, *kind.spec.obs)), 0).astype(np.float32)
    actions = kind.spec.num_actions
    return EpisodeBlock(
        [f"made-{number:07d}"],
        ["random"],
        np.array([kind.length]),
        np.array([True]),
        np.array([False]),
        {"obs": obs},
        rng.integers(0, actions, rows),
        np.ones(rows),
        np.full(rows, 1 / actions),
    )


def prepare(dataset: Dataset, target: Path) -> float:
    """Seconds of the whole command."""
    began = time.perf_counter()
    prepare_dataset(open_dataset(dataset.place.url), str(target), PreparePlan())
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def copy(dataset: Dataset, target: Path) -> float:
    """Seconds of pyarrow alone."""
    pq = require_arrow().parquet
    began = time.perf_counter()
    target.mkdir()
    for number, file in enumerate(dataset.files()):
        table = pq.read_table(Path(dataset.place.url) / file.name, use_threads=False)
        options = {"compression": "zstd", "compression_level": LEVEL, "use_dictionary": ["episode"]}
        pq.write_table(table, target / f"{number}.parquet", **options)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


if __name__ == "__main__":
    for row in measure(3):
        print(f"{row['row']}: {row['ours']:.0f} of {row['limit']:.0f} {row['unit']}, {row['ours'] / row['limit']:.2f}")
