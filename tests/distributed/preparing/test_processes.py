"""Preparing data with processes of this machine: the same result, whatever happens to them."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from qfleet.datasets.prepare import PreparePlan, Work, prepare_dataset
from qfleet.distributed.preparing import choosing, spark
from qfleet.distributed.preparing.choosing import make_engine
from qfleet.distributed.preparing.processes import ATTEMPTS, ProcessEngine, launch_worker
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.errors import QfleetError, StorageError, UsageError
from qfleet.install import install_command
from tests.support.recorded import make_dataset

pytestmark = pytest.mark.chaos
PLAN = PreparePlan(file_bytes=4_000)
LENGTHS = [3 + at % 11 for at in range(300)]


def shout(order: bytes) -> bytes:
    """A small work: orders that are files end their process if the file is there."""
    file = Path(order.decode())
    if file.is_file():
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if order == b"always":
        os.kill(os.getpid(), signal.SIGKILL)
    if order == b"error":
        raise ValueError("something unexpected")
    return order.upper()


def test_the_version_does_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "raw", LENGTHS, file_bytes=2_000)
    versions = {
        prepare_dataset(dataset, str(tmp_path / str(jobs)), PLAN, make_engine("local", jobs)) for jobs in (1, 3)
    }
    assert len(versions) == 1
    assert validate_dataset(open_dataset(str(tmp_path / "3"))) == []


def test_answers_come_in_the_order_of_the_orders_and_lost_ones_are_done_again(tmp_path: Path) -> None:
    deadly = [tmp_path / name for name in ("a", "b")]
    for file in deadly:
        file.touch()
    orders = [b"1", str(deadly[0]).encode(), b"2", b"3", str(deadly[1]).encode(), b"4"]
    assert list(ProcessEngine(2).map(shout, orders)) == [order.upper() for order in orders]
    assert not any(file.exists() for file in deadly)
    assert list(ProcessEngine(4).map(shout, [])) == []


def test_work_that_always_ends_its_process_is_given_up() -> None:
    with pytest.raises(QfleetError, match=f"lost {ATTEMPTS} workers at the same work") as error:
        list(ProcessEngine(2).map(shout, [b"1", b"always"]))
    assert "SIGKILL" in error.value.why
    assert "--jobs 1" in error.value.fix


def test_an_unexpected_error_of_a_worker_is_not_repeated() -> None:
    with pytest.raises(QfleetError, match="ValueError: something unexpected"):
        list(ProcessEngine(2).map(shout, [b"1", b"error"]))


def test_an_error_of_the_data_keeps_its_kind(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "raw", [5] * 100, file_bytes=2_000)
    file = tmp_path / "raw" / dataset.files()[1].name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StorageError, match="its bytes are not those that the manifest lists"):
        prepare_dataset(dataset, str(tmp_path / "out"), PLAN, make_engine("local", 2))
    assert not (tmp_path / "out/manifest.json").exists()


@dataclass
class MurderousEngine:
    """Kills a random worker whenever an answer has come."""

    seed: int
    workers: dict[int, WorkerHandle] = field(default_factory=dict)
    num_killed: int = 0

    def map(self, work: Work, orders: Sequence[bytes]) -> Iterator[bytes]:
        chance = random.Random(self.seed)
        for answer in ProcessEngine(2, self.launch).map(work, orders):
            yield answer
            time.sleep(chance.uniform(0, 0.01))
            worker = self.workers[chance.randrange(2)]
            if chance.random() < 0.5 and worker.ready and worker.num_outstanding:
                with suppress(ProcessLookupError):
                    os.kill(worker.control.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                    self.num_killed += 1

    def launch(self, work: Work, number: int) -> WorkerHandle:
        self.workers[number] = launch_worker(work, number)
        return self.workers[number]


@pytest.mark.parametrize(
    "num", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_killed_workers_do_not_change_the_result(tmp_path: Path, num: int) -> None:
    dataset = make_dataset(tmp_path / "raw", LENGTHS, file_bytes=2_000)
    version = prepare_dataset(dataset, str(tmp_path / "whole"), PLAN)
    killed = 0
    for seed in range(num):
        engine = MurderousEngine(seed)
        assert prepare_dataset(dataset, str(tmp_path / str(seed)), PLAN, engine) == version
        killed += engine.num_killed
    print(f"{killed} workers were killed")
    assert killed >= num


def kill_in_the_middle(source: Path, target: Path, jobs: int, wait_seconds: float) -> str:
    """Kill a preparation some time after its first file; what was found: `middle`, or `late` if it had ended."""
    command = [sys.executable, "-m", "tests.distributed.preparing.prepare_child", str(source), str(target), str(jobs)]
    started = time.time_ns()
    with subprocess.Popen(command) as child:
        until = time.monotonic() + 60
        while time.monotonic() < until and child.poll() is None and not written_since(target, started):
            time.sleep(0.001)
        time.sleep(wait_seconds)
        child.kill()
        ended = child.wait(30)
    return "middle" if ended == -signal.SIGKILL else "late"


def written_since(target: Path, since_ns: int) -> bool:
    """Has a data file been written since then?"""
    data = target / "data"
    return data.exists() and any(file.stat().st_mtime_ns >= since_ns for file in data.glob("*.parquet"))


MANY = [pytest.mark.slow, pytest.mark.soak]


@pytest.mark.parametrize(
    ("num_kills", "jobs"),
    [
        (1, 1),
        pytest.param(5, 2, marks=pytest.mark.slow),
        pytest.param(40, 1, marks=MANY),
        pytest.param(30, 2, marks=MANY),
    ],
)
@pytest.mark.timeout(600)
def test_a_command_that_is_killed_anywhere_ends_with_the_same_version(
    tmp_path: Path, num_kills: int, jobs: int
) -> None:
    dataset = make_dataset(tmp_path / "raw", LENGTHS * 2, file_bytes=2_000)
    began = time.monotonic()
    version = prepare_dataset(dataset, str(tmp_path / "whole"), PLAN)
    seconds = time.monotonic() - began
    chance = random.Random(7)
    target = tmp_path / "out"
    in_the_middle = 0
    for _ in range(num_kills):
        found = kill_in_the_middle(tmp_path / "raw", target, jobs, chance.uniform(0, seconds / 2))
        if (target / "manifest.json").exists():
            assert open_dataset(str(target)).version == version
            assert validate_dataset(open_dataset(str(target))) == []
            target = tmp_path / f"out-{chance.random()}"
        else:
            in_the_middle += found == "middle"
    assert prepare_dataset(dataset, str(target), PLAN, make_engine("local", jobs)) == version
    assert validate_dataset(open_dataset(str(target))) == []
    print(f"{in_the_middle} of {num_kills} kills were in the middle")
    assert in_the_middle >= num_kills / 3


def test_engines_and_their_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--engine dask is not known"):
        make_engine("dask")
    with pytest.raises(UsageError, match="--address does not go with --engine local"):
        make_engine("local", address="127.0.0.1:6379")
    with pytest.raises(UsageError, match="--jobs 2000 is too many"):
        make_engine("local", 2_000)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(UsageError, match=re.escape(install_command("spark"))):
        spark.require_spark()
    monkeypatch.setattr(choosing.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(UsageError, match=re.escape(install_command("ray"))):
        make_engine("ray")
