"""Signals: the first asks the run to save and leave, the second leaves at once."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType

from qfleet import heartbeat

# What the run's state and exit code become after saving.
ENDINGS = {
    "SIGINT": ("interrupted", 130),
    "SIGTERM": ("preempted", 143),
    "SIGHUP": ("stopped", 75),
}


class Asked:
    """Which signal asked the run to end, if any."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __bool__(self) -> bool:
        """Has anyone asked?"""
        return self.name is not None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Remember the first; a second one ends the process, the last commit stays whole."""
        name = signal.Signals(number).name
        if self.name is not None:
            heartbeat.leave_at_once(ENDINGS[name][1])
        self.name = name
        # os.write: a handler may run in the middle of another write to the same stream. A terminal that was closed
        # cannot be told, and that must not end the run half-saved.
        with suppress(OSError, ValueError):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nsaving... (once more to leave at once)\n")


# Where signals reach another process than the one that runs: who is asked by it.
given: ContextVar[Asked | None] = ContextVar("given", default=None)


@contextmanager
def listening() -> Iterator[Asked]:
    """Listen for the time of a run; outside the main thread nothing is installed."""
    if (asked := given.get()) is None:
        asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    # Who starts us with a signal ignored (nohup) means it.
    wanted = [number for name in ENDINGS if signal.getsignal(number := getattr(signal, name)) is not signal.SIG_IGN]
    before = {number: signal.signal(number, asked.receive) for number in wanted}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
