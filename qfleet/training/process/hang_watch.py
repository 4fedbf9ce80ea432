"""Calls of environments that hang in a run without a supervisor: a thread of its own says so, and obeys SIGTERM.

Commands are supervised from outside (`qfleet/training/process/supervise.py`); a run that is started from Python is not.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qfleet import heartbeat
from qfleet.frames import own_frames
from qfleet.heartbeat import CALLS
from qfleet.training.process.signals import ENDINGS, StopRequest
from qfleet.training.process.supervise import GRACE_SECONDS, ExitVerdict, call_limit, report

LOOK_SECONDS = 0.25
LEAVING = ("SIGTERM", "SIGHUP")  # Ctrl-C may only mean a cell of a notebook


@contextmanager
def watching(asked: StopRequest, step_seconds: float, folder: Path, warn: Callable[[str], object]) -> Iterator[None]:
    """Look at the calls of environments for the time of a run, unless somebody else does."""
    if heartbeat.is_attached() or threading.current_thread() is not threading.main_thread():
        yield
        return
    over = threading.Event()
    main = threading.get_ident()
    hangs = HangWarnings(asked, step_seconds, folder, warn, main)
    thread = threading.Thread(target=hangs.look_until, args=(over,), name="qfleet-hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=2 * LOOK_SECONDS)


class HangWarnings:
    """Looks again and again whether the main thread is still in the same call."""

    def __init__(
        self, asked: StopRequest, step_seconds: float, folder: Path, warn: Callable[[str], object], main: int
    ) -> None:
        self.asked = asked
        self.step_seconds = step_seconds
        self.folder = folder
        self.warn = warn
        self.main = main
        self.call: tuple[int, int, int] | None = None
        self.since = self.asked_since = 0.0
        self.warned = False

    def look_until(self, over: threading.Event) -> None:
        """A thread's life."""
        while not over.wait(LOOK_SECONDS):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Say that a call hangs, and leave if that is asked for."""
        call = heartbeat.present_call()
        if call != self.call:
            self.call = call
            self.since = now
            self.warned = False
        self.asked_since = self.asked_since or now if self.asked.name in LEAVING else 0.0
        if call is None:
            return
        stuck = now - self.since
        if stuck <= call_limit(call[1], self.step_seconds):
            return
        if self.asked_since and min(stuck, now - self.asked_since) > GRACE_SECONDS:
            self.leave(f"stopped by {self.asked.name}; {self.named(call)} did not return within {stuck:.0f} s")
        if not self.warned:
            self.warned = True
            self.tell(f"{self.named(call)} has not returned for {stuck:.0f} s")

    def named(self, call: tuple[int, int, int]) -> str:
        """A call in words, with the line of the user's own code that it is in."""
        frame = sys._current_frames().get(self.main)
        text = "".join(traceback.format_stack(frame)) if frame is not None else ""
        at = "".join(f" (at {own})" for own in own_frames(text, 1))
        return f"environment {call[2]}: {CALLS[call[1]]}{at}"

    def tell(self, text: str) -> None:
        """Into the events, and to standard error: the main thread shows nothing now."""
        self.warn(text)
        with suppress(OSError):
            os.write(2, f"warning: {ascii(text)[1:-1]}\n".encode())

    def leave(self, what: str) -> None:
        """End this process; the last commit is whole."""
        state, code = ENDINGS[str(self.asked.name)]
        with suppress(Exception):
            report(ExitVerdict(code, state, what), str(self.folder))
        heartbeat.leave_at_once(code)
