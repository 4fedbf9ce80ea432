"""Signals to a run: the first one requests that it saves and ends, the second one ends it at once."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from qfleet import heartbeat
from qfleet.training.process.forward_signals import ENDINGS
from qfleet.watch.text import LEAVING

SAVING = b"\nsaving... (once more to leave at once)\n"
# For a live screen, which ends with an empty line: a message without a line break leaves nothing behind.
SAVING_IN_PLACE = f"\r{LEAVING}".encode()


OUTSIDE_MAIN_THREAD = (
    "this is not the main thread, so signals do not reach the run: Ctrl-C does not stop it, a callback that returns "
    "True does"
)


class LeftAtOnce(KeyboardInterrupt):
    """The second request in an interactive session: the run is left as its last checkpoint has it, Python goes on."""


def is_interactive() -> bool:
    """Is this a notebook, IPython or Python's own prompt? Its process holds more than the run."""
    return hasattr(sys, "ps1")


def hears_signals() -> bool:
    """Can this thread handle signals?"""
    return threading.current_thread() is threading.main_thread()


class StopRequest:
    """The signal that asked the run to stop, if any; `in_place` if a live screen is drawn on standard error."""

    def __init__(self, in_place: bool = False) -> None:
        self.name: str | None = None
        self.in_place = in_place

    def __bool__(self) -> bool:
        """Was the run asked to stop?"""
        return self.name is not None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: keep the first request; a second one ends the process, or in an interactive one the call.

        The last commit stays whole.
        """
        name = signal.Signals(number).name
        if self.name is not None and not self._is_second_request(name):
            return
        if self.name is not None and name == "SIGINT" and is_interactive():
            raise LeftAtOnce
        if self.name is not None:
            heartbeat.exit_at_once(ENDINGS[name][1])
        self.name = name
        # os.write: a handler may run in the middle of another write to the same stream. Writing to a closed terminal
        # fails, and that must not end the run half-saved.
        with suppress(OSError, ValueError):
            text = SAVING_IN_PLACE if self.in_place else SAVING
            os.write(heartbeat.own_stderr_descriptor(), text)

    def _is_second_request(self, name: str) -> bool:
        """Is a further signal another request to end, or the first request again?

        A signal to all processes (systemctl stop, scancel, kill of a group) reaches a supervised one twice: directly,
        and from its supervisor, which counts the requests. If the supervisor has counted none, both signals came
        directly to this process, and the second one is another request.
        """
        requests = heartbeat.num_stop_requests()
        return requests is None or requests > 1 or (requests == 0 and name == self.name)


@contextmanager
def listening(watcher: object = None, stop_request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Handle signals while a run lasts, in the main thread only. `watcher` shows the run, if any.

    `stop_request` is passed where signals reach another process than the one that trains.
    """
    if stop_request is None:
        stop_request = StopRequest(in_place=getattr(watcher, "draws_in_place", False))
    if not hears_signals():
        yield stop_request
        return
    # A process that was started with a signal ignored (nohup) keeps ignoring it.
    handled = [number for name in ENDINGS if signal.getsignal(number := getattr(signal, name)) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop_request.receive) for number in handled}
    try:
        yield stop_request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
