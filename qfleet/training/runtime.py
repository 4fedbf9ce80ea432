"""What turns the components of a run: one thread for everything, or a learner beside actors in other processes."""

from collections.abc import Iterator
from typing import Protocol

from qfleet.build.components import Components
from qfleet.data import Tick
from qfleet.system.timers import Stopwatch
from qfleet.training.async_loop import AsyncLoop
from qfleet.training.inline import InlineLoop


class Runtime(Protocol):
    """Turns the parts of a line."""

    def turn(self) -> Iterator[Tick]:
        """Some steps and the updates that go with them; afterwards everything is at rest."""
        ...

    def tend(self) -> None:
        """A short look at what lives elsewhere, for when no turn comes for a while."""
        ...


def make_runtime(line: Components, skipped: int = 0, watch: Stopwatch | None = None) -> Runtime:
    """The runtime for a line; `skipped` updates in a row were not finite so far, `watch` takes its time."""
    if line.remote_actors is not None:
        return AsyncLoop(line, line.remote_actors, skipped, watch)
    return InlineLoop(line, skipped, watch)
