"""Where the work is done. The result does not depend on it: answers come in the order of the orders."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

Work: TypeAlias = Callable[[bytes], bytes]  # a function of a module, which other processes can import


class Engine(Protocol):
    """Does some work for every order. An order that was lost with its worker is done again."""

    def map(self, work: Work, orders: Sequence[bytes]) -> Iterator[bytes]:
        """The answers, in the order of the orders."""


class LocalEngine:
    """In this process, one order after the other."""

    def map(self, work: Work, orders: Sequence[bytes]) -> Iterator[bytes]:
        """The answers, in the order of the orders."""
        return map(work, orders)
