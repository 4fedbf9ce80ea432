"""The loop of a run that learns from a data set: one update per turn, and nothing acts."""

from collections.abc import Iterator

from qfleet.build.components import Components
from qfleet.data import Tick
from qfleet.learn import Learner, run_learner
from qfleet.learn.offline.dataset_source import DatasetSource
from qfleet.learn.offline.sampled_source import SampledSource
from qfleet.learn.parameters_hash import parameters_hash
from qfleet.system.timers import Stopwatch
from qfleet.training.channels import LatestWeights, RolloutQueue
from qfleet.training.log.run_log import RunLog


class OfflineLoop:
    """Updates the learner from its batch source."""

    def __init__(self, components: Components, skipped: int = 0, watch: Stopwatch | None = None) -> None:
        if not isinstance(components.batch_source, DatasetSource | SampledSource):
            raise TypeError("this run does not learn from a data set")
        self.source = components.batch_source
        self.policy = components.policy
        self.latest_weights = LatestWeights()
        parts = (components.learner, components.batch_source, RolloutQueue(1), self.latest_weights)
        self.learner = run_learner(*parts, skipped=skipped, watch=watch or Stopwatch(), update=components.update)
        # At once: an evaluation may come before the first update.
        self.policy.load_weights(0, components.learner.weights())

    def turn(self) -> Iterator[Tick]:
        """One update."""
        yield next(self.learner)
        if texts := self.source.take_warnings():
            yield Tick(busy=False, stats={"warnings": texts})
        if (newer := self.latest_weights.read(self.policy.version)) is not None:
            self.policy.load_weights(*newer)

    def poll(self) -> None:
        """Do nothing: there are no other processes."""


def record_first_parameters(components: Components, run_log: RunLog) -> None:
    """Write the hash of the parameters that a run on data starts with into its events."""
    learner = components.learner
    if isinstance(learner, Learner):
        found = parameters_hash(learner.online_tensors)
        run_log.events.event("first_parameters", sha256=found, learners=components.plan.learners.num)
