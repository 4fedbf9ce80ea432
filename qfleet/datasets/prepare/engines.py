"""Where the work on input files is done. The result does not depend on it: results come in the order of the inputs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

Input = TypeVar("Input")
Result = TypeVar("Result")


class Engine(Protocol):
    """Applies a function to every input."""

    def map(self, work: Callable[[Input], Result], inputs: Sequence[Input]) -> Iterator[Result]:
        """The results in the order of the inputs."""


class LocalEngine:
    """In this process, one input after the other."""

    def map(self, work: Callable[[Input], Result], inputs: Sequence[Input]) -> Iterator[Result]:
        """The results in the order of the inputs."""
        return map(work, inputs)
