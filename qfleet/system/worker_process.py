"""The process of one worker on this machine: how it starts, how it reports its final error, and how it ends.

Every role that has processes of its own on this machine (environments, actors, replay, learners, shards of a parameter
server, members of a sweep; and measurements) starts them with `WorkerProcess`. Every such process begins in
`run_worker`, which prepares it before the role's own function runs.
"""

import faulthandler
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import current_process, forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from qfleet.errors import QfleetError
from qfleet.frames import user_frames
from qfleet.heartbeat import TRACEBACK_SIGNAL
from qfleet.system.child_process import StopRequested, hidden_main, redirect_output
from qfleet.system.descendants import adopt_orphans, die_with_parent, end_descendants, kill_group
from qfleet.system.oom import oom_kills
from qfleet.system.shared_memory import SharedMemory
from qfleet.system.worker_errors import FinalError

EXIT_SECONDS = 2.0  # for a process that has closed its pipes, or was killed, to end
DESCENDANTS_SECONDS = 0.3  # for processes that environments have started
TRACEBACK_SECONDS = 0.3  # for a process to write where it is
LENGTH = struct.Struct("=I")
TEXT_BYTES = 1_200  # of each part of a final error: all parts fit into the bytes before the crash log
# The memory of a worker: the length of its final error, that error, and from here on what `faulthandler` writes.
CRASH_LOG_AT = 4_096
MEMORY_BYTES = 65_536
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker's process is like."""

    log: str | None = None  # the file that takes its output; without one the output is dropped
    folder: str | None = None  # the folder it works in, if not that of its parent
    own_group: bool = False  # a process group of its own, which is killed with it
    starts_processes: bool = False  # implies own_group; all processes that it started end with it
    stops_on_sigterm: bool = False  # SIGTERM raises StopRequested, so that environments are closed first
    keeps_signals: bool = False  # Ctrl-C and SIGHUP are not ignored: it saves and ends by itself
    death_signal: signal.Signals | None = signal.SIGKILL  # when its parent ends; None: it outlives the parent
    variables: dict[str, str] = field(default_factory=dict, repr=False)  # environment variables, which may be secrets


class WorkerProcess:
    """A worker's process as its parent sees it; one that is dropped, or left when this process ends, is killed."""

    def __init__(
        self,
        context: ForkServerContext | SpawnContext,
        name: str,
        target: Callable[[Any], None],
        setup: Any,
        options: WorkerOptions,
    ) -> None:
        self.memory = SharedMemory(MEMORY_BYTES)
        self.options = options
        self.oom_kills = oom_kills()  # when it started
        self.closed = False
        self.pid = 0  # before the start
        self._exit_code: int | None = None  # this and the report as of `close`
        self._report: FinalError | None = None
        self.is_spawned = context.get_start_method() == "spawn"
        parent = os.getpid() if self.is_spawned else None  # otherwise its parent is the fork server
        args = (target, setup, options, self.memory, parent)
        self.process: BaseProcess = context.Process(target=run_worker, args=args, name=f"qfleet-{name}", daemon=True)
        self._kill: Callable[[], Any] | None = None

    def start(self) -> None:
        """Start the process."""
        with hidden_main(), held_signals() if self.is_spawned else nullcontext():
            self.process.start()
        self.pid = self.process.pid or 0
        has_group = self.options.own_group or self.options.starts_processes
        # Not left to multiprocessing, which would terminate a stopped process and wait forever.
        self._kill = util.Finalize(self, kill_process, (self.process, has_group), exitpriority=10)

    def is_alive(self) -> bool:
        """Does the process run?"""
        return not self.closed and self.process.is_alive()

    def join(self, timeout_seconds: float) -> None:
        """Wait until the process has ended, at most this long."""
        if self.pid and not self.closed:
            self.process.join(timeout_seconds)

    def exit_code(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self._exit_code if self.closed else self.process.exitcode

    def reported_error(self) -> FinalError | None:
        """The error that the worker reported before it ended, if it could."""
        if self.closed:
            return self._report
        length = LENGTH.unpack_from(self.memory.view)[0]
        with suppress(msgspec.DecodeError):
            report = self.memory.view[LENGTH.size : LENGTH.size + length]
            return msgspec.msgpack.decode(report, type=FinalError) if length else None
        return None

    def crash_traceback(self) -> str:
        """The traceback that the process wrote when it crashed."""
        if self.closed:
            return ""
        return bytes(self.memory.view[CRASH_LOG_AT:]).split(b"\0", 1)[0].decode(errors="replace")

    def current_traceback(self) -> str:
        """The traceback of a process that does not reply, if it can still write one."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, TRACEBACK_SIGNAL)
            until = time.monotonic() + TRACEBACK_SECONDS
            while not self.memory.view[CRASH_LOG_AT] and time.monotonic() < until:
                time.sleep(0.01)
        return self.crash_traceback()

    def exit_text(self) -> str:
        """Its exit code or signal as text."""
        self.join(EXIT_SECONDS)  # pipes and sockets of a process close a moment before it ends
        return exit_text(self.exit_code())

    def how_ended(self) -> str:
        """Why the process has ended: the error it reported, or its exit code or signal and where it crashed."""
        text = self.exit_text()
        error = self.reported_error()
        if error is not None:
            return error.what
        if self.exit_code() == -signal.SIGKILL and oom_kills() > self.oom_kills:
            return "its process was killed by the kernel, for lack of memory"
        return f"its process {text}" + "".join(f" at {frame}" for frame in user_frames(self.crash_traceback(), 1))

    def request_stop(self) -> None:
        """Send SIGTERM; a stopped process is continued, so that it can obey."""
        if self.is_alive():
            self.process.terminate()
            with suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)

    def stop(self, timeout_seconds: float = 0.0) -> None:
        """End the process and what it has started; it may take `timeout_seconds` to end by itself."""
        if timeout_seconds > 0:
            self.request_stop()
            self.join(timeout_seconds)
        if self._kill is not None:
            self._kill()

    def close(self) -> None:
        """Stop it, and free its memory and descriptors; how it ended stays known."""
        self.stop()
        if not self.closed:
            self._report = self.reported_error()
            self._exit_code = self.exit_code()
            self.closed = True
            self.memory.close()
            with suppress(ValueError):  # it could not be killed
                self.process.close()


def kill_process(process: BaseProcess, has_group: bool) -> None:
    """Kill a process, and all processes of its group if it leads one."""
    if process.is_alive():
        process.kill()
    if has_group:
        kill_group(process.pid or 0)
    process.join(EXIT_SECONDS)


def exit_text(code: int | None) -> str:
    """How a process ended, by its exit code."""
    if code is None:
        return "has not ended"
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


@contextmanager
def held_signals() -> Iterator[None]:
    """Signals to a process that is started in the block wait until `run_worker` has prepared it.

    Ctrl-C would otherwise end it before it has a process group of its own, with a traceback over the user's screen.
    """
    resource_tracker.ensure_running()  # its start inside the block would let the signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_worker(
    target: Callable[[Any], None], setup: Any, options: WorkerOptions, memory: SharedMemory, parent: int | None
) -> None:
    """Where every worker's process begins: prepare it, run the role's function, report an error that ends it."""
    try:
        prepare_process(options, memory, parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # see held_signals
        target(setup)
    except KeyboardInterrupt:  # a worker that keeps its signals was asked to stop before it could handle that
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        report = msgspec.msgpack.encode(final_error_of(error))
        memory.view[LENGTH.size : LENGTH.size + len(report)] = report
        LENGTH.pack_into(memory.view, 0, len(report))  # last: a report that was cut off is not read
        raise
    finally:
        if options.starts_processes:
            end_descendants(DESCENDANTS_SECONDS, grace_seconds=0.0)


def prepare_process(options: WorkerOptions, memory: SharedMemory, parent: int | None) -> None:
    """Make this process what its options say; it writes its traceback into `memory` on a crash."""
    close_fork_server_pipe()
    if options.death_signal is not None:
        die_with_parent(options.death_signal, parent)
    os.environ.update(options.variables)
    if not options.keeps_signals:
        for ignored in (signal.SIGINT, signal.SIGHUP):  # they reach all processes of a terminal; the driver decides
            signal.signal(ignored, signal.SIG_IGN)
    if options.stops_on_sigterm:
        signal.signal(signal.SIGTERM, on_sigterm)
    if options.own_group or options.starts_processes:
        with suppress(OSError):
            os.setpgid(0, 0)
    if options.starts_processes:
        adopt_orphans()
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a daemon may have no children
    redirect_output(options.log)
    os.lseek(memory.fileno(), CRASH_LOG_AT, os.SEEK_SET)
    faulthandler.enable(memory.fileno(), all_threads=False)
    faulthandler.register(TRACEBACK_SIGNAL, memory.fileno(), all_threads=False)
    if options.folder is not None:
        os.chdir(options.folder)


def close_fork_server_pipe() -> None:
    """Close this child's copy of the pipe by which the fork server, and with it its children, ends with its parent."""
    server: Any = forkserver._forkserver
    if getattr(server, "_forkserver_alive_fd", None) is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def on_sigterm(number: int, frame: object) -> None:
    """The handler of SIGTERM: close environments, then end; a second signal does not disturb that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise StopRequested(0)


def final_error_of(error: BaseException) -> FinalError:
    """An error as a report that fits into a page."""
    if isinstance(error, QfleetError):
        what, why, fix = (shortened(part, TEXT_BYTES) for part in (error.what, error.why, error.fix))
        return FinalError(what, why, fix, error.exit_code)
    return FinalError(shortened(f"{type(error).__name__}: {error}", TEXT_BYTES))


def shortened(text: str, num_bytes: int) -> str:
    """The first `num_bytes` bytes of a text, or its last ones if the number is negative."""
    data = text.encode(errors="replace")
    return (data[:num_bytes] if num_bytes > 0 else data[num_bytes:]).decode(errors="ignore")
