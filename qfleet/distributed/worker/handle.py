"""A worker as its parent sees it: every request gets exactly one reply, and every wait has a timeout."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from qfleet.data.wire_format import Arrays, Message, Parts
from qfleet.distributed.worker.messages import Failed, PeerLost, Ready
from qfleet.distributed.worker.transport import PIECE_SECONDS, SLEEP_SECONDS, RingTransport, Transport, WorkerControl
from qfleet.sync.comm import CommLost
from qfleet.system.silence import SilenceTimer
from qfleet.system.worker_errors import WorkerDied, WorkerFailed, WorkerHung, WorkerLost

POLL_SECONDS = 0.2
READY_POLL_SECONDS = 0.05


@dataclass(eq=False)
class WorkerHandle:
    """One incarnation of a worker. Its loss is raised as a WorkerLost, with the cause."""

    number: int
    transport: Transport
    control: WorkerControl
    _: KW_ONLY
    start_seconds: float
    room_seconds: float = 0.0  # how long a message may wait for room, once the worker is ready
    ready: bool = False
    broken: str = ""  # why nothing can be sent to it or received from it any more
    num_outstanding: int = 0  # requests without a reply

    def __post_init__(self) -> None:
        self.starting = SilenceTimer(time.monotonic())
        if isinstance(self.transport, RingTransport):
            self.transport.on_full = self.on_full
            self.transport.on_missing = self.on_missing

    def check(self) -> None:
        """Note whether it is ready; raise if it died, or takes too long to start."""
        if not self.ready:
            self.receive(0.0)
        if self.broken or not self.control.is_alive():
            raise self.why_lost(self.broken)
        if not self.ready and self.starting.elapsed(time.monotonic()) > self.start_seconds:
            raise WorkerHung(f"it did not start: it did not answer for {self.start_seconds:g} s")

    def why_lost(self, observed: str = "", if_alive: type[WorkerLost] = WorkerDied) -> WorkerLost:
        """Why it is lost: what its process reported or how it ended, and what was observed here."""
        found = self.control.why_lost()  # sockets and pipes of a process close a moment before it ends
        if isinstance(found, WorkerHung):
            return if_alive(observed) if observed else found
        if observed and type(found) is WorkerDied and str(found) not in observed:
            return WorkerDied(f"{observed}; {found}")
        return found

    # Messages

    def send(self, message: Message, arrays: Arrays | None = None) -> None:
        """Send a message that has no reply."""
        try:
            self.transport.send(message, arrays)
        except OSError as error:
            raise self.connection_lost(error) from error

    def ask(self, message: Message, arrays: Arrays | None = None) -> None:
        """Send a request; its reply is received later."""
        self.send(message, arrays)
        self.num_outstanding += 1

    def request(self, message: Message, kind: Any, timeout_seconds: float, arrays: Arrays | None = None) -> Parts:
        """Send a request and wait for its reply, which must be of this kind."""
        self.ask(message, arrays)
        return self.reply(kind, timeout_seconds)

    def poll_reply(self, timeout_seconds: float) -> Parts | None:
        """The next reply of any kind; None if none came in time and the worker lives."""
        parts = self.receive(timeout_seconds)
        if parts is not None:
            self.num_outstanding -= 1
        elif not self.control.is_alive():
            raise self.why_lost()
        return parts

    def reply(self, kind: Any, timeout_seconds: float) -> Parts:
        """The next reply, which must be of this kind; CommLost if another worker is lost."""
        parts = self.next_reply(timeout_seconds)
        if isinstance(parts[0], PeerLost):
            raise CommLost(parts[0].cause)
        if not isinstance(parts[0], kind):
            raise WorkerDied(f"its reply is a {type(parts[0]).__name__}")
        return parts

    def next_reply(self, timeout_seconds: float) -> Parts:
        """The next reply of any kind; a worker that has not started yet gets its time to start first."""
        await_ready([self])
        waiting = SilenceTimer(time.monotonic())
        while (parts := self.receive(min(POLL_SECONDS, timeout_seconds))) is None:
            if not self.control.is_alive():
                raise self.why_lost()
            if waiting.elapsed(time.monotonic()) > timeout_seconds:
                answered = f": it did not answer for {timeout_seconds:.3g} s" if timeout_seconds else ""
                raise WorkerHung(f"it does not reply{answered}")
        self.num_outstanding -= 1
        return parts

    def receive(self, timeout_seconds: float) -> Parts | None:
        """The next message; None if none came in time. That it is ready is noted here."""
        try:
            parts = self.transport.receive(timeout_seconds)
        except (OSError, ValueError) as error:
            raise self.connection_lost(error) from error
        if parts is not None and isinstance(parts[0], Failed):
            self.broken = parts[0].report.what
            raise WorkerFailed(parts[0].report)
        if parts is not None and isinstance(parts[0], Ready):
            self.ready = True
            return None
        return parts

    def connection_lost(self, error: Exception) -> WorkerLost:
        """The loss of this worker, because its connection is broken."""
        self.broken = str(error)
        return self.why_lost(self.broken, WorkerHung if isinstance(error, TimeoutError) else WorkerDied)

    def send_descriptors(self, *descriptors: int) -> None:
        """Send file descriptors to a process of this machine."""
        if not isinstance(self.transport, RingTransport):
            raise TypeError("descriptors can only be sent to a process of this machine")
        try:
            self.transport.send_descriptors(*descriptors)
        except OSError as error:
            raise self.connection_lost(error) from error

    def drain(self, timeout_seconds: float) -> Iterator[Parts]:
        """Drain outstanding replies to resynchronise the connection."""
        waiting = SilenceTimer(time.monotonic())
        while self.num_outstanding:
            yield self.next_reply(max(0.0, timeout_seconds - waiting.elapsed(time.monotonic())))

    def on_full(self, waited_seconds: float) -> None:
        """Wait a moment for room in the ring; raise if the worker died, or has not read for too long."""
        limit = self.room_seconds if self.ready else max(self.room_seconds, self.start_seconds)
        self.wait_a_moment(waited_seconds, limit, "earlier messages are still unread")

    def on_missing(self, waited_seconds: float) -> None:
        """Wait a moment for the rest of a message; raise if the worker died, or has not written for too long."""
        limit = max(self.room_seconds, PIECE_SECONDS)
        self.wait_a_moment(waited_seconds, limit, "the rest of a message has not come")

    def wait_a_moment(self, waited_seconds: float, limit_seconds: float, what: str) -> None:
        """Wait a moment; raise if the worker has ended, or the limit is reached."""
        if not self.control.is_alive():
            raise BrokenPipeError("its process has ended")
        if waited_seconds >= limit_seconds:
            raise TimeoutError(f"{what}: it did not answer for {limit_seconds:g} s" if limit_seconds else what)
        time.sleep(SLEEP_SECONDS)

    def stop(self) -> None:
        """End the worker and free everything; a rank of MPI can only be asked to end."""
        self.control.stop()
        self.transport.close()


def await_ready(handles: Sequence[WorkerHandle]) -> None:
    """Wait until all workers have started; raises if one is lost, or takes too long."""
    while waiting := [handle for handle in handles if not handle.ready]:
        waiting[0].transport.poll(READY_POLL_SECONDS)
        for handle in waiting:
            handle.check()
