"""How many bytes learners send each other."""

from collections.abc import Sequence
from typing import Protocol


class CountsBytes(Protocol):
    """Somewhere to send things."""

    sent_bytes: int


class Traffic:
    """What rank 0 has sent for its updates, before whatever a carrier adds; what forming a group takes is left out."""

    def __init__(self) -> None:
        self.bytes = self.updates = self.before = 0
        self.ways: Sequence[CountsBytes] = ()

    def begin(self, ways: Sequence[CountsBytes]) -> None:
        """An update is begun, perhaps for another time, and these are the ways to others."""
        self.count()
        self.ways = ways
        self.before = sum(way.sent_bytes for way in ways)

    def end(self) -> None:
        """It was made."""
        self.count()
        self.updates += 1
        self.ways = ()
        self.before = 0

    def count(self) -> None:
        """What was sent on these ways."""
        self.bytes += sum(way.sent_bytes for way in self.ways) - self.before

    def take(self) -> float | None:
        """Bytes per update since this was last asked."""
        mean = round(self.bytes / self.updates, 1) if self.updates else None
        self.bytes = self.updates = 0
        return mean
