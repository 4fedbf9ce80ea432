"""Collective operations between learners behind one Protocol, each with a timeout.

All ranks call the same operations in the same order. If a rank is lost or does not answer in time, the others raise
`CommLost`; the values given may then be damaged: the caller starts again from weights that all agree on.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class CommLost(Exception):
    """A rank is lost, or did not answer in time."""


class Comm(Protocol):
    """One rank's end of the collective operations."""

    rank: int
    world_size: int
    sent_bytes: int  # by this rank so far, without the overhead of the transport
    overlaps: bool  # does a sum that was begun proceed while this rank computes?

    def begin_sum(self, values: Tensor) -> Callable[[], None]:
        """Begin an all-reduce; returns a function that waits for it. All ranks begin theirs in the same order."""
        ...

    def sum(self, values: Tensor) -> None:  # [...]
        """All-reduce in place: the sum over all ranks, the same bits everywhere."""
        ...

    def gather(self, values: Tensor) -> list[Tensor]:
        """All-gather: the values of all ranks, of one shape, in the order of ranks."""
        ...

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """Overwrite the values with those of the root."""
        ...

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """Send values to one rank and receive those of another."""
        ...

    def close(self) -> None:
        """Leave; operations of the other ranks fail from now on."""
        ...


class ThreadExchange:
    """The shared lists and barrier of the threads of a `ThreadComm`."""

    def __init__(self, world_size: int, timeout_seconds: float = 10.0) -> None:
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.barrier = threading.Barrier(world_size)
        self.slots: list[Tensor] = [torch.empty(0)] * world_size

    def exchange(self, rank: int, values: Tensor) -> list[Tensor]:
        """All-gather: the values of all ranks."""
        self.slots[rank] = values.detach().clone()
        try:
            self.barrier.wait(self.timeout_seconds)
            found = list(self.slots)
            self.barrier.wait(self.timeout_seconds)  # no rank overwrites its slot before all have read it
        except threading.BrokenBarrierError:
            raise CommLost(f"rank {rank} waited for the others in vain") from None
        return found


class BlockingComm(ABC):
    """A transport whose sums block."""

    overlaps = False

    @abstractmethod
    def sum(self, values: Tensor) -> None:
        """All-reduce in place."""

    def begin_sum(self, values: Tensor) -> Callable[[], None]:
        """Sum at once; there is nothing to wait for."""
        self.sum(values)
        return lambda: None


class ThreadComm(BlockingComm):
    """Ranks as threads of one process: for tests, and the reference for every other transport."""

    def __init__(self, exchange: ThreadExchange, rank: int) -> None:
        self.exchange = exchange
        self.rank = rank
        self.world_size = exchange.world_size
        self.sent_bytes = 0

    def sum(self, values: Tensor) -> None:
        """All-reduce, in the order of ranks."""
        first, *others = self.gather(values)
        total = first.clone()
        for other in others:
            total += other
        values.copy_(total)

    def gather(self, values: Tensor) -> list[Tensor]:
        """All-gather."""
        self.sent_bytes += values.nbytes
        return self.exchange.exchange(self.rank, values)

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """All-gather, and take the root's values."""
        values.copy_(self.gather(values)[root])

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """All-gather, and take those of one rank."""
        return self.gather(values)[source]

    def close(self) -> None:
        """Break the barrier."""
        self.exchange.barrier.abort()


class NoComm(BlockingComm):
    """A single rank."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.sent_bytes = 0

    def sum(self, values: Tensor) -> None:
        """Only count the bytes."""
        self.sent_bytes += values.nbytes

    def gather(self, values: Tensor) -> list[Tensor]:
        """This rank's values."""
        self.sent_bytes += values.nbytes
        return [values.clone()]

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """Nothing to do."""

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """This rank's values."""
        return values.clone()

    def close(self) -> None:
        """Nothing to do."""
