"""Learners as threads: everybody runs the same function with a way to the others."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from qfleet.sync.comm import ThreadComm, ThreadExchange

T = TypeVar("T")


def together(size: int, act: Callable[[ThreadComm], T], limit_seconds: float = 20.0) -> list[T]:
    """What each of `size` learners answers; what one raises is raised here."""
    meeting, answers, failures = ThreadExchange(size, limit_seconds), dict[int, T](), list[BaseException]()

    def live(rank: int) -> None:
        try:
            answers[rank] = act(ThreadComm(meeting, rank))
        except BaseException as error:
            failures.append(error)
            meeting.barrier.abort()

    threads: list[Any] = [threading.Thread(target=live, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_seconds)
    if failures:
        raise failures[0]
    return [answers[rank] for rank in range(size)]
