"""How learners reach each other: a few collective operations behind one seam, each with a time limit.

Everybody calls the same operations in the same order. Who does not answer in time, or is gone, is a `CommLost` for all
the others; the values given are then as they were, or worthless: the caller begins again from what all agree on.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class CommLost(Exception):
    """Somebody did not answer in time, or is gone."""


class Comm(Protocol):
    """One learner's way to all others."""

    rank: int
    size: int
    sent_bytes: int  # by this learner so far, before whatever the carrier adds
    overlaps: bool  # does a sum that was begun go on while this learner computes?

    def begin(self, values: Tensor) -> Callable[[], None]:
        """Begin a sum; what is answered returns when it is done. Everybody begins the same ones in the same order."""
        ...

    def sum(self, values: Tensor) -> None:  # [...]
        """In place the sum over all ranks, the same bits everywhere."""
        ...

    def gather(self, values: Tensor) -> list[Tensor]:
        """Everybody's values, of one shape, in the order of ranks."""
        ...

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """In place what the root has."""
        ...

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """Hand values to one rank and take those of another."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


class ThreadExchange:
    """Where the threads of a `ThreadComm` meet."""

    def __init__(self, size: int, limit_seconds: float = 10.0) -> None:
        self.size = size
        self.limit_seconds = limit_seconds
        self.barrier = threading.Barrier(size)
        self.shown: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, values: Tensor) -> list[Tensor]:
        """What everybody shows at this moment."""
        self.shown[rank] = values.detach().clone()
        try:
            self.barrier.wait(self.limit_seconds)
            found = list(self.shown)
            self.barrier.wait(self.limit_seconds)  # nobody shows the next thing before all have seen this one
        except threading.BrokenBarrierError:
            raise CommLost(f"rank {rank} waited for the others in vain") from None
        return found


class BlockingComm(ABC):
    """A carrier that has nothing else to do while it sums."""

    overlaps = False

    @abstractmethod
    def sum(self, values: Tensor) -> None:
        """In place the sum over all ranks."""

    def begin(self, values: Tensor) -> Callable[[], None]:
        """It is done when this returns."""
        self.sum(values)
        return lambda: None


class ThreadComm(BlockingComm):
    """Learners as threads of one process: for tests, and the reference for every other carrier."""

    def __init__(self, meeting: ThreadExchange, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self.sent_bytes = 0

    def meet(self, values: Tensor) -> list[Tensor]:
        """Show values and see everybody's."""
        self.sent_bytes += values.nbytes
        return self.meeting.exchange(self.rank, values)

    def sum(self, values: Tensor) -> None:
        """In the order of ranks."""
        first, *others = self.meet(values)
        total = first.clone()
        for other in others:
            total += other
        values.copy_(total)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Everybody's."""
        return self.meet(values)

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """The root's."""
        values.copy_(self.meet(values)[root])

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """All meet, and each takes one."""
        return self.meet(values)[source]

    def close(self) -> None:
        """Nobody meets here any more."""
        self.meeting.barrier.abort()


class NoComm(BlockingComm):
    """A learner alone."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.sent_bytes = 0

    def sum(self, values: Tensor) -> None:
        """Of one; what would have been sent is counted."""
        self.sent_bytes += values.nbytes

    def gather(self, values: Tensor) -> list[Tensor]:
        """One's own."""
        self.sent_bytes += values.nbytes
        return [values.clone()]

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """One's own."""

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """One's own."""
        return values.clone()

    def close(self) -> None:
        """Nobody is left."""
