"""Steering: what validation scores change while a run goes on. Test seeds are never looked at.

It acts between turns. Its counters are in the train state and what it changes in the learner and the batch source, so
a checkpoint holds all of it. Scores before the first update say nothing about learning and are not counted.
"""

from dataclasses import dataclass

from qfleet.build.components import Components
from qfleet.learn import SizedSource
from qfleet.plan.schema import GrowingBatch, PlateauRate
from qfleet.training.train_state import TrainState


@dataclass(frozen=True)
class Adjustment:
    """One setting that was changed, and why."""

    setting: str
    before: float
    after: float
    patience: int

    @property
    def text(self) -> str:
        """The change in one line."""
        change = f"{self.setting} {self.before:g} -> {self.after:g}"
        return f"{change}: no better score in {evaluations(self.patience)}"


def evaluations(count: int) -> str:
    """`1 evaluation`, `2 evaluations`."""
    return f"{count} evaluation{'s' * (count != 1)}"


@dataclass
class PlateauControl:
    """Lowers the learning rate and grows the batch when scores stop improving, and decides when to give up."""

    components: Components
    train_state: TrainState

    def adjust(self, score: float) -> list[Adjustment]:
        """Adjust settings to the mean of a validation; only a strictly better one counts as progress."""
        train_state = self.train_state
        if not self.components.learner.updates:
            return []
        if train_state.peak is None or score > train_state.peak:
            train_state.peak = score
            train_state.stale = 0
            train_state.rate_waited = 0
            train_state.batch_waited = 0
            return []
        train_state.stale += 1
        train_state.rate_waited += 1
        train_state.batch_waited += 1
        return [change for change in (self.lower_rate(), self.grow_batch()) if change is not None]

    def lower_rate(self) -> Adjustment | None:
        """A lower learning rate, if patience has run out and the floor is not reached."""
        plan = self.components.plan.steer.learning_rate
        learner = self.components.learner
        if not isinstance(plan, PlateauRate) or self.train_state.rate_waited < plan.patience:
            return None
        self.train_state.rate_waited = 0
        before = learner.learning_rate
        learner.learning_rate = max(plan.floor, learner.learning_rate * plan.factor)
        if learner.learning_rate == before:
            return None
        return Adjustment("optim.learning_rate", before, learner.learning_rate, plan.patience)

    def grow_batch(self) -> Adjustment | None:
        """A larger batch, if patience has run out. Updates per step stay; an epoch has fewer of them."""
        plan = self.components.plan.steer.batch
        batch_source = self.components.batch_source
        if not (isinstance(plan, GrowingBatch) and isinstance(batch_source, SizedSource)):
            return None
        if self.train_state.batch_waited < plan.patience:
            return None
        self.train_state.batch_waited = 0
        before = batch_source.batch_size
        batch_source.batch_size = min(plan.largest, batch_source.batch_size * plan.factor)
        if batch_source.batch_size == before:
            return None
        return Adjustment("algo.batch_size", before, batch_source.batch_size, plan.patience)

    def gave_up(self) -> bool:
        """Has the score been stale for longer than the plan allows?"""
        patience = self.components.plan.steer.stop_patience
        return patience is not None and self.train_state.stale >= patience

    def farewell(self) -> str:
        """Why the run gives up, in one line."""
        return f"stopping: no score above {self.train_state.peak:g} in {evaluations(self.train_state.stale)}"
