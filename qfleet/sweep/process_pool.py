"""A pool of processes: starts as many as fit, reads their rows, passes signals on, and leaves none behind."""

import json
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfleet.files import open_log
from qfleet.system.child_process import python_command
from qfleet.system.descendants import descendants, send_all
from qfleet.training.process.forward_signals import ENDINGS, forward_ctrl_z
from qfleet.training.process.hang_watch import ENV_FAILED
from qfleet.training.process.signals import StopRequest

POLL_SECONDS = 0.2
STOP_TIMEOUT_SECONDS = 600.0  # a member that stops may have a large replay to write
KILL_TIMEOUT_SECONDS = 10.0
MAX_LINE_BYTES = 16 << 20
# A child finds modules exactly where its parent does: in a notebook, a source tree or an installed package.
BOOT = "from qfleet.training.process.supervise import boot; sys.exit(boot('qfleet.sweep.member_main', sys.argv[1:]))"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """The task of one process."""

    name: str
    arguments: tuple[str, ...]
    log: Path


class PoolProcess:
    """A process that prints rows on its standard output; everything else it prints goes to its log."""

    def __init__(self, job: Job, threads: int) -> None:
        self.name = job.name
        self._log = os.fdopen(open_log(job.log), "ab")
        self._partial_line = b""
        command = python_command(BOOT, *job.arguments)
        # In its own process group Ctrl-C reaches the parent only, which passes it on once; twice would end it at once.
        self._process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            process_group=0,
            env={**dict.fromkeys(THREAD_VARIABLES, str(threads)), **os.environ},
        )
        self.pid = self._process.pid
        self.pipe = self._process.stdout.fileno() if self._process.stdout else -1
        os.set_blocking(self.pipe, False)
        self.open = True

    def rows(self) -> Iterator[Row]:
        """The rows printed since the last call."""
        while (data := self._read()) is not None:
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            if len(self._partial_line) > MAX_LINE_BYTES:
                lines = [*lines, self._partial_line]
                self._partial_line = b""
            for line in lines:
                if (row := _row(line)) is None:
                    self._log.write(line + b"\n")
                else:
                    yield row

    def _read(self) -> bytes | None:
        if not self.open:
            return None
        try:
            data = os.read(self.pipe, 1 << 16)
        except BlockingIOError:
            return None
        self.open = bool(data)
        return data or None

    def exit_code(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it and what it has started, at once: its work and its environments have process groups of their own."""
        if self.exit_code() is None:
            send_all(descendants(self.pid), signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=KILL_TIMEOUT_SECONDS)

    def close(self) -> None:
        """Close its streams."""
        self._log.close()
        if self._process.stdout:
            self._process.stdout.close()


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and "kind" in row else None


class ProcessPool:
    """Runs jobs, `at_once` at a time, and calls back for each; `on_poll` is called a few times a second."""

    def __init__(
        self,
        jobs: Sequence[Job],
        at_once: int,
        threads: int,
        stop_request: StopRequest,
        *,
        on_start: Callable[[str], None],
        on_row: Callable[[str, Row], None],
        on_end: Callable[[str, int], None],
        on_poll: Callable[[], None],
    ) -> None:
        self.waiting = deque(jobs)
        self.alive = dict[str, PoolProcess]()
        self.at_once = at_once
        self.threads = threads
        self.stop_request = stop_request
        self.on_start = on_start
        self.on_row = on_row
        self.on_end = on_end
        self.on_poll = on_poll
        self.stop_by: float | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Run until every job has ended, or has stopped on request; Ctrl-Z stops them all."""
        try:
            with forward_ctrl_z(lambda: [child.pid for child in self.alive.values()]):
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
            child = self.alive[job.name] = PoolProcess(job, self.threads)
            self._selector.register(child.pipe, selectors.EVENT_READ)
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

    def _poll(self, child: PoolProcess) -> None:
        code = child.exit_code()  # first, so that its last rows are read after it has ended
        for row in child.rows():
            self.on_row(child.name, row)
        if not child.open or code is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(child.pipe)
        if code is not None:
            del self.alive[child.name]
            child.close()
            self.on_end(child.name, code)

    def _end_children(self) -> None:
        """After an error of this process: ask the children to save, then make sure that they have ended."""
        for child in self.alive.values():
            child.send(signal.SIGTERM)
        limit = time.monotonic() + KILL_TIMEOUT_SECONDS
        while any(child.exit_code() is None for child in self.alive.values()) and time.monotonic() < limit:
            time.sleep(POLL_SECONDS)
        for child in self.alive.values():
            child.kill()
            child.close()
        self._selector.close()


def outcome(code: int, status: Mapping[str, Any], error: Mapping[str, Any]) -> tuple[str, int, str]:
    """State, exit code and reason of a process that has ended, from its code, its run's status and its error row."""
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
    return "failed", code, str(error.get("what") or f"it left with exit code {code}")
