"""The process of one worker on this machine: how it starts, how it reports its final error, and how it ends.

Every role that has processes of its own (actors, replay, learners, shards of a parameter server) starts them with
`WorkerProcess`, and every such process begins in `run_worker`, which prepares it before the role's own function runs.
"""

import os
import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import current_process
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from qfleet.errors import QfleetError, UsageError
from qfleet.files import open_log
from qfleet.system.child_process import StopRequested, die_with_parent, hidden_main
from qfleet.system.descendants import adopt_orphans, end_descendants
from qfleet.system.oom import oom_kills
from qfleet.system.shared_memory import SharedMemory

STOP_SECONDS = 0.5  # for a process that was killed to be reaped
DESCENDANTS_SECONDS = 0.3  # for processes that environments have started
ERROR_BYTES = 4096
LENGTH = struct.Struct("=I")
TEXT_BYTES = 1_200  # of each part of a final error: all parts fit into ERROR_BYTES


class FinalError(msgspec.Struct, tag=True):
    """Why a worker ended by itself: the parts of the error and its exit code; a log may have the traceback."""

    what: str
    why: str = ""
    fix: str = ""
    exit_code: int = 1

    def message(self) -> str:
        """The text for a log; a UsageError is raised instead, because a restart cannot fix it."""
        if self.exit_code == UsageError.exit_code:
            raise UsageError(self.what, self.why, self.fix)
        return self.what


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker's process is like."""

    log: str | None = None  # the file that takes its output; without one the output is dropped
    starts_processes: bool = False  # a process group of its own, whose processes end with it
    stops_on_sigterm: bool = False  # SIGTERM raises StopRequested, so that environments are closed first
    variables: dict[str, str] = field(default_factory=dict, repr=False)  # environment variables, which may be secrets


class WorkerProcess:
    """A worker's process as its parent sees it."""

    def __init__(
        self,
        context: ForkServerContext,
        name: str,
        target: Callable[[Any], None],
        setup: Any,
        options: WorkerOptions,
        *,
        needs_main: bool = False,
    ) -> None:
        self.errors = SharedMemory(ERROR_BYTES)
        self.options = options
        self.needs_main = needs_main  # does its setup hold something that the user's script defines?
        self.oom_kills = oom_kills()  # when it started
        self.last_report: FinalError | None = None
        self.closed = False
        args = (target, setup, options, self.errors)
        self.process: BaseProcess = context.Process(target=run_worker, args=args, name=f"qfleet-{name}", daemon=True)

    def start(self) -> None:
        """Start the process."""
        with hidden_main(not self.needs_main):
            self.process.start()

    @property
    def pid(self) -> int:
        """The id of the process; 0 before it was started."""
        return self.process.pid or 0

    def is_alive(self) -> bool:
        """Does the process run?"""
        return self.process.is_alive()

    def final_error(self) -> FinalError | None:
        """The error that the worker reported before it ended, if it could."""
        if self.closed:
            return self.last_report
        length = LENGTH.unpack_from(self.errors.view)[0]
        with suppress(msgspec.DecodeError):
            report = self.errors.view[LENGTH.size : LENGTH.size + length]
            return msgspec.msgpack.decode(report, type=FinalError) if length else None
        return None

    def how_ended(self) -> str:
        """Why the process has ended: the error it reported, or its exit code or signal."""
        self.process.join(STOP_SECONDS)  # pipes and sockets of a process close a moment before it ends
        error = self.final_error()
        if error is not None:
            return error.what
        code = self.process.exitcode
        if code == -signal.SIGKILL and oom_kills() > self.oom_kills:
            return "its process was killed by the kernel, for lack of memory"
        return f"its process {exit_text(code)}"

    def request_stop(self) -> None:
        """Send SIGTERM; a stopped process is continued, so that it can obey."""
        if self.process.is_alive():
            self.process.terminate()
            with suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)

    def stop(self, timeout_seconds: float = 0.0) -> None:
        """End the process and what it has started; it may take `timeout_seconds` to end by itself."""
        if timeout_seconds > 0:
            self.request_stop()
            self.process.join(timeout_seconds)
        if self.pid and self.process.is_alive():
            self.process.kill()
            self.process.join(STOP_SECONDS)
        if self.pid and self.options.starts_processes:
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Free its memory; the final error stays known. The process must have been stopped."""
        if not self.closed:
            self.last_report = self.final_error()
            self.closed = True
            self.errors.close()


def exit_text(code: int | None) -> str:
    """How a process ended, by its exit code."""
    if code is None:
        return "has not ended"
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def run_worker(target: Callable[[Any], None], setup: Any, options: WorkerOptions, errors: SharedMemory) -> None:
    """Where every worker's process begins: prepare it, run the role's function, report an error that ends it."""
    die_with_parent()
    os.environ.update(options.variables)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the driver decides
    if options.stops_on_sigterm:
        signal.signal(signal.SIGTERM, on_sigterm)
    if options.starts_processes:
        with suppress(OSError):
            os.setpgid(0, 0)
        adopt_orphans()
        current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a daemon may have no children
    redirect_output(options.log)
    try:
        target(setup)
    except Exception as error:
        report = msgspec.msgpack.encode(final_error_of(error))
        errors.view[LENGTH.size : LENGTH.size + len(report)] = report
        LENGTH.pack_into(errors.view, 0, len(report))  # last: a report that was cut off is not read
        raise
    finally:
        if options.starts_processes:
            end_descendants(DESCENDANTS_SECONDS, grace_seconds=0.0)


def on_sigterm(number: int, frame: object) -> None:
    """The handler of SIGTERM: close environments, then end; a second signal does not disturb that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise StopRequested(0)


def redirect_output(file: str | None) -> None:
    """Send standard output and error to a file, or nowhere: never over the user's screen."""
    target = open_log(file or os.devnull)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)


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
