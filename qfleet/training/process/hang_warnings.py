"""Calls of environments that hang in a run without a supervisor: a thread warns of them, and obeys SIGTERM.

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
from qfleet.frames import user_frames
from qfleet.heartbeat import CALLS
from qfleet.system.silence import SilenceTimer
from qfleet.training.process.forward_signals import ENDINGS
from qfleet.training.process.hang_watch import GRACE_SECONDS, call_limit
from qfleet.training.process.signals import StopRequest
from qfleet.training.process.supervise import report
from qfleet.training.process.supervised_process import ExitVerdict

POLL_SECONDS = 0.25
ENDING_SIGNALS = ("SIGTERM", "SIGHUP")  # Ctrl-C may only mean a cell of a notebook


@contextmanager
def watching(
    stop_request: StopRequest, step_seconds: float, folder: Path, warn: Callable[[str], object]
) -> Iterator[None]:
    """Warn of calls that hang while a run lasts, unless a supervisor does."""
    if heartbeat.is_attached() or threading.current_thread() is not threading.main_thread():
        yield
        return
    over = threading.Event()
    main = threading.get_ident()
    hangs = HangWarnings(stop_request, step_seconds, folder, warn, main)
    thread = threading.Thread(target=hangs.poll_until, args=(over,), name="qfleet-hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=2 * POLL_SECONDS)


class HangWarnings:
    """Checks again and again whether the main thread is still in the same call."""

    def __init__(
        self, stop_request: StopRequest, step_seconds: float, folder: Path, warn: Callable[[str], object], main: int
    ) -> None:
        self.stop_request = stop_request
        self.step_seconds = step_seconds
        self.folder = folder
        self.warn = warn
        self.main = main
        self.call: tuple[int, int, int] | None = None
        self.stuck = SilenceTimer(0.0)  # since the present call began
        self.requested_at = 0.0
        self.warned = False

    def poll_until(self, over: threading.Event) -> None:
        """Poll until the run is over."""
        while not over.wait(POLL_SECONDS):
            self.poll(time.monotonic())

    def poll(self, now: float) -> None:
        """Warn of a call that hangs; end the process if a signal asked for that."""
        call = heartbeat.current_call()
        if call != self.call:
            self.call = call
            self.stuck.reset(now)
            self.warned = False
        self.requested_at = self.requested_at or now if self.stop_request.name in ENDING_SIGNALS else 0.0
        if call is None:
            return
        stuck = self.stuck.elapsed(now)
        if stuck <= call_limit(call[1], self.step_seconds):
            return
        if self.requested_at and min(stuck, now - self.requested_at) > GRACE_SECONDS:
            self.leave(
                f"stopped by {self.stop_request.name}; {self.call_name(call)} did not return within {stuck:.0f} s"
            )
        if not self.warned:
            self.warned = True
            self.show(f"{self.call_name(call)} has not returned for {stuck:.0f} s")

    def call_name(self, call: tuple[int, int, int]) -> str:
        """A call for a message, with the line of the user's own code that it is in."""
        frame = sys._current_frames().get(self.main)
        text = "".join(traceback.format_stack(frame)) if frame is not None else ""
        at = "".join(f" (at {own})" for own in user_frames(text, 1))
        return f"environment {call[2]}: {CALLS[call[1]]}{at}"

    def show(self, text: str) -> None:
        """Write to the events and to standard error: the main thread shows nothing now."""
        self.warn(text)
        with suppress(OSError):
            os.write(2, f"warning: {ascii(text)[1:-1]}\n".encode())

    def leave(self, what: str) -> None:
        """End this process; the last commit is whole."""
        state, code = ENDINGS[str(self.stop_request.name)]
        with suppress(Exception):
            report(ExitVerdict(code, state, what), str(self.folder))
        heartbeat.exit_at_once(code)
