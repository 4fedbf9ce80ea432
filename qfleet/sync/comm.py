"""Collective operations between learners behind one Protocol, each with a timeout.

All ranks call the same operations in the same order. If a rank is lost or does not answer in time, the others raise
`CommLost`; the values given may then be damaged: the caller starts again from weights that all agree on.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from qfleet.system.worker_errors import WorkerLost


class CommLost(WorkerLost):
    """Some rank or shard of a group is lost, or did not answer in time; which one is found by asking each."""


class Comm(Protocol):
    """One rank's end of the collective operations."""

    rank: int
    world_size: int
    sent_bytes: int  # by this rank so far, without the overhead of the transport

    def sum(self, values: Tensor) -> None:  # [...]
        """All-reduce in place: the sum over all ranks, the same bits everywhere."""

    def gather(self, values: Tensor) -> list[Tensor]:
        """All-gather: the values of all ranks, of one shape, in the order of ranks."""

    def broadcast(self, values: Tensor, root: int = 0) -> None:
        """Overwrite the values with those of the root."""

    def swap(self, values: Tensor, to: int, source: int) -> Tensor:
        """Send values to one rank and receive those of another."""

    def close(self) -> None:
        """Leave; operations of the other ranks fail from now on."""


@runtime_checkable
class OverlappingComm(Protocol):
    """A transport whose sums proceed while this rank computes."""

    def begin_sum(self, values: Tensor) -> Callable[[], None]:
        """Begin an all-reduce; returns a function that waits for it. All ranks begin theirs in the same order."""


class NoComm:
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
