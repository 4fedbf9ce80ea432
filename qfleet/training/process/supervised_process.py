"""A process that is supervised from outside: its exit, its output, and the user's code that it is in."""

import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from qfleet.escape import escaped
from qfleet.frames import user_frames
from qfleet.heartbeat import TRACEBACK_SIGNAL, Heartbeat

MAX_OUTPUT_BYTES = 1_000_000
READ_BYTES = 1 << 16
TRACEBACK_SECONDS = 0.3  # for the process to write its traceback


@dataclass(frozen=True, slots=True)
class ExitVerdict:
    """How a process ended that did not end by itself."""

    code: int
    state: str | None  # of the run; None: its status stays as it is, and readers see that its process has ended
    what: str
    frames: tuple[str, ...] = ()


class SupervisedProcess:
    """The process that does the work; with `adopts`, processes that lose their parent become children of ours."""

    def __init__(self, pid: int, heartbeat: Heartbeat, output: int, crash_log: int, *, adopts: bool) -> None:
        self.pid = pid
        self.heartbeat = heartbeat
        self.output = output
        self.crash_log = crash_log
        self.adopts = adopts
        self.status: int | None = None  # as waitpid returns it
        self.killed_by_us = False
        self.num_printed = 0  # bytes

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless the process has ended."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def poll(self) -> bool:
        """Has it ended? Adopted processes that have ended are reaped as well."""
        while self.status is None:
            found, status = os.waitpid(-1 if self.adopts else self.pid, os.WNOHANG)
            if found == self.pid:
                self.status = status
            elif not found:
                return False
        return True

    def kill(self) -> None:
        """End it now."""
        self.killed_by_us = True
        self.send_signal(signal.SIGKILL)
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)

    def code(self) -> int:
        """The exit code that it reported, or else that of the system: minus the signal that ended it."""
        reported = self.heartbeat.exit_code()
        return reported if reported is not None else os.waitstatus_to_exitcode(self.status or 0)

    def forward_output(self, seconds: float) -> None:
        """Pass on what environments print, up to a limit; return if nothing is printed within the time."""
        if not select.select([self.output], [], [], seconds)[0]:
            return
        data = os.read(self.output, READ_BYTES)
        if not data:
            time.sleep(0.02)  # the pipe is closed: the process is about to end
            return
        before = self.num_printed
        self.print_limited(data)
        if before < MAX_OUTPUT_BYTES <= self.num_printed:
            print_error("")
            print_error(
                f"warning: the environment has printed {MAX_OUTPUT_BYTES:,} bytes; what it prints now is dropped"
            )

    def print_limited(self, data: bytes) -> None:
        """Write to standard error as much as the limit allows."""
        with suppress(OSError):
            os.write(2, data[: max(0, MAX_OUTPUT_BYTES - self.num_printed)])
        self.num_printed += len(data)

    def drain_output(self) -> None:
        """Pass on what was printed last, and close the descriptors."""
        os.set_blocking(self.output, False)
        with suppress(BlockingIOError):
            while data := os.read(self.output, READ_BYTES):
                self.print_limited(data)
        os.close(self.output)
        os.close(self.crash_log)

    def is_stopped(self) -> bool:
        """Was it stopped, by a signal or by the terminal?"""
        with suppress(OSError, IndexError), open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
        return False

    def current_frames(self) -> tuple[str, ...]:
        """The user's own calls that it is in, if it can still write a traceback."""
        before = os.fstat(self.crash_log).st_size
        self.send_signal(TRACEBACK_SIGNAL)
        until = time.monotonic() + TRACEBACK_SECONDS
        while os.fstat(self.crash_log).st_size == before and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.01)  # it is written in pieces
        return self.logged_frames(before)

    def logged_frames(self, begin: int = 0) -> tuple[str, ...]:
        """The user's own calls in the tracebacks of its crash log."""
        text = os.pread(self.crash_log, READ_BYTES, begin).decode(errors="replace")
        return tuple(str(frame) for frame in user_frames(text))


def print_error(text: str) -> None:
    """Print a line on standard error, without control characters."""
    with suppress(OSError):
        print(escaped(text), file=sys.stderr, flush=True)
