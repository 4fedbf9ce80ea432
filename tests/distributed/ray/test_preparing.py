"""Data prepared by Ray Data: the result of one process, also when processes of Ray are killed."""

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from qfleet.datasets.prepare import PreparePlan, prepare_dataset
from qfleet.distributed.preparing.capacity import measure_capacities
from qfleet.distributed.preparing.choosing import make_engine
from qfleet.errors import StorageError, UsageError
from tests.support.recorded import make_dataset

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
PLAN = PreparePlan(file_bytes=4_000)
LENGTHS = [3 + at % 11 for at in range(600)]


def busy_workers() -> list[int]:
    """Processes of Ray that do work now: Ray names them after it."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            title = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
            if title.startswith(b"ray::") and b"IDLE" not in title and b"Map" in title:
                found.append(int(folder.name))
    return found


def kill_some(stopped: threading.Event, killed: list[int], most: int) -> None:
    chance = random.Random(3)
    while not stopped.is_set() and len(killed) < most:
        time.sleep(chance.uniform(0.005, 0.05))
        if workers := busy_workers():
            with suppress(ProcessLookupError):
                os.kill(chance.choice(workers), signal.SIGKILL)
                killed.append(1)
                time.sleep(0.5)


def test_the_result_is_that_of_one_process_also_when_processes_are_killed(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "raw", LENGTHS, file_bytes=2_000)
    version = prepare_dataset(dataset, str(tmp_path / "local"), PLAN)
    assert prepare_dataset(dataset, str(tmp_path / "ray"), PLAN, make_engine("ray", 2)) == version
    assert validate_dataset(open_dataset(str(tmp_path / "ray"))) == []
    stopped = threading.Event()
    killed: list[int] = []
    killer = threading.Thread(target=kill_some, args=(stopped, killed, 3))
    killer.start()
    try:
        assert prepare_dataset(dataset, str(tmp_path / "killed"), PLAN, make_engine("ray", 2)) == version
    finally:
        stopped.set()
        killer.join(10)
    print(f"{len(killed)} processes of Ray were killed")
    assert killed


def test_an_error_of_the_data_keeps_its_kind(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "raw", [5] * 100, file_bytes=2_000)
    file = tmp_path / "raw" / dataset.files()[1].name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StorageError, match="its bytes are not those that the manifest lists"):
        prepare_dataset(dataset, str(tmp_path / "out"), PLAN, make_engine("ray", 2))
    assert not (tmp_path / "out/manifest.json").exists()


def test_this_machine_is_one_node() -> None:
    assert measure_capacities("ray", None, 2, None) == (1.0,)
    with pytest.raises(UsageError, match="--shards 3 does not go with --capacity measured"):
        measure_capacities("ray", 3, 2, None)
