"""Workers in processes of this machine, connected to their parent by rings in shared memory."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from typing import Any, TypeAlias

from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.distributed.worker.messages import PeerLost, Ready
from qfleet.distributed.worker.transport import SLEEP_SECONDS, Piece, RingTransport
from qfleet.system.ring import Ring
from qfleet.system.worker_errors import WorkerDied, WorkerFailed, WorkerHung, WorkerLost
from qfleet.system.worker_process import WorkerOptions, WorkerProcess

MIN_SLOT_BYTES = 1 << 16  # large messages are sent in pieces of this size at least
EXIT_SECONDS = 0.3  # its pipes close a moment before a process ends

WorkerMain: TypeAlias = Callable[[Any, RingTransport], None]


@dataclass(frozen=True)
class RingSizes:
    """The messages of a role (classes or unions), and the slots of the rings that carry them."""

    requests: Any
    replies: Any
    request_bytes: int
    reply_bytes: int
    request_slots: int = 2
    reply_slots: int = 2
    announced: bool = True  # by a byte in a pipe; if not, both ends poll their rings


@dataclass(eq=False)
class LocalWorker:
    """The process of a worker on this machine."""

    process: WorkerProcess

    def is_alive(self) -> bool:
        """Is it running?"""
        return self.process.is_alive()

    def is_pending(self) -> bool:
        """Never: it runs from the start."""
        return False

    def why_lost(self) -> WorkerLost:
        """What the process reported, or how it ended; WorkerHung if it still runs."""
        self.process.join(EXIT_SECONDS)
        if self.process.is_alive():
            return WorkerHung("its process runs, but does not answer")
        report = self.process.reported_error()
        return WorkerDied(self.process.how_ended()) if report is None else WorkerFailed(report)

    def request_stop(self) -> None:
        """Send SIGTERM."""
        self.process.request_stop()

    def stop(self) -> None:
        """Kill the process; what it reported stays known."""
        self.process.stop()
        self.process.close()


def launch_local(
    context: ForkServerContext,
    name: str,
    main: WorkerMain,
    setup: Any,
    sizes: RingSizes,
    *,
    number: int = 0,
    options: WorkerOptions | None = None,
    start_seconds: float,
    room_seconds: float = 0.0,
) -> WorkerHandle:
    """Start a process that runs `main(setup, transport)`."""
    ours, theirs = context.Pipe() if sizes.announced else (None, None)
    requests = Ring(sizes.requests | Piece, sizes.request_slots, max(sizes.request_bytes, MIN_SLOT_BYTES))
    replies = Ring(sizes.replies | Ready | PeerLost | Piece, sizes.reply_slots, max(sizes.reply_bytes, MIN_SLOT_BYTES))
    arguments = (main, setup, RingTransport(replies, requests, theirs))
    process = WorkerProcess(context, name, call_main, arguments, options or WorkerOptions())
    process.start()
    if theirs is not None:
        theirs.close()
    transport = RingTransport(requests, replies, ours)
    return WorkerHandle(number, transport, LocalWorker(process), start_seconds=start_seconds, room_seconds=room_seconds)


def call_main(arguments: tuple[WorkerMain, Any, RingTransport]) -> None:
    """Run a worker's function in its process."""
    main, setup, transport = arguments
    parent = os.getppid()

    def wait_for_parent(waited_seconds: float) -> None:
        # However long: the parent may be stopped, or busy, in the middle of a message.
        if os.getppid() != parent:
            raise BrokenPipeError("the parent process has ended")
        time.sleep(SLEEP_SECONDS)

    transport.on_full = wait_for_parent
    transport.on_missing = wait_for_parent
    main(setup, transport)
