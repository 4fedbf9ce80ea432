"""The parent's side of an environment worker: starting its process, sending commands, receiving replies, stopping."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from qfleet import errors
from qfleet.data import Spec
from qfleet.data.space_format import EnvSpaces, read_spaces
from qfleet.envs.workers.main import (
    MADE_FLAG_AT,
    REPORT_BYTES,
    RUN,
    STOP,
    EnvProbe,
    EnvProbeSetup,
    EnvWorkerSetup,
    EnvWorkerTask,
    env_worker_main,
    probe_main,
)
from qfleet.envs.workers.memory import EnvWorkerMemory
from qfleet.errors import EnvError
from qfleet.files import open_log
from qfleet.frames import user_frames
from qfleet.system.child_process import LOG_BYTES, fork_server
from qfleet.system.cores import thread_variables
from qfleet.system.shared_memory import SharedMemory
from qfleet.system.silence import SilenceTimer
from qfleet.system.worker_process import WorkerOptions, WorkerProcess

START_SECONDS = 60.0  # imports and constructors may take a while
_POLL_SECONDS = 0.05


class EnvWorkerFailed(Exception):
    """The traceback that a worker reported: the cause of an error in this process."""


class EnvWorkerProcess:
    """One worker with its own memory, so that its replacement after a fault shares nothing with it."""

    def __init__(self, task: EnvWorkerTask, spec: Spec, lanes: int, log: str, now: float) -> None:
        self.memory = EnvWorkerMemory(spec, lanes, num_info=len(task.info))
        self._log = log
        self.state: Literal["starting", "idle", "busy", "dead"] = "starting"
        self.since = now  # when it was started, or when its last commands were sent
        self._silence = SilenceTimer(now)  # since then, or since a lane's command began
        self._heard_at = now
        self.connection, child_connection = socket.socketpair()
        setup = EnvWorkerSetup(task, spec, lanes, self.memory.region, child_connection)
        self.process = make_process("environment", env_worker_main, task, setup, log)
        with child_connection:
            self.process.start()
        self.connection.setblocking(False)

    def run_commands(self, now: float) -> None:
        """Have the worker execute the commands in its memory."""
        self.state = "busy"
        self.since = now
        self._heard_at = now
        self._silence.reset(now)
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
            if self.process.exit_code() is not None:
                self.state = "dead"
            return
        except OSError:
            data = b""
        if not data:
            self.state = "dead"
        elif self.state != "dead":
            self.state = "idle"

    def seconds_left(self, step_seconds: float, now: float) -> float:
        """Seconds until its reply is overdue; zero or less if it is."""
        if self.state == "starting":
            return START_SECONDS - self._silence.elapsed(now)
        if (started_at := self.memory.started_at) > self._heard_at:
            self._heard_at = started_at
            self._silence.reset(started_at)
        limit = max(step_seconds, START_SECONDS) if self.memory.making else step_seconds
        return limit - self._silence.elapsed(now)

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

    def request_stop(self) -> None:
        """Ask it to close its environments and exit."""
        with contextlib.suppress(OSError):
            self.connection.send(STOP)

    def stop(self, timeout_seconds: float = 0.0) -> None:
        """Wait for the process to exit, then kill it and all processes it started, and free the memory."""
        self.process.join(timeout_seconds)
        self.process.close()
        self.connection.close()
        self.truncate_log()
        self.state = "dead"
        self.memory.region.close()


def make_process(name: str, target: Callable[[Any], None], task: EnvWorkerTask, setup: Any, log: str) -> WorkerProcess:
    """A process that makes environments."""
    context = fork_server("qfleet.envs.workers.main")  # a replacement need not import anything
    variables = {**thread_variables(1), **task.variables}  # its environments share the machine with others
    options = WorkerOptions(log, folder=task.folder, own_group=True, variables=variables)
    return WorkerProcess(context, name, target, setup, options)


def probe_env(task: EnvWorkerTask, seed: int, log: str) -> tuple[Spec, tuple[str, ...], EnvSpaces | None]:
    """Make and reset an environment in a process of its own; its spec, notes about it, and its spaces."""
    probe = _run_probe(task, seed, log, "when the first copy was made and reset")
    spec = Spec(probe.obs, probe.dtype, probe.actions, masked=probe.masked)
    return spec, probe.notes, read_spaces(probe.spaces.encode()) if probe.spaces else None


def measure_step_seconds(task: EnvWorkerTask, step_seconds: float) -> float:
    """Seconds per step, timed in a process of its own within `step_seconds`."""
    return _run_probe(task, 0, os.devnull, "when its steps were timed", step_seconds).step_seconds


def _run_probe(task: EnvWorkerTask, seed: int, log: str, doing: str, timed_seconds: float | None = None) -> EnvProbe:
    """Try an environment in a child process; its steps are timed if they have `timed_seconds` for that."""
    report = SharedMemory(REPORT_BYTES)
    process = make_process("probe", probe_main, task, EnvProbeSetup(task, seed, timed_seconds is not None, report), log)
    process.start()
    start = time.monotonic()
    while process.is_alive() and not report.view[MADE_FLAG_AT] and time.monotonic() - start < START_SECONDS:
        process.join(_POLL_SECONDS)
    if report.view[MADE_FLAG_AT]:
        process.join(timed_seconds or 0.0)
    hung = f"was not done after {time.monotonic() - start:.0f} s"
    ending = hung if process.is_alive() else process.exit_text()
    crash = process.current_traceback()
    code = process.exit_code()
    text = bytes(report.view[:MADE_FLAG_AT]).split(b"\0", 1)[0]
    process.close()
    report.close()
    if code != 0 or not text:  # an environment may call os._exit(0) before the report is written
        raise _probe_lost(task.env.id, ending, doing, crash)
    probe = msgspec.json.decode(text, type=EnvProbe)
    if probe.error is not None:
        name, *parts = probe.error
        raise getattr(errors, name, EnvError)(*parts) from EnvWorkerFailed(probe.traceback)
    return probe


def _probe_lost(name: str, ending: str, doing: str, text: str) -> EnvError:
    at = "".join(f" at {frame}" for frame in user_frames(text, 1))
    error = EnvError(
        f"{name}: the environment's process {ending} {doing}{at}.",
        "Nothing can be learned in it before it was reset once and could be stepped.",
        f"Mend the environment; `qfleet env check {name}` makes one in the foreground.",
    )
    error.__cause__ = EnvWorkerFailed(text)
    return error
