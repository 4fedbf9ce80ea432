"""Signals that reach a supervisor: stop requests and Ctrl-Z are passed on to the processes it supervises."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from qfleet.heartbeat import Heartbeat
from qfleet.system.descendants import descendants, send_all

# What a run's state and exit code become after one of these signals.
ENDINGS = {
    "SIGINT": ("interrupted", 130),
    "SIGTERM": ("preempted", 143),
    "SIGHUP": ("stopped", 75),
}
STOP_SIGNALS = tuple(signal.Signals[name] for name in ENDINGS)
ONE_REQUEST_SECONDS = 0.1  # signals this close together are one request: a closed terminal sends two
CONTINUE_SECONDS = (
    0.2  # after Ctrl-Z workers continue first, so that a process which waits for them finds their answers
)


class Killable(Protocol):
    """A process that takes signals."""

    def send_signal(self, number: int, /) -> None:
        """Send one."""


@contextmanager
def forward_stop_signals(
    child: Killable, heartbeat: Heartbeat, is_new_request: Callable[[], bool] = lambda: True
) -> Iterator[list[int]]:
    """Pass stop signals on to the child, which saves and ends; yields the list of those that were passed on.

    `is_new_request` is called for each signal after the first: is it another request, to end at once?
    """
    received: list[int] = []
    received_at = [0.0]

    def forward(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if received and (now - received_at[0] < ONE_REQUEST_SECONDS or not is_new_request()):
            return
        received_at[0] = now
        received.append(number)
        heartbeat.set_stop_requests(len(received))
        child.send_signal(number)

    # A signal that is ignored, as SIGHUP by nohup, is not meant for the run; the child ignores it too.
    forwarded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, forward) for number in forwarded}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def forward_ctrl_z(children: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Ctrl-Z stops this process, these children and all processes below them; they continue together."""

    def stop(number: int, frame: FrameType | None) -> None:
        stopped = stop_all(children())
        os.kill(os.getpid(), signal.SIGSTOP)
        for pid in reversed(stopped):  # the shell has made this process continue
            send_all([pid], signal.SIGCONT)
            time.sleep(CONTINUE_SECONDS / len(stopped))

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def stop_all(pids: Iterable[int]) -> list[int]:
    """Stop these processes and all below them; returns them, parents first."""
    stopped: list[int] = []
    tops = list(pids)
    while new := [pid for top in tops for pid in (top, *descendants(top)) if pid not in stopped]:
        send_all(new, signal.SIGSTOP)  # one of them may have started another meanwhile
        stopped += new
    return stopped
