"""The driver's handle of a learner worker: every request gets exactly one reply, and every wait has a timeout."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from qfleet.data import Array
from qfleet.data.wire_format import Arrays, Facts, Parts
from qfleet.sync.comm import CommLost

START_SECONDS = 120.0
POLL_SECONDS = 0.2


class LearnerLost(CommLost):
    """This learner died, failed, or does not reply."""


class Transport(Protocol):
    """The driver's end of a connection to a learner worker; raises `CommLost` if that is gone."""

    def send(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Send a message."""

    def receive(self, timeout_seconds: float) -> Parts | None:
        """The next message; None if none came in time."""

    def poll(self, timeout_seconds: float) -> bool:
        """Is a message waiting, or the connection broken?"""


class ProcessControl(Protocol):
    """A learner worker's process."""

    def is_alive(self) -> bool:
        """Is it running?"""

    def exit_reason(self) -> str:
        """How the process ended; empty if it runs, or if that is not known."""

    def stop(self) -> None:
        """End it at once."""


class LearnerHandle:
    """One learner worker."""

    def __init__(
        self,
        number: int,
        transport: Transport,
        control: ProcessControl,
        now: float,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.number = number
        self.transport = transport
        self.control = control
        self.started_at = now
        self.start_seconds = start_seconds
        self.ready = False
        self.broken = ""  # why nothing can be sent to it or received from it any more
        self.num_outstanding = 0  # requests without a reply
        self.pending_ids: deque[Array] = deque()  # ids of the items in each share that it has not reported on

    def poll(self, now: float) -> None:
        """Note whether it is ready; raise `LearnerLost` if it died or takes too long to start."""
        if not self.ready and (parts := self.receive(0.0)) is not None:
            self.ready = True
            raise_if_failed(parts)
        if not self.control.is_alive():
            raise LearnerLost(self.final_error())
        if self.broken:  # its process may take a moment longer to end
            raise LearnerLost(self.broken)
        if not self.ready and now - self.started_at > self.start_seconds:
            raise LearnerLost("it did not start")

    def final_error(self) -> str:
        """Why it died: the error that it sent unasked, or how its process ended."""
        with suppress(CommLost):
            while (parts := self.transport.receive(0.0)) is not None:
                if parts[0].get("kind") == "failed":
                    return str(parts[0].get("cause"))
        return self.control.exit_reason() or "its process ended"

    def cause_of_loss(self, observed: str) -> str:
        """Why it is lost: what the driver observed, and how its process ended if it did."""
        reason = self.control.exit_reason()
        return f"{observed}; {reason}" if reason and reason not in observed else observed

    def send_request(self, facts: Facts, arrays: Arrays | None = None) -> None:
        """Send a request; its reply is received later."""
        try:
            self.transport.send(facts, arrays)
        except CommLost as cause:
            raise self.connection_lost(cause) from cause
        self.num_outstanding += 1

    def connection_lost(self, cause: CommLost) -> LearnerLost:
        """The loss of this learner, because its connection is broken."""
        self.broken = str(cause)
        return LearnerLost(self.broken)

    def receive_reply(self, kind: str, timeout_seconds: float) -> Parts:
        """The next reply, which must be of this kind."""
        parts = self.next_reply(timeout_seconds)
        if parts[0].get("kind") != kind:
            raise CommLost(str(parts[0].get("cause", f"its reply is not of kind {kind}")))
        return parts

    def next_reply(self, timeout_seconds: float) -> Parts:
        """The next reply of any kind."""
        until = time.monotonic() + timeout_seconds
        while True:
            if (parts := self.receive(POLL_SECONDS)) is not None:
                self.num_outstanding -= 1
                raise_if_failed(parts)
                return parts
            if not self.control.is_alive():
                raise LearnerLost(self.final_error())
            if time.monotonic() > until:
                raise LearnerLost("it does not reply")

    def receive(self, timeout_seconds: float) -> Parts | None:
        """The next message; None if none came in time."""
        try:
            return self.transport.receive(timeout_seconds)
        except CommLost as cause:
            raise self.connection_lost(cause) from cause

    def drain(self, timeout_seconds: float) -> Iterator[Parts]:
        """Drain outstanding replies to resynchronise the connection."""
        until = time.monotonic() + timeout_seconds
        while self.num_outstanding:
            yield self.next_reply(max(0.0, until - time.monotonic()))
        self.pending_ids.clear()


def raise_if_failed(parts: Parts) -> None:
    """A learner that reports its own failure is lost."""
    if parts[0].get("kind") == "failed":
        raise LearnerLost(str(parts[0].get("cause")))
