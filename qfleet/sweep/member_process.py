"""The process of one member of a sweep: what it is given, what it sends, and where it begins.

A member is a run of its own that others must not disturb: another interpreter, which has the number of threads before
it imports numpy, and which saves and ends when it is asked to stop or when its parent ends. It trains in a supervised
fork. So this module and what it imports must be light; `member_main` is imported in the fork.
"""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from qfleet.files import open_log
from qfleet.system.cores import SHARE_VARIABLE, thread_variables
from qfleet.system.descendants import descendants, send_all
from qfleet.system.worker_errors import FinalError
from qfleet.system.worker_process import WorkerOptions, WorkerProcess
from qfleet.training.process.supervise import run_supervised

READ_BYTES = 1 << 16


class MemberSetup(msgspec.Struct, frozen=True):
    """The run of one member."""

    group: Path  # the folder of the sweep
    name: str
    log: Path
    seed: int
    steps: int | None = None  # another end than the one in its own folder
    weights_from: Path | None = None
    trust_env: bool = False
    trust_run: bool = False
    strict: bool = False
    parts: bytes = b""  # packed by `pack_member_parts`


class MemberRow(msgspec.Struct, tag=True):
    """A row of the member's metrics.jsonl."""

    row: dict[str, Any]


class MemberWarning(msgspec.Struct, tag=True):
    """A warning that the sweep shows."""

    text: str


MemberMessage: TypeAlias = MemberRow | MemberWarning | FinalError


def send(connection: socket.socket, message: MemberMessage) -> None:
    """Send a message to the sweep; if its process has ended the message is dropped."""
    with suppress(OSError):
        connection.sendall(msgspec.json.encode(message) + b"\n")


def run_member(given: tuple[MemberSetup, socket.socket]) -> None:
    """The main function of a member's process: train in a supervised fork.

    The parent passes a signal on once, and a signal to all processes comes directly as well: that is one request. A
    parent that is asked again leaves at once, and the kernel then sends another signal.
    """

    def work() -> int:
        from qfleet.sweep.member_main import train_member  # not before the fork

        return train_member(*given)

    parent = os.getppid()
    sys.exit(run_supervised(work, lambda: os.getppid() != parent))


class MemberProcess:
    """A member's process as the sweep sees it; what it prints goes to its log."""

    def __init__(self, setup: MemberSetup, threads: int, cores: int) -> None:
        self.name = setup.name
        os.close(open_log(setup.log))  # a log that cannot be written is an error of the sweep
        self.connection, child_connection = socket.socketpair()
        self.connection.setblocking(False)
        self.open = True
        self._partial = b""  # of a message whose rest has not arrived
        options = WorkerOptions(
            str(setup.log),
            own_group=True,  # Ctrl-C reaches the parent only, which passes it on once; twice would end it at once
            keeps_signals=True,
            death_signal=signal.SIGTERM,
            variables={**thread_variables(threads), SHARE_VARIABLE: str(cores)},
        )
        given = (setup, child_connection)
        self.process = WorkerProcess(get_context("spawn"), setup.name, run_member, given, options)
        with child_connection:
            self.process.start()

    def receive(self) -> Iterator[MemberMessage]:
        """The messages that have arrived since the last call."""
        with suppress(BlockingIOError):
            while data := self.connection.recv(READ_BYTES):
                *lines, self._partial = (self._partial + data).split(b"\n")
                yield from (msgspec.json.decode(line, type=MemberMessage) for line in lines)
            self.open = False

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.process.is_alive():
            send_all([self.process.pid], number)

    def kill(self) -> None:
        """End it and what it has started, at once: its work and its environments have process groups of their own."""
        if self.process.is_alive():
            send_all(descendants(self.process.pid), signal.SIGKILL)
        self.process.stop()

    def close(self) -> None:
        """Free what belongs to a process that has ended."""
        self.connection.close()
        self.process.close()
