"""Ranks as threads: all run the same function, each with its `Comm`."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from qfleet.sync.comm import CommLost

T = TypeVar("T")


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


class ThreadComm:
    """Ranks as threads of one process: the reference for every other transport."""

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


def run_ranks(size: int, act: Callable[[ThreadComm], T], timeout_seconds: float = 20.0) -> list[T]:
    """The results of all ranks; the first error of any rank is raised here."""
    exchange = ThreadExchange(size, timeout_seconds)
    results = dict[int, T]()
    failures = list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = act(ThreadComm(exchange, rank))
        except BaseException as error:
            failures.append(error)
            exchange.barrier.abort()

    threads: list[Any] = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_seconds)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]
