"""The outside of a worker: starting its process, telling it to go, hearing from it, ending it."""

import contextlib
import multiprocessing
import os
import signal
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
    DESK_BYTES,
    GO,
    LEAVE,
    MADE_AT,
    TELL_SIGNAL,
    EnvProbe,
    EnvWorkerTask,
    clock,
    scout,
    work,
)
from qfleet.envs.workers.memory import EnvWorkerMemory
from qfleet.errors import EnvError, QfleetError
from qfleet.files import open_log
from qfleet.frames import own_frames
from qfleet.system.child_process import LOG_BYTES, fork_server, hidden_main
from qfleet.system.shared_memory import SharedMemory

START_SECONDS = 60.0  # imports and constructors may take a while
_END_SECONDS = 2.0
_TELL_SECONDS = 0.3
_LOOK_SECONDS = 0.05


class EnvWorkerFailed(Exception):
    """What a worker's process said of a fault: the cause of an error here."""


class EnvWorkerProcess:
    """A worker with a slab of its own: a new one after a fault shares nothing with the one before."""

    def __init__(self, task: EnvWorkerTask, spec: Spec, lanes: int, log: str, now: float) -> None:
        self.slab = EnvWorkerMemory(spec, lanes)
        self._desk = SharedMemory(DESK_BYTES)
        self._log = log
        self.state: Literal["starting", "idle", "busy", "dead"] = "starting"
        self.since = now
        self.line, theirs = socket.socketpair()
        with theirs:
            args = (task, spec, lanes, self.slab.region, self._desk, theirs, log)
            self.process = launched(work, args, needs_main(task))
        self.line.setblocking(False)
        # When nobody closes the world: multiprocessing would ask a stopped process to end, and wait for ever.
        self._finalizer = util.Finalize(self, end_group, (self.process,), exitpriority=10)

    def go(self, now: float) -> None:
        """Have the worker do what its slab says."""
        self.state = "busy"
        self.since = now
        self.slab.outcome[:] = 0
        self.slab.end()
        try:
            self.line.send(GO)
        except OSError:
            self.state = "dead"

    def hear(self) -> None:
        """Take in what it said, without waiting."""
        try:
            said = self.line.recv(16)
        except BlockingIOError:
            # What the environment started may hold the other end open.
            said = b"" if self.process.exitcode is not None else b"nothing"
        except OSError:
            said = b""
        if not said:
            self.state = "dead"
        elif said != b"nothing" and self.state != "dead":
            self.state = "idle"

    def deadline(self, step_seconds: float) -> float:
        """Until when it may be silent."""
        if self.state == "starting":
            return self.since + START_SECONDS
        limit = max(step_seconds, START_SECONDS) if self.slab.making else step_seconds
        return max(self.since, self.slab.beat) + limit

    def resident_bytes(self) -> int:
        """Memory that the process holds; 0 where the system does not say."""
        try:
            with open(f"/proc/{self.process.pid}/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return 0

    def bound_log(self) -> None:
        """Cut a log that an environment floods."""
        with contextlib.suppress(OSError), open(open_log(self._log), "ab") as file:
            if os.fstat(file.fileno()).st_size > LOG_BYTES:
                file.truncate(LOG_BYTES)

    def where(self) -> str:
        """Where in the code a silent process is, if it can still tell."""
        if self.process.exitcode is None and self.state != "starting" and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, TELL_SIGNAL)
            until = time.monotonic() + _TELL_SECONDS
            while not self._desk.view[0] and time.monotonic() < until:
                time.sleep(0.01)
        return self.last_words()

    def last_words(self) -> str:
        """What a crash left on the desk."""
        return bytes(self._desk.view).split(b"\0", 1)[0].decode(errors="replace")

    def how_it_ended(self) -> str:
        """The signal or exit code, in words."""
        self.process.join(timeout=_END_SECONDS)  # its socket closes a moment before
        return ending(self.process)

    def leave(self) -> None:
        """Ask it to close its environments and go."""
        with contextlib.suppress(OSError):
            self.line.send(LEAVE)

    def end(self, patience: float = 0.0) -> None:
        """Nothing of it remains: not the process, nor what it started, nor the memory."""
        self.process.join(timeout=patience)
        self._finalizer()
        self.line.close()
        self.bound_log()
        self.state = "dead"
        self.slab.region.close()
        self._desk.close()


def launched(target: Callable[..., None], args: tuple[Any, ...], main: bool) -> BaseProcess:
    """A started process. Without `main`, the user's script is not run again in it: nothing there is needed."""
    with hidden_main(not main):
        process: BaseProcess = _context().Process(target=target, args=args, daemon=True)  # type: ignore[attr-defined]
        process.start()
    return process


def needs_main(task: EnvWorkerTask) -> bool:
    """Is the user's function one of the script itself?"""
    return task.make is not None and b"__main__" in task.make


def scouted(task: EnvWorkerTask, seed: int, log: str) -> tuple[Spec, tuple[str, ...]]:
    """The spec of an environment that is made and reset once in a process of its own, and notes about it."""
    found = _found(task, scout, (task, seed), log, "when the first copy was made and reset", 0.0)
    return Spec(found.obs, found.dtype, found.actions, masked=found.masked), found.notes


def clocked(task: EnvWorkerTask, step_seconds: float) -> float:
    """Seconds of one step, timed in a process of its own; none may take `step_seconds`."""
    return _found(task, clock, (task, 0), os.devnull, "when its steps were timed", step_seconds).step_seconds


def _found(
    task: EnvWorkerTask, target: Callable[..., None], args: tuple[Any, ...], log: str, doing: str, seconds: float
) -> EnvProbe:
    """What a child process reports about an environment; `seconds` is its limit after the environment was made."""
    desk = SharedMemory(DESK_BYTES)
    process = launched(target, (*args, desk, log), needs_main(task))
    begin = time.monotonic()
    while process.exitcode is None and not desk.view[MADE_AT] and time.monotonic() - begin < START_SECONDS:
        process.join(timeout=_LOOK_SECONDS)
    if process.exitcode is None and desk.view[MADE_AT]:
        process.join(timeout=seconds)
    how = f"was not done after {time.monotonic() - begin:.0f} s" if process.exitcode is None else ending(process)
    if process.exitcode is None and process.pid is not None:
        os.kill(process.pid, TELL_SIGNAL)
        process.join(timeout=_TELL_SECONDS)
    code = process.exitcode
    text = bytes(desk.view[:MADE_AT]).split(b"\0", 1)[0]
    end_group(process)
    desk.close()
    if code != 0 or not text:  # an environment may leave by os._exit(0), before anything was seen
        raise _never_seen(task.env.id, how, doing, text.decode(errors="replace"))
    found = msgspec.json.decode(text, type=EnvProbe)
    if found.error is not None:
        raise _told(found) from EnvWorkerFailed(found.traceback)
    return found


def ending(process: BaseProcess) -> str:
    """How a process ended, in words."""
    code = process.exitcode
    if code is None:
        return "did not come to an end"
    if code >= 0:
        return f"left with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _told(found: EnvProbe) -> QfleetError:
    name, *parts = found.error or ("EnvError", "", "", "")
    kind = getattr(errors, name, EnvError)
    error: QfleetError = kind(*parts)
    return error


def _never_seen(name: str, how: str, doing: str, text: str) -> EnvError:
    at = "".join(f" at {frame}" for frame in own_frames(text, 1))
    error = EnvError(
        f"{name}: the environment's process {how} {doing}{at}.",
        "Nothing can be learned in it before it was reset once and could be stepped.",
        f"Mend the environment; `qfleet env check {name}` makes one in the foreground.",
    )
    error.__cause__ = EnvWorkerFailed(text)
    return error


def end_group(process: BaseProcess) -> None:
    """End a process at once, and what it has started."""
    if process.exitcode is None:
        process.kill()
    if process.pid:  # the group of nobody would be our own
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # what its environments started
    process.join(timeout=_END_SECONDS)
    with contextlib.suppress(ValueError):
        process.close()


def _context() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    return fork_server("qfleet.envs.workers.main")  # so that a replacement need not import anything
