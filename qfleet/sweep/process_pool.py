"""A pool of members: starts as many as fit, receives their messages, passes signals on, and leaves none behind."""

import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from qfleet.sweep.member_process import MemberMessage, MemberProcess, MemberSetup
from qfleet.system.worker_errors import FinalError
from qfleet.training.process.forward_signals import ENDINGS, forward_ctrl_z
from qfleet.training.process.hang_watch import ENV_FAILED
from qfleet.training.process.signals import StopRequest

POLL_SECONDS = 0.2
STOP_TIMEOUT_SECONDS = 600.0  # a member that stops may have a large replay to write
KILL_TIMEOUT_SECONDS = 10.0


class ProcessPool:
    """Runs members, `at_once` at a time, and calls back for each; `on_poll` is called a few times a second."""

    def __init__(
        self,
        jobs: Sequence[MemberSetup],
        at_once: int,
        threads: int,
        cores: int,
        stop_request: StopRequest,
        *,
        on_start: Callable[[str], None],
        on_message: Callable[[str, MemberMessage], None],
        on_end: Callable[[str, int], None],
        on_poll: Callable[[], None],
    ) -> None:
        self.waiting = deque(jobs)
        self.alive = dict[str, MemberProcess]()
        self.at_once = at_once
        self.threads = threads
        self.cores = cores
        self.stop_request = stop_request
        self.on_start = on_start
        self.on_message = on_message
        self.on_end = on_end
        self.on_poll = on_poll
        self.stop_by: float | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Run until every job has ended, or has stopped on request; Ctrl-Z stops them all."""
        try:
            with forward_ctrl_z(lambda: [child.process.pid for child in self.alive.values()]):
                while self.waiting or self.alive:
                    self._turn()
        finally:
            self._end_children()

    def _turn(self) -> None:
        self._start()
        self._forward_stop()
        self._selector.select(POLL_SECONDS)
        for child in list(self.alive.values()):
            self._poll(child)
        self.on_poll()

    def _start(self) -> None:
        while self.waiting and len(self.alive) < self.at_once and not self.stop_request:
            job = self.waiting.popleft()
            child = self.alive[job.name] = MemberProcess(job, self.threads, self.cores)
            self._selector.register(child.connection, selectors.EVENT_READ)
            self.on_start(job.name)

    def _forward_stop(self) -> None:
        """Pass the stop signal on to every child, once; a child that does not end in time is killed."""
        if not self.stop_request:
            return
        if self.stop_by is None:
            self.waiting.clear()
            self.stop_by = time.monotonic() + STOP_TIMEOUT_SECONDS
            for child in self.alive.values():
                child.send(getattr(signal, str(self.stop_request.name)))
        elif time.monotonic() > self.stop_by:
            for child in self.alive.values():
                child.kill()

    def _poll(self, child: MemberProcess) -> None:
        code = child.process.exit_code()  # first, so that its last messages are received after it has ended
        for message in child.receive():
            self.on_message(child.name, message)
        if not child.open or code is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(child.connection)
        if code is not None:
            del self.alive[child.name]
            child.close()
            self.on_end(child.name, code)

    def _end_children(self) -> None:
        """After an error of this process: ask the children to save, then make sure that they have ended."""
        for child in self.alive.values():
            child.send(signal.SIGTERM)
        limit = time.monotonic() + KILL_TIMEOUT_SECONDS
        while any(child.process.is_alive() for child in self.alive.values()) and time.monotonic() < limit:
            time.sleep(POLL_SECONDS)
        for child in self.alive.values():
            child.kill()
            child.close()
        self._selector.close()


def outcome(code: int, status: Mapping[str, Any], error: FinalError | None) -> tuple[str, int, str]:
    """State, exit code and reason of a process that has ended, from its code, its run's status and its error."""
    code = -signal.SIGKILL if code == 128 + signal.SIGKILL else code  # as its supervisor reports it
    if code < 0:
        name = signal.Signals(-code).name
        state, code = ENDINGS.get(name, ("killed", ENDINGS["SIGHUP"][1]))
        return state, code, f"killed by {name}"
    if code == 0 and status.get("state") != "done":
        return "failed", ENV_FAILED, "its process left with exit code 0, but its run is not done"
    if status.get("exit_code") == code:
        return str(status.get("state")), code, str(status.get("reason") or "")
    for name, (state, known) in ENDINGS.items():
        if code == known:
            return state, code, f"left at once, by {name}"
    return "failed", code, f"it left with exit code {code}" if error is None else error.what
