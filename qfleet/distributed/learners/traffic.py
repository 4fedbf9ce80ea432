"""Bytes that the driver's learner sends per update."""

from collections.abc import Sequence
from typing import Protocol


class CountsBytes(Protocol):
    """A connection that counts the bytes sent."""

    sent_bytes: int


class Traffic:
    """Bytes that rank 0 sent for updates, without protocol headers and without those for forming a group."""

    def __init__(self) -> None:
        self.bytes = 0
        self.updates = 0
        self.before = 0
        self.connections: Sequence[CountsBytes] = ()

    def begin(self, connections: Sequence[CountsBytes]) -> None:
        """Begin an update, or another try of it, with these connections."""
        self.count()
        self.connections = connections
        self.before = sum(connection.sent_bytes for connection in connections)

    def end(self) -> None:
        """The update was made."""
        self.count()
        self.updates += 1
        self.connections = ()
        self.before = 0

    def count(self) -> None:
        """Add the bytes sent on these connections since `begin`."""
        self.bytes += sum(connection.sent_bytes for connection in self.connections) - self.before

    def take(self) -> float | None:
        """Mean bytes per update since the last call."""
        mean = round(self.bytes / self.updates, 1) if self.updates else None
        self.bytes = 0
        self.updates = 0
        return mean
