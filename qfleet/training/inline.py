"""The inline loop: actor and learner in one thread, always send -> update -> receive.

The learner updates while the environments step in threads of their own; the order is fixed, so the seed decides the
whole run.
"""

from collections.abc import Iterator

from qfleet.act import Actor, run_actor
from qfleet.build.components import Components
from qfleet.data import Tick
from qfleet.learn import drain, run_learner
from qfleet.system.timers import Stopwatch
from qfleet.training.channels import LatestWeights, RolloutQueue


class InlineLoop:
    """Runs one actor and one learner in turns."""

    def __init__(self, components: Components, skipped: int = 0, watch: Stopwatch | None = None) -> None:
        actor = components.actor
        self.watch = watch or Stopwatch()
        if not isinstance(actor, Actor):
            raise TypeError(f"inline runs one actor, not a {type(actor).__name__}")
        self.components = components
        self.channel = RolloutQueue(1)
        self.latest_weights = LatestWeights()
        parts = (components.learner, components.batch_source, self.channel, self.latest_weights)
        self.learner = run_learner(*parts, lambda: actor.in_flight, skipped, self.watch, components.update)
        self.actor = run_actor(actor, self.channel, self.latest_weights, watch=self.watch)
        self.policy = actor.policy
        # At once: an evaluation may come before the first step.
        actor.policy.load_weights(0, components.learner.weights())

    def turn(self) -> Iterator[Tick]:
        """One step in every lane and the updates that go with it; then nothing is under way."""
        yield from self.update()
        yield next(self.actor)
        yield from self.update()
        yield next(self.actor)
        yield self.insert_step()

    def insert_step(self) -> Tick:
        """Insert the step into the replay; `lag` is the age of the weights that chose it, in updates."""
        with self.watch.insert:
            drain(self.channel, self.components.batch_source)
        return Tick(busy=True, stats={"lag": self.latest_weights.version - self.policy.version})

    def update(self) -> Iterator[Tick]:
        """Update until the limiter stops it."""
        while (tick := next(self.learner)).busy:
            yield tick

    def poll(self) -> None:
        """Do nothing: there are no other processes."""
