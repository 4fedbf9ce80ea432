"""Memory shared by a process and its supervisor: the environment call that is running, the run, the exit code.

`enter_env_call` and `leave_env_call` mark every call of an environment, with or without a supervisor. The output of
environments goes to the supervisor, which limits its size; qfleet's own output goes to the terminal.
"""

import faulthandler
import io
import json
import mmap
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

CALLS = ("step", "reset", "the constructor", "close", "render", "the module")
STEP, RESET, MAKE, CLOSE, RENDER, IMPORT = range(len(CALLS))
DESCRIPTORS_VARIABLE = "QFLEET_HEARTBEAT"  # the descriptors of page, output and crash log for a supervised process
TRACEBACK_SIGNAL = signal.SIGUSR1  # makes a process write its traceback to the crash log
_NUMBERS_BYTES = 64  # 8 for each number
_PAGE_BYTES = 16_384
# Indices of the numbers.
_LANE, _COUNT, _CALL, _FINISHED, _EXIT_CODE, _INFO_BYTES, _STOP_REQUESTS = range(7)


class Heartbeat:
    """A page of memory shared by a process and its supervisor."""

    def __init__(self, file: int | None = None) -> None:
        """Map a new page, or the page in a file that another process made."""
        self._page = mmap.mmap(-1 if file is None else file, _PAGE_BYTES)
        self.numbers = memoryview(self._page)[:_NUMBERS_BYTES].cast("q")

    def call(self) -> tuple[int, int, int] | None:
        """The running call of an environment: its number, its kind and its lane."""
        lane = self.numbers[_LANE]
        return None if lane == 0 else (self.numbers[_COUNT], self.numbers[_CALL], lane - 1)

    def set_exit_code(self, code: int) -> None:
        """Record that the process finished its work; this exit code counts even if the process crashes later."""
        self.numbers[_EXIT_CODE] = code
        self.numbers[_FINISHED] = 1

    def exit_code(self) -> int | None:
        """The exit code; None before the process finished its work."""
        return self.numbers[_EXIT_CODE] if self.numbers[_FINISHED] else None

    def set_stop_requests(self, num: int) -> None:
        """Record how many signals asked the supervisor to stop; written before the signal is passed on."""
        self.numbers[_STOP_REQUESTS] = num

    def stop_requests(self) -> int:
        """How many signals asked the supervisor to stop."""
        return int(self.numbers[_STOP_REQUESTS])

    def update_run_info(self, **run_info: Any) -> None:
        """Set some fields of the run's description."""
        data = json.dumps({**self.run_info(), **run_info}).encode()
        if len(data) <= _PAGE_BYTES - _NUMBERS_BYTES:
            self.numbers[_INFO_BYTES] = 0
            self._page[_NUMBERS_BYTES : _NUMBERS_BYTES + len(data)] = data
            self.numbers[_INFO_BYTES] = len(data)

    def run_info(self) -> Mapping[str, Any]:
        """The run's description so far: `env`, `step_seconds`, `folder`."""
        try:
            info = json.loads(self._page[_NUMBERS_BYTES : _NUMBERS_BYTES + self.numbers[_INFO_BYTES]])
        except ValueError:
            return {}
        return info if isinstance(info, dict) else {}


_own = Heartbeat()
_numbers = _own.numbers
_streams: tuple[tuple[Any, Any], tuple[Any, Any]] | None = None  # (stdout, stderr) of qfleet and of environments


def enter_env_call(call: int, lane: int = 0) -> None:
    """Mark the start of a call of an environment."""
    _numbers[_CALL] = call
    _numbers[_COUNT] += 1
    _numbers[_LANE] = lane + 1
    if _streams is not None:
        sys.stdout, sys.stderr = _streams[1]


def leave_env_call() -> None:
    """Mark the end of the call."""
    _numbers[_LANE] = 0
    if _streams is not None:
        sys.stdout, sys.stderr = _streams[0]


@contextmanager
def env_call(call: int, lane: int = 0) -> Iterator[None]:
    """Mark a call of an environment; `step` and `reset` use the two functions above, which are faster."""
    enter_env_call(call, lane)
    try:
        yield
    finally:
        leave_env_call()


def update_run_info(**run_info: Any) -> None:
    """Set fields of the run's description for the supervisor."""
    _own.update_run_info(**run_info)


def current_call() -> tuple[int, int, int] | None:
    """The running call of an environment in this process: its number, its kind and its lane."""
    return _own.call()


def is_attached() -> bool:
    """Is this process supervised?"""
    return _streams is not None


def num_stop_requests() -> int | None:
    """How many signals asked the supervisor of this process to stop; None without a supervisor."""
    return _own.stop_requests() if is_attached() else None


def exit_at_once(code: int) -> None:
    """Exit now, without cleanup."""
    _own.set_exit_code(code)
    os._exit(code)


def set_exit_code(code: int) -> None:
    """Record that this process finished its work with this exit code."""
    _own.set_exit_code(code)


def own_stderr_descriptor() -> int:
    """The descriptor of qfleet's own stderr; in a supervised process 2 is the output of environments."""
    stream = sys.__stderr__ if _streams is None else _streams[0][1]
    return 2 if stream is None else int(stream.fileno())


def unnamed_file(num_bytes: int = 0) -> int:
    """A file without a name, in memory if the system supports it: perhaps no folder is writable."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("qfleet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


def new_page_file() -> int:
    """A file for the page of a process that is not a fork of this one."""
    return unnamed_file(_PAGE_BYTES)


def open_standard_streams() -> None:
    """Open the null device for each standard stream that the process was started without (`2>&-`).

    Otherwise the next opened file gets the stream's number, and receives what is written to the stream.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def attach_from_environment() -> None:
    """Attach to the supervisor that started this process, if there is one."""
    if descriptors := os.environ.pop(DESCRIPTORS_VARIABLE, ""):
        page, output, crash_log = map(int, descriptors.split(","))
        attach(Heartbeat(page), output, crash_log)
        for fd in (page, output):
            os.close(fd)
        os.set_inheritable(crash_log, False)


def attach(heartbeat: Heartbeat, output: int, crash_log: int) -> None:
    """Mark calls in `heartbeat`, send the output of environments to `output` and tracebacks to `crash_log`."""
    global _own, _numbers, _streams
    _own = heartbeat
    _numbers = heartbeat.numbers
    faulthandler.enable(crash_log, all_threads=False)
    faulthandler.register(TRACEBACK_SIGNAL, crash_log, all_threads=False)
    _detach_stdin()
    own_stdout = _duplicated(sys.stdout)
    own_stderr = _duplicated(sys.stderr)
    for fd in (1, 2):
        os.dup2(output, fd)
    env_output = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    _streams = ((own_stdout, own_stderr), (env_output, env_output))
    sys.stdout, sys.stderr = _streams[0]


def _detach_stdin() -> None:
    """Replace a terminal as stdin by the null device: it would stop a background process that reads from it."""
    if os.isatty(0):
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)


def _duplicated(stream: TextIO) -> TextIO:
    """The same stream on a descriptor of its own."""
    with suppress(OSError, ValueError):
        stream.flush()
    line_buffering = bool(getattr(stream, "line_buffering", False))
    unbuffered = bool(getattr(stream, "write_through", False))  # python -u
    fd = os.dup(stream.fileno())
    os.set_inheritable(fd, False)
    raw = open(fd, "wb", buffering=0 if unbuffered else -1)  # noqa: SIM115  open for as long as the process lives
    encoding: dict[str, Any] = {"encoding": stream.encoding, "errors": stream.errors}
    return io.TextIOWrapper(raw, **encoding, line_buffering=line_buffering, write_through=unbuffered)
