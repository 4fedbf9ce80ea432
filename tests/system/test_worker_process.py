"""A worker's process: its preparation, its final error, how it ended, and that nothing of it is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qfleet.errors import UsageError
from qfleet.system.child_process import fork_server
from qfleet.system.worker_process import FinalError, WorkerOptions, WorkerProcess, exit_text

LIMIT_SECONDS = 30.0


def wait_until(ready: Callable[[], Any]) -> None:
    limit = time.monotonic() + LIMIT_SECONDS
    while not ready():
        assert time.monotonic() < limit
        time.sleep(0.01)


def fail(setup: Exception) -> None:
    raise setup


def leave(code: int) -> None:
    os._exit(code)


def write_and_wait(file: str) -> None:
    Path(file).write_text(os.environ.get("QFLEET_TEST_SECRET", "none"))
    print("printed by the worker", flush=True)
    time.sleep(60)


def start_child_and_wait(file: str) -> None:
    child = subprocess.Popen([sys.executable, "-P", "-c", "import time; time.sleep(60)"], start_new_session=True)
    Path(file).write_text(str(child.pid))
    time.sleep(60)


@pytest.fixture
def started() -> Iterator[Callable[..., WorkerProcess]]:
    workers: list[WorkerProcess] = []

    def start(target: Callable[[Any], None], setup: Any, options: WorkerOptions | None = None) -> WorkerProcess:
        worker = WorkerProcess(fork_server(), "test", target, setup, options or WorkerOptions())
        workers.append(worker)
        worker.start()
        return worker

    yield start
    for worker in workers:
        worker.stop()
        worker.close()


Start = Callable[..., WorkerProcess]


def test_an_error_is_reported_with_all_its_parts(started: Start) -> None:
    worker = started(fail, UsageError("what", "why", "fix"))
    wait_until(lambda: not worker.is_alive())
    assert worker.final_error() == FinalError("what", "why", "fix", exit_code=2)
    assert worker.how_ended() == "what"


def test_a_long_error_fits_into_its_page(started: Start) -> None:
    worker = started(fail, UsageError("ä" * 5000, "b" * 5000, "c" * 5000))
    wait_until(lambda: not worker.is_alive())
    error = worker.final_error()
    assert error is not None
    assert error.what == "ä" * 600
    assert error.fix == "c" * 1200


def test_a_process_that_ends_without_a_report_is_told_by_its_exit_code(started: Start) -> None:
    worker = started(leave, 7)
    wait_until(lambda: not worker.is_alive())
    assert worker.final_error() is None
    assert worker.how_ended() == "its process ended with exit code 7"


def test_a_killed_process_is_told_by_its_signal(started: Start, tmp_path: Path) -> None:
    worker = started(write_and_wait, str(tmp_path / "file"))
    wait_until((tmp_path / "file").exists)
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.how_ended() == "its process was ended by SIGKILL"


def test_output_goes_to_the_log_and_variables_reach_the_worker(started: Start, tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    options = WorkerOptions(log=str(log), variables={"QFLEET_TEST_SECRET": "known"})
    worker = started(write_and_wait, str(tmp_path / "file"), options)
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    assert log.read_text() == "printed by the worker\n"
    assert (tmp_path / "file").read_text() == "known"
    assert "known" not in repr(worker.options)


def test_a_stopped_process_is_ended_too(started: Start, tmp_path: Path) -> None:
    worker = started(write_and_wait, str(tmp_path / "file"))
    wait_until((tmp_path / "file").exists)
    os.kill(worker.pid, signal.SIGSTOP)
    worker.stop(timeout_seconds=5.0)
    assert not worker.is_alive()


def test_what_a_worker_started_ends_with_it(started: Start, tmp_path: Path) -> None:
    options = WorkerOptions(starts_processes=True, stops_on_sigterm=True)
    worker = started(start_child_and_wait, str(tmp_path / "file"), options)
    wait_until(lambda: (tmp_path / "file").exists() and (tmp_path / "file").read_text())
    child = int((tmp_path / "file").read_text())
    worker.stop(timeout_seconds=10.0)
    wait_until(lambda: not Path(f"/proc/{child}").exists())


def test_ends_have_a_text() -> None:
    assert exit_text(0) == "ended with exit code 0"
    assert exit_text(-9) == "was ended by SIGKILL"
    assert exit_text(-63) == "was ended by signal 63"
    assert exit_text(None) == "has not ended"
