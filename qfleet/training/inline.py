"""The inline runtime: workers turned by hand in one thread, always send -> update -> receive.

While the worlds step in threads of their own the learner updates, yet the order of everything is fixed, so the seed
decides the whole run.
"""

from collections.abc import Iterator

from qfleet.act import Actor, acting
from qfleet.build.components import Components
from qfleet.data import Tick
from qfleet.learn import drain, learning
from qfleet.system.timers import Stopwatch
from qfleet.training.channels import LatestWeights, RolloutQueue


class InlineLoop:
    """Turns one actor and one learner."""

    def __init__(self, line: Components, skipped: int = 0, watch: Stopwatch | None = None) -> None:
        actor = line.actor
        self.watch = watch or Stopwatch()
        if not isinstance(actor, Actor):
            raise TypeError(f"inline turns one actor, not a {type(actor).__name__}")
        self.line = line
        self.channel = RolloutQueue(1)
        self.board = LatestWeights()
        parts = (line.learner, line.batch_source, self.channel, self.board)
        self.learner = learning(*parts, lambda: actor.in_flight, skipped, self.watch)
        self.actor = acting(actor, self.channel, self.board, watch=self.watch)
        self.policy = actor.policy
        # From the first moment on: an evaluation may come before the first step.
        actor.policy.load(0, line.learner.weights())

    def turn(self) -> Iterator[Tick]:
        """One step in every lane and the updates that go with it; afterwards everything is at rest."""
        yield from self.update()
        yield next(self.actor)
        yield from self.update()
        yield next(self.actor)
        yield self.take_in()

    def take_in(self) -> Tick:
        """Remember the step; it was chosen by weights that are so many updates old by now."""
        with self.watch.insert:
            drain(self.channel, self.line.batch_source)
        return Tick(busy=True, stats={"lag": self.board.version - self.policy.version})

    def update(self) -> Iterator[Tick]:
        """Updates until the gate shuts."""
        while (tick := next(self.learner)).busy:
            yield tick

    def tend(self) -> None:
        """Nobody lives elsewhere."""
