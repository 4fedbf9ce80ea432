"""Ranks as threads: all run the same function, each with its `Comm`."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from qfleet.sync.comm import ThreadComm, ThreadExchange

T = TypeVar("T")


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
