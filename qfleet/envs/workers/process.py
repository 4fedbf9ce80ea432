"""The parent's side of an environment worker: starting its process, sending commands, receiving replies, stopping."""

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing import util
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import msgspec

from qfleet import errors
from qfleet.data import Spec
from qfleet.envs.workers.main import (
    MADE_FLAG_AT,
    REPORT_BYTES,
    RUN,
    STOP,
    EnvProbe,
    EnvWorkerTask,
    env_worker_main,
    probe_main,
    timing_main,
)
from qfleet.envs.workers.memory import EnvWorkerMemory
from qfleet.errors import EnvError, QfleetError
from qfleet.files import open_log
from qfleet.frames import user_frames
from qfleet.heartbeat import TRACEBACK_SIGNAL
from qfleet.system.child_process import LOG_BYTES, fork_server, hidden_main, kill_process_group
from qfleet.system.shared_memory import SharedMemory
from qfleet.system.worker_process import exit_text

START_SECONDS = 60.0  # imports and constructors may take a while
_EXIT_SECONDS = 2.0
_TRACEBACK_SECONDS = 0.3
_POLL_SECONDS = 0.05


class EnvWorkerFailed(Exception):
    """The traceback that a worker reported: the cause of an error in this process."""


class EnvWorkerProcess:
    """One worker with its own memory, so that its replacement after a fault shares nothing with it."""

    def __init__(self, task: EnvWorkerTask, spec: Spec, lanes: int, log: str, now: float) -> None:
        self.memory = EnvWorkerMemory(spec, lanes)
        self._report = SharedMemory(REPORT_BYTES)
        self._log = log
        self.state: Literal["starting", "idle", "busy", "dead"] = "starting"
        self.since = now  # when it was started, or when its last commands were sent
        self.connection, child_connection = socket.socketpair()
        with child_connection:
            args = (task, spec, lanes, self.memory.region, self._report, child_connection, log)
            self.process = start_process(env_worker_main, args, needs_main(task))
        self.connection.setblocking(False)
        # For a world that is never closed: multiprocessing would terminate a stopped process and wait forever.
        self._finalizer = util.Finalize(self, kill_process_group, (self.process,), exitpriority=10)

    def run_commands(self, now: float) -> None:
        """Have the worker execute the commands in its memory."""
        self.state = "busy"
        self.since = now
        self.memory.outcome[:] = 0
        self.memory.clear_lane()
        try:
            self.connection.send(RUN)
        except OSError:
            self.state = "dead"

    def receive(self) -> None:
        """Receive pending messages without waiting, and update `state`."""
        try:
            data = self.connection.recv(16)
        except BlockingIOError:
            # A process that the environment started may keep the other end open.
            if self.process.exitcode is not None:
                self.state = "dead"
            return
        except OSError:
            data = b""
        if not data:
            self.state = "dead"
        elif self.state != "dead":
            self.state = "idle"

    def deadline(self, step_seconds: float) -> float:
        """When its reply is overdue."""
        if self.state == "starting":
            return self.since + START_SECONDS
        limit = max(step_seconds, START_SECONDS) if self.memory.making else step_seconds
        return max(self.since, self.memory.started_at) + limit

    def resident_bytes(self) -> int:
        """The resident memory of the process; 0 if the system does not report it."""
        try:
            with open(f"/proc/{self.process.pid}/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return 0

    def truncate_log(self) -> None:
        """Truncate a log that an environment floods."""
        with contextlib.suppress(OSError), open(open_log(self._log), "ab") as file:
            if os.fstat(file.fileno()).st_size > LOG_BYTES:
                file.truncate(LOG_BYTES)

    def current_traceback(self) -> str:
        """The traceback of a process that does not reply, if it can still write one."""
        if self.process.exitcode is None and self.state != "starting" and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, TRACEBACK_SIGNAL)
            until = time.monotonic() + _TRACEBACK_SECONDS
            while not self._report.view[0] and time.monotonic() < until:
                time.sleep(0.01)
        return self.crash_traceback()

    def crash_traceback(self) -> str:
        """The traceback that the process wrote when it crashed."""
        return bytes(self._report.view).split(b"\0", 1)[0].decode(errors="replace")

    def exit_text(self) -> str:
        """The exit code or signal, as text."""
        self.process.join(timeout=_EXIT_SECONDS)  # its socket closes a moment before
        return exit_text(self.process.exitcode)

    def request_stop(self) -> None:
        """Ask it to close its environments and exit."""
        with contextlib.suppress(OSError):
            self.connection.send(STOP)

    def stop(self, timeout_seconds: float = 0.0) -> None:
        """Wait for the process to exit, then kill it and all processes it started, and free the memory."""
        self.process.join(timeout=timeout_seconds)
        self._finalizer()
        self.connection.close()
        self.truncate_log()
        self.state = "dead"
        self.memory.region.close()
        self._report.close()


def start_process(target: Callable[..., None], args: tuple[Any, ...], main: bool) -> BaseProcess:
    """Start a process; with `main` it runs the user's script again, which may define the environment."""
    with hidden_main(not main):
        process: BaseProcess = _context().Process(target=target, args=args, daemon=True)  # type: ignore[attr-defined]
        process.start()
    return process


def needs_main(task: EnvWorkerTask) -> bool:
    """Is the user's function defined in the script itself?"""
    return task.make is not None and b"__main__" in task.make


def probe_spec(task: EnvWorkerTask, seed: int, log: str) -> tuple[Spec, tuple[str, ...]]:
    """Make and reset an environment in a process of its own; its spec, and notes about it."""
    probe = _run_probe(task, probe_main, (task, seed), log, "when the first copy was made and reset", 0.0)
    return Spec(probe.obs, probe.dtype, probe.actions, masked=probe.masked), probe.notes


def measure_step_seconds(task: EnvWorkerTask, step_seconds: float) -> float:
    """Seconds per step, timed in a process of its own within `step_seconds`."""
    return _run_probe(task, timing_main, (task, 0), os.devnull, "when its steps were timed", step_seconds).step_seconds


def _run_probe(
    task: EnvWorkerTask, target: Callable[..., None], args: tuple[Any, ...], log: str, doing: str, seconds: float
) -> EnvProbe:
    """Run `target` in a child process and return its report; `seconds` limits it after the environment was made."""
    report = SharedMemory(REPORT_BYTES)
    process = start_process(target, (*args, report, log), needs_main(task))
    start = time.monotonic()
    while process.exitcode is None and not report.view[MADE_FLAG_AT] and time.monotonic() - start < START_SECONDS:
        process.join(timeout=_POLL_SECONDS)
    if process.exitcode is None and report.view[MADE_FLAG_AT]:
        process.join(timeout=seconds)
    hung = f"was not done after {time.monotonic() - start:.0f} s"
    ending = hung if process.exitcode is None else exit_text(process.exitcode)
    if process.exitcode is None and process.pid is not None:
        os.kill(process.pid, TRACEBACK_SIGNAL)
        process.join(timeout=_TRACEBACK_SECONDS)
    code = process.exitcode
    text = bytes(report.view[:MADE_FLAG_AT]).split(b"\0", 1)[0]
    kill_process_group(process)
    report.close()
    if code != 0 or not text:  # an environment may call os._exit(0) before the report is written
        raise _probe_lost(task.env.id, ending, doing, text.decode(errors="replace"))
    probe = msgspec.json.decode(text, type=EnvProbe)
    if probe.error is not None:
        raise _probe_error(probe.error) from EnvWorkerFailed(probe.traceback)
    return probe


def _probe_error(reported: tuple[str, str, str, str]) -> QfleetError:
    name, *parts = reported
    error: QfleetError = getattr(errors, name, EnvError)(*parts)
    return error


def _probe_lost(name: str, ending: str, doing: str, text: str) -> EnvError:
    at = "".join(f" at {frame}" for frame in user_frames(text, 1))
    error = EnvError(
        f"{name}: the environment's process {ending} {doing}{at}.",
        "Nothing can be learned in it before it was reset once and could be stepped.",
        f"Mend the environment; `qfleet env check {name}` makes one in the foreground.",
    )
    error.__cause__ = EnvWorkerFailed(text)
    return error


def _context() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    return fork_server("qfleet.envs.workers.main")  # a replacement need not import anything
