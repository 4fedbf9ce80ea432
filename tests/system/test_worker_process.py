"""A worker's process: its preparation, its final error, how it ended, and that nothing of it is left."""

import ctypes
import json
import multiprocessing
import os
import re
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
from qfleet.system.worker_errors import FinalError, raise_usage_error
from qfleet.system.worker_process import WorkerOptions, WorkerProcess, exit_text

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


def crash(_: None) -> None:
    ctypes.string_at(0)


def report_itself(file: str) -> None:
    facts = {
        "folder": os.getcwd(),
        "leads": os.getpgrp() == os.getpid(),
        "keeps_hangup": signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN,
        "keeps_ctrl_c": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
        "held": bool(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "input": os.read(0, 1).decode(),
        "children": multiprocessing.get_context("spawn").Process(target=print).daemon,
    }
    Path(file).with_suffix(".draft").write_text(json.dumps(facts))
    Path(file).with_suffix(".draft").rename(file)
    time.sleep(60)


@pytest.fixture
def started() -> Iterator[Callable[..., WorkerProcess]]:
    workers: list[WorkerProcess] = []

    def start(
        target: Callable[[Any], None], setup: Any, options: WorkerOptions | None = None, context: Any = None
    ) -> WorkerProcess:
        worker = WorkerProcess(context or fork_server(), "test", target, setup, options or WorkerOptions())
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
    assert worker.reported_error() == FinalError("what", "why", "fix", exit_code=2)
    assert worker.how_ended() == "what"


def test_a_long_error_fits_into_its_page(started: Start) -> None:
    worker = started(fail, UsageError("ä" * 5000, "b" * 5000, "c" * 5000))
    wait_until(lambda: not worker.is_alive())
    error = worker.reported_error()
    assert error is not None
    assert error.what == "ä" * 600
    assert error.fix == "c" * 1200


def test_a_process_that_ends_without_a_report_is_told_by_its_exit_code(started: Start) -> None:
    worker = started(leave, 7)
    wait_until(lambda: not worker.is_alive())
    assert worker.reported_error() is None
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


def test_the_place_of_a_crash_is_told(started: Start) -> None:
    worker = started(crash, None)
    wait_until(lambda: not worker.is_alive())
    assert "Segmentation fault" in worker.crash_traceback()
    assert re.fullmatch(
        r"its process was ended by SIGSEGV at .*test_worker_process.py:\d+ in crash", worker.how_ended()
    )


def test_a_silent_process_tells_where_it_is(started: Start, tmp_path: Path) -> None:
    worker = started(write_and_wait, str(tmp_path / "file"))
    wait_until((tmp_path / "file").exists)
    assert "in write_and_wait" in worker.current_traceback()
    assert worker.is_alive()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_process_is_what_its_options_say(started: Start, tmp_path: Path, method: str) -> None:
    context = fork_server() if method == "forkserver" else multiprocessing.get_context("spawn")
    plain = started(report_itself, str(tmp_path / "plain"), context=context)
    options = WorkerOptions(folder=str(tmp_path), own_group=True, keeps_signals=True)
    other = started(report_itself, str(tmp_path / "other"), options, context)
    wait_until(lambda: (tmp_path / "plain").exists() and (tmp_path / "other").exists())
    facts = json.loads((tmp_path / "plain").read_text())
    assert facts.pop("folder") == os.getcwd()
    assert facts == {
        "leads": False, "keeps_hangup": False, "keeps_ctrl_c": False, "held": False, "input": "", "children": False
    }  # fmt: skip
    facts = json.loads((tmp_path / "other").read_text())
    assert (facts["folder"], facts["leads"], facts["keeps_ctrl_c"]) == (str(tmp_path), True, True)
    assert (plain.exit_code(), other.exit_code()) == (None, None)


def test_ctrl_c_before_a_worker_is_ready_ends_it_without_a_word(started: Start, capfd: Any) -> None:
    worker = started(leave, 0, WorkerOptions(keeps_signals=True), multiprocessing.get_context("spawn"))
    os.kill(worker.pid, signal.SIGINT)
    wait_until(lambda: not worker.is_alive())
    assert worker.exit_code() == 130
    assert capfd.readouterr() == ("", "")


PARENT = """
import os, signal, sys, time
from qfleet.system.child_process import fork_server
from qfleet.system.worker_process import WorkerOptions, WorkerProcess
options = WorkerOptions(death_signal=None) if sys.argv[1] == "outlives" else WorkerOptions()
worker = WorkerProcess(fork_server(), "test", time.sleep, 60, options)
worker.start()
print(worker.pid, flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
os.kill(worker.pid, signal.SIGSTOP)
"""


@pytest.mark.parametrize(
    ("how", "end", "survives"), [("ends", "wait", False), ("outlives", "wait", True), ("ends", "exit", False)]
)
def test_a_worker_ends_with_its_parent_unless_it_is_to_outlive_it(how: str, end: str, survives: bool) -> None:
    command = [sys.executable, "-P", "-c", PARENT, how, end]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.5)
        if end == "wait":
            parent.kill()
    if survives:
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_how_a_worker_ended_is_known_after_its_descriptors_are_closed(started: Start) -> None:
    before = len(os.listdir("/proc/self/fd"))
    worker = started(fail, UsageError("what", "why", "fix"))
    wait_until(lambda: not worker.is_alive())
    worker.stop()
    worker.close()
    assert (worker.how_ended(), worker.exit_code(), worker.is_alive()) == ("what", 1, False)
    assert len(os.listdir("/proc/self/fd")) == before
    report = worker.reported_error()
    assert report is not None
    with pytest.raises(UsageError, match="what"):
        raise_usage_error(report)
    raise_usage_error(FinalError("of another kind"))


def test_ends_have_a_text() -> None:
    assert exit_text(0) == "ended with exit code 0"
    assert exit_text(-9) == "was ended by SIGKILL"
    assert exit_text(-63) == "was ended by signal 63"
    assert exit_text(None) == "has not ended"
