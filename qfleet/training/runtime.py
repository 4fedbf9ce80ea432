"""The two loops of a run: everything in one thread, or a learner beside actors in other processes."""

from collections.abc import Iterator
from typing import Protocol

from qfleet.build.components import Components
from qfleet.data import Tick
from qfleet.system.timers import Stopwatch
from qfleet.training.async_loop import AsyncLoop
from qfleet.training.inline import InlineLoop


class Runtime(Protocol):
    """Runs the components of a run."""

    def turn(self) -> Iterator[Tick]:
        """Some steps and the updates that go with them; then nothing is under way."""
        ...

    def poll(self) -> None:
        """Watch over actors in other processes while no turn is made."""
        ...


def make_runtime(components: Components, skipped: int = 0, watch: Stopwatch | None = None) -> Runtime:
    """The loop for these components; the last `skipped` updates were not finite, `watch` measures the stages."""
    if components.remote_actors is not None:
        return AsyncLoop(components, components.remote_actors, skipped, watch)
    return InlineLoop(components, skipped, watch)
