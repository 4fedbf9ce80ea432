"""Signals: the first asks the run to save and leave, the second leaves at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from qfleet import heartbeat
from qfleet.training.process import supervise
from qfleet.watch.text import LEAVING

ENDINGS = supervise.ENDINGS  # what the run's state and exit code become after saving
SAVING = b"\nsaving... (once more to leave at once)\n"
# For a live screen, which ends with an empty line: a message that moves to no other line leaves nothing behind.
SAVING_IN_PLACE = f"\r{LEAVING}".encode()


class StopRequest:
    """Which signal asked the run to end, if any; `in_place` if a live screen is drawn where the answer is written."""

    def __init__(self, in_place: bool = False) -> None:
        self.name: str | None = None
        self.in_place = in_place

    def __bool__(self) -> bool:
        """Has anyone asked?"""
        return self.name is not None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Remember the first; a second request ends the process, the last commit stays whole."""
        name = signal.Signals(number).name
        if self.name is not None and not self._is_second_request(name):
            return
        if self.name is not None:
            heartbeat.leave_at_once(ENDINGS[name][1])
        self.name = name
        # os.write: a handler may run in the middle of another write to the same stream. A terminal that was closed
        # cannot be told, and that must not end the run half-saved.
        with suppress(OSError, ValueError):
            text = SAVING_IN_PLACE if self.in_place else SAVING
            os.write(heartbeat.stderr_descriptor(), text)

    def _is_second_request(self, name: str) -> bool:
        """Is a further signal another request to end, or the first request again?

        A signal to all processes (systemctl stop, scancel, kill of a group) reaches a supervised one twice: directly,
        and from its supervisor, which counts the requests. Two equal signals that it has not seen came to this alone.
        """
        requests = heartbeat.num_requests()
        return requests is None or requests > 1 or (requests == 0 and name == self.name)


@contextmanager
def listening(watcher: object = None, asked: StopRequest | None = None) -> Iterator[StopRequest]:
    """Listen for the time of a run; outside the main thread nothing is installed. `watcher` shows the run, if any.

    `asked` is given where signals reach another process than the one that runs.
    """
    if asked is None:
        asked = StopRequest(in_place=getattr(watcher, "draws_in_place", False))
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
