"""The inline runtime: workers turned by hand in one thread, always send -> update -> receive.

While the worlds step in threads of their own the learner updates, yet the order of everything is fixed, so the seed
decides the whole run.
"""

from collections.abc import Iterator

from qfleet.act import acting
from qfleet.data import Tick
from qfleet.learn import drain, learning
from qfleet.run.carriers import Queue, Shelf
from qfleet.run.wiring import Line


class Inline:
    """Turns one actor and one learner."""

    def __init__(self, line: Line, skipped: int = 0) -> None:
        self.line = line
        self.channel, self.board = Queue(1), Shelf()
        parts = (line.learner, line.feed, self.channel, self.board)
        self.learner = learning(*parts, lambda: line.actor.in_flight, skipped)
        self.actor = acting(line.actor, self.channel, self.board)
        # From the first moment on: an evaluation may come before the first step.
        line.actor.policy.load(0, line.learner.weights())

    def turn(self) -> Iterator[Tick]:
        """One step in every lane and the updates that go with it; afterwards everything is at rest."""
        yield from self.update()
        yield next(self.actor)
        yield from self.update()
        yield next(self.actor)
        drain(self.channel, self.line.feed)

    def update(self) -> Iterator[Tick]:
        """Updates until the gate shuts."""
        while (tick := next(self.learner)).busy:
            yield tick
