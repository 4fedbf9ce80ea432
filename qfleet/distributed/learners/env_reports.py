"""What actor-learners report of their environments: steps, finished episodes and faults."""

from typing import Any

from qfleet.data import Episode
from qfleet.distributed.learners.messages import EnvReport
from qfleet.learn import BatchSource


class EnvReports:
    """Reports of all actor-learners since the run began; `batch_source` is rank 0's own if it is one of them."""

    def __init__(self, batch_source: BatchSource | None) -> None:
        self.batch_source = batch_source
        self.steps = 0  # of the other learners
        self.counted_steps: dict[str, int] = {}  # steps in the last report, by instance of an actor-learner
        self.finished: list[Episode] = []
        self.faults: list[dict[str, Any]] = []

    def total_steps(self) -> int:
        """Environment steps of all actor-learners, rank 0's included."""
        return self.steps + (0 if self.batch_source is None else self.batch_source.steps)

    def add(self, report: EnvReport) -> None:
        """Count one report; before its first batch an actor-learner reports no steps."""
        info = report.info or [()] * len(report.episodes)
        pairs = zip(report.episodes, info, strict=True)
        self.finished += [(value, length, *numbers) for (value, length), numbers in pairs]
        self.faults += report.faults
        if report.totals is not None:
            self.steps += report.totals.steps - self.counted_steps.get(report.instance_id, 0)
            self.counted_steps[report.instance_id] = report.totals.steps

    def discard(self) -> None:
        """The run rolls back: episodes and faults since its checkpoint do not count."""
        self.finished = []
        self.faults = []

    def restore(self, report: EnvReport) -> None:
        """An actor-learner resumed from a checkpoint: the steps it had reported by then are counted already."""
        self.counted_steps[report.instance_id] = 0 if report.totals is None else report.totals.steps

    def take(self) -> dict[str, Any]:
        """Episodes and faults since the last call, as stats of an update's report."""
        stats = {"episodes": self.finished, **({"faults": self.faults} if self.faults else {})}
        self.discard()
        return stats
