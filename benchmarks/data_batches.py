"""Batches from a cached data set, beside a plain NumPy gather of the same batches from memory-mapped arrays.

The limit reads the same rows in the same order, whose numbers are computed beforehand. Memory: how much the largest
resident size of a process grows from its first epoch to its third, of a set four times larger than the allowed cache.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from qfleet.data import Array, Spec
from qfleet.datasets.format import Description, RecordedEpisode, spec_columns, write_dataset
from qfleet.datasets.storage import open_place
from qfleet.learn.offline.dataset_source import DatasetSource, make_dataset_source
from qfleet.plan import make_plan
from qfleet.replay import make_replay

BAR = 0.8
SECONDS = 1.5
MAX_BATCHES = 20_000
VECTORS = Spec((4,), "float32", (2,))
PICTURES = Spec((84, 84), "uint8", (4,), stack=4)
LARGER = 4  # than the allowed cache


@dataclass(frozen=True)
class Case:
    """A data set, and how it is learned from."""

    row: str
    spec: Spec
    episodes: int
    length: int
    batch: int
    file_bytes: int
    cache_bytes: int = 1 << 30


CASES = (
    Case("vectors of CartPole, batch 256", VECTORS, 2_000, 250, 256, 4 << 20),
    Case("pictures 84x84x4, batch 32", PICTURES, 120, 250, 32, 32 << 20),
    Case("pictures 84x84x4, batch 256", PICTURES, 120, 250, 256, 32 << 20),
)
FLAT = Case("growth of memory from epoch 1 to 3", PICTURES, 160, 250, 32, 8 << 20, cache_bytes=1 << 26)


def episodes(case: Case) -> Iterator[RecordedEpisode]:
    """Made-up episodes; pictures are mostly one colour, as games are."""
    rng = np.random.default_rng(0)
    for number in range(case.episodes):
        obs = rng.integers(0, 256, (case.length + 1, *case.spec.obs)).astype(case.spec.dtype)
        if obs.dtype == np.uint8:
            obs[:, :, 16:] = 87
        action = rng.integers(0, case.spec.num_actions, case.length)
        reward = rng.standard_normal(case.length)
        yield RecordedEpisode(f"e{number}", {"obs": obs}, action, reward, terminated=True, truncated=False)


def write(case: Case, folder: Path) -> None:
    """The data set of a case."""
    description = Description("Logs-v0", case.spec, spec_columns(case.spec))
    write_dataset(open_place(str(folder)), description, episodes(case), {"made_by": "benchmark"}, case.file_bytes)


def open_source(case: Case, folder: Path, **more: Any) -> DatasetSource:
    """What a learner reads."""
    settings = {"replay.type": "dataset", "replay.path": str(folder), "replay.split": "all"}
    settings |= {"algo.batch_size": case.batch, "algo.n_step": 1, "replay.cache_bytes": case.cache_bytes, **more}
    plan = make_plan("Logs-v0", overrides=settings)
    return make_dataset_source(plan, make_replay(plan, case.spec, 1, np.random.default_rng(0)))


class MappedArrays:
    """The columns of a whole data set as memory-mapped arrays, and the gather that anybody would write."""

    def __init__(self, source: DatasetSource, folder: Path, stack: int) -> None:
        self.stack = stack
        self.begins = np.zeros(len(source.shards.files), np.int64)
        columns: dict[str, list[Array]] = {name: [] for name in ("obs", "action", "reward", "discount")}
        self.items: list[Array] = []
        rows = 0
        for number in range(len(source.shards.files)):
            shard = source.shards.shard(number)
            self.begins[number] = rows
            self.items.append(shard.items.copy())
            for name, arrays in columns.items():
                arrays.append(getattr(shard.store, name)[:, 0].copy())
            rows += shard.store.rows
        self.arrays = {name: mapped(np.concatenate(arrays), folder / f"{name}.npy") for name, arrays in columns.items()}

    def rows_of(self, source: DatasetSource, positions: Array) -> Array:  # [N]
        """The rows of the transitions at these positions."""
        shards, numbers = source.order.locate(positions)
        found = np.empty(len(positions), np.int64)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            found[here] = self.begins[shard] + self.items[shard][numbers[here]]
        return found

    def gather(self, rows: Array) -> tuple[Array, ...]:
        """A batch; stacks that begin before their episode are not blanked, which would cost more."""
        arrays = self.arrays
        if self.stack > 1:
            window = rows[:, None] + np.arange(1 - self.stack, 1)
            obs = arrays["obs"][window]
            next_obs = arrays["obs"][window + 1]
        else:
            obs = arrays["obs"][rows]
            next_obs = arrays["obs"][rows + 1]
        ones = np.ones(len(rows), np.float32)
        return obs, arrays["action"][rows], arrays["reward"][rows], arrays["discount"][rows], next_obs, ones


def mapped(array: Array, path: Path) -> Array:
    """The same array, mapped from a file; as a plain array, whose indexing is faster than that of np.memmap."""
    np.save(path, array)
    return np.asarray(np.load(path, mmap_mode="r"))


def rate(step: Callable[[], object], seconds: float = SECONDS) -> float:
    """Calls per second."""
    begun = time.perf_counter()
    num = 0
    while (now := time.perf_counter()) - begun < seconds and num < MAX_BATCHES:
        step()
        num += 1
    return num / (now - begun)


def measure_case(case: Case, folder: Path, rounds: int, seconds: float = SECONDS) -> list[list[dict[str, Any]]]:
    """Ours and the limit in turn, each from its second epoch on, when everything was read once."""
    write(case, folder / "set")
    source = open_source(case, folder / "set")
    arrays = MappedArrays(source, folder, case.spec.stack)
    size = len(source.order)
    rows = arrays.rows_of(source, np.arange(size // case.batch * case.batch)).reshape(-1, case.batch)
    at = 0

    def gather() -> None:
        nonlocal at
        arrays.gather(rows[at % len(rows)])
        at += 1

    for _ in range(len(rows)):
        source.next_batch(0)
        gather()
    found = []
    for _ in range(rounds):
        ours = rate(lambda: source.next_batch(0), seconds)
        limit = rate(gather, seconds)
        found.append([{"row": case.row, "unit": "batches/s", "ours": ours, "limit": limit, "bar": BAR}])
    source.close()
    return found


def peak_mib() -> float:
    """The largest resident size of this process since it was asked last."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # begin anew
    return found


def read_epochs(folder: str, disk_bytes: str) -> None:
    """Read three epochs; print the largest resident size during each."""
    source = open_source(FLAT, Path(folder), **{"replay.disk_bytes": int(disk_bytes)})
    found = []
    for _ in range(3):
        peak_mib()
        for _ in range(len(source.order) // FLAT.batch):
            source.next_batch(0)
        found.append(peak_mib())
    sizes = {"peaks": found, "decoded": source.shards.num_decoded, "files": len(source.shards.files)}
    print(json.dumps({**sizes, "bytes": sum(file.rows for file in source.shards.files) * 84 * 84}))
    source.close()


def measure_memory(folder: Path, disk_bytes: int) -> dict[str, Any]:
    """The growth beside the allowed cache: flat is far below 1."""
    call = "import sys; from benchmarks.data_batches import read_epochs; read_epochs(*sys.argv[1:])"
    command = [sys.executable, "-c", call, str(folder / "set"), str(disk_bytes)]
    environment = {**os.environ, "QFLEET_CACHE": str(folder / "cache")}
    done = subprocess.run(  # noqa: S603
        command, cwd=report.ROOT, env=environment, check=True, capture_output=True, timeout=600
    )
    found = json.loads(done.stdout)
    if found["bytes"] < LARGER * FLAT.cache_bytes:
        raise ValueError("the set is not four times larger than the allowed cache")
    where = "mapped files" if disk_bytes else "decoded again"
    growth = max(0.0, found["peaks"][2] - found["peaks"][0])
    return {
        "row": f"{FLAT.row}, {where}",
        "unit": "MiB (limit: the allowed cache)",
        "ours": growth,
        "limit": FLAT.cache_bytes / 2**20,
        "bar": 0.1,
        "most": True,
        **found,
    }


def measure(rounds: int) -> list[list[dict[str, Any]]]:
    """A list of rows per round."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(rounds)]
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            own = Path(folder) / str(number)
            own.mkdir()
            for rows, more in zip(found, measure_case(case, own, rounds), strict=True):
                rows += more
        write(FLAT, Path(folder) / "set")
        for rows in found:
            rows += [measure_memory(Path(folder), disk_bytes) for disk_bytes in (8 << 30, 0)]
    return found
