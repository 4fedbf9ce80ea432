"""What a process shows to the one that supervises it: which call of an environment it is in, and which run it has.

Calls of environments are marked by `enter` and `leave` wherever they run; without a supervisor nobody looks at that.
What an environment prints goes to the supervisor, which bounds it, while our own words go to the terminal.
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
GIVEN = "QFLEET_HEARTBEAT"  # descriptors for a process that is to be supervised: page, output, crash log
TELL_SIGNAL = signal.SIGUSR1  # makes a process say where it is
_NUMBERS = 64  # bytes, 8 for each number
_PAGE = 16_384
# Places among the numbers.
_LANE, _COUNT, _CALL, _ENDED, _CODE, _LENGTH, _REQUESTS = range(7)


class Heartbeat:
    """A page of memory that a process and its supervisor both see."""

    def __init__(self, file: int | None = None) -> None:
        """A new page, or the one that another process has made as a file."""
        self._page = mmap.mmap(-1 if file is None else file, _PAGE)
        self.numbers = memoryview(self._page)[:_NUMBERS].cast("q")

    def call(self) -> tuple[int, int, int] | None:
        """The call of an environment that is under way: its number, its kind and its lane."""
        lane = self.numbers[_LANE]
        return None if lane == 0 else (self.numbers[_COUNT], self.numbers[_CALL], lane - 1)

    def end(self, code: int) -> None:
        """The process has done its work: this is its exit code, whatever happens to it now."""
        self.numbers[_CODE] = code
        self.numbers[_ENDED] = 1

    def ended(self) -> int | None:
        """The exit code, if the work was done to its end."""
        return self.numbers[_CODE] if self.numbers[_ENDED] else None

    def set_requests(self, num: int) -> None:
        """How often a signal asked the supervisor to end the work; written before the signal is passed on."""
        self.numbers[_REQUESTS] = num

    def requests(self) -> int:
        """How many times the supervisor was asked to end the work."""
        return int(self.numbers[_REQUESTS])

    def tell(self, **facts: Any) -> None:
        """Add to what is known of the run."""
        data = json.dumps({**self.facts(), **facts}).encode()
        if len(data) <= _PAGE - _NUMBERS:
            self.numbers[_LENGTH] = 0
            self._page[_NUMBERS : _NUMBERS + len(data)] = data
            self.numbers[_LENGTH] = len(data)

    def facts(self) -> Mapping[str, Any]:
        """What was told: `env`, `step_seconds`, `folder`."""
        try:
            found = json.loads(self._page[_NUMBERS : _NUMBERS + self.numbers[_LENGTH]])
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


_own = Heartbeat()
_numbers = _own.numbers
_streams: tuple[tuple[Any, Any], tuple[Any, Any]] | None = None  # ours and the environments', if they are apart


def enter(call: int, lane: int = 0) -> None:
    """An environment is called from here on."""
    _numbers[_CALL] = call
    _numbers[_COUNT] += 1
    _numbers[_LANE] = lane + 1
    if _streams is not None:
        sys.stdout, sys.stderr = _streams[1]


def leave() -> None:
    """The call is over."""
    _numbers[_LANE] = 0
    if _streams is not None:
        sys.stdout, sys.stderr = _streams[0]


@contextmanager
def inside(call: int, lane: int = 0) -> Iterator[None]:
    """A call of an environment that is made rarely."""
    enter(call, lane)
    try:
        yield
    finally:
        leave()


def tell(**facts: Any) -> None:
    """Let the supervisor know more of the run."""
    _own.tell(**facts)


def present_call() -> tuple[int, int, int] | None:
    """The call of an environment that is under way in this process: its number, its kind and its lane."""
    return _own.call()


def is_attached() -> bool:
    """Is this process supervised?"""
    return _streams is not None


def num_requests() -> int | None:
    """How many times the supervisor of this process was asked to end the work; None without a supervisor."""
    return _own.requests() if is_attached() else None


def leave_at_once(code: int) -> None:
    """End this process now, as it was asked to."""
    _own.end(code)
    os._exit(code)


def end(code: int) -> None:
    """This process has done its work, with this exit code."""
    _own.end(code)


def stderr_descriptor() -> int:
    """Where our own words go; in a supervised process that is not 2, which bounds what environments print."""
    stream = sys.__stderr__ if _streams is None else _streams[0][1]
    return 2 if stream is None else int(stream.fileno())


def new_file(num_bytes: int = 0) -> int:
    """A file without a name, in memory where the system can do so: no folder may be writable."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("qfleet")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


def new_page() -> int:
    """A file for a page that is given to a process which is no fork of this one."""
    return new_file(_PAGE)


def open_standard_streams() -> None:
    """Give a process that was started without a standard stream (`2>&-`) a silent one.

    Otherwise the next file that is opened gets its number, and whatever is written to the stream.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def attach_given() -> None:
    """Be supervised by whoever started this process, if that is what it wants."""
    if given := os.environ.pop(GIVEN, ""):
        page, output, crash_log = map(int, given.split(","))
        attach(Heartbeat(page), output, crash_log)
        for fd in (page, output):
            os.close(fd)
        os.set_inheritable(crash_log, False)


def attach(heartbeat: Heartbeat, output: int, crash_log: int) -> None:
    """Be supervised: show calls there, send what environments print to `output`, and tracebacks to the `crash_log`."""
    global _own, _numbers, _streams
    _own = heartbeat
    _numbers = heartbeat.numbers
    faulthandler.enable(crash_log, all_threads=False)
    faulthandler.register(TELL_SIGNAL, crash_log, all_threads=False)
    _close_keyboard()
    ours = tuple(_moved(stream) for stream in (sys.stdout, sys.stderr))
    for fd in (1, 2):
        os.dup2(output, fd)
    theirs = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    _streams = ((ours[0], ours[1]), (theirs, theirs))
    sys.stdout, sys.stderr = _streams[0]


def _close_keyboard() -> None:
    """A terminal stops a process in the background that reads from it: reading finds the end of the file instead."""
    if os.isatty(0):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


def _moved(stream: TextIO) -> TextIO:
    """The same stream on a descriptor of its own."""
    with suppress(OSError, ValueError):
        stream.flush()
    lines = bool(getattr(stream, "line_buffering", False))
    at_once = bool(getattr(stream, "write_through", False))  # python -u
    fd = os.dup(stream.fileno())
    os.set_inheritable(fd, False)
    raw = open(fd, "wb", buffering=0 if at_once else -1)  # noqa: SIM115  open for as long as the process lives
    how: dict[str, Any] = {"encoding": stream.encoding, "errors": stream.errors}
    return io.TextIOWrapper(raw, **how, line_buffering=lines, write_through=at_once)
