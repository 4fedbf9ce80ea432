"""Steering: what validation scores change while a run goes on. Test seeds are never looked at.

It acts between turns, when the line is at rest; what it counts stands in the book and what it changes in the learner
and the feed, so a checkpoint holds all of it. Scores before the first update say nothing about learning: not counted.
"""

from dataclasses import dataclass

from qfleet.build.components import Components
from qfleet.learn import ReplaySource
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
        """In one line."""
        change = f"{self.setting} {self.before:g} -> {self.after:g}"
        return f"{change}: no better score in {evaluations(self.patience)}"


def evaluations(count: int) -> str:
    """How many, in words."""
    return f"{count} evaluation{'s' * (count != 1)}"


class PlateauControl:
    """Lowers the learning rate, grows the batch, and knows when to give up."""

    def __init__(self, line: Components, train_state: TrainState) -> None:
        self.line = line
        self.plan = line.plan.steer
        self.train_state = train_state

    def see(self, score: float) -> list[Adjustment]:
        """Take the mean of a validation in; only a strictly better one counts as progress."""
        train_state = self.train_state
        if not self.line.learner.updates:
            return []
        if train_state.peak is None or score > train_state.peak:
            train_state.peak = score
            train_state.stale = 0
            train_state.rate_waited = 0
            train_state.batch_waited = 0
            return []
        train_state.stale = train_state.stale + 1
        train_state.rate_waited = train_state.rate_waited + 1
        train_state.batch_waited = train_state.batch_waited + 1
        return [act for act in (self.lower_rate(), self.grow_batch()) if act is not None]

    def lower_rate(self) -> Adjustment | None:
        """A lower learning rate, if patience has run out and the floor is not reached."""
        plan = self.plan.learning_rate
        learner = self.line.learner
        if not isinstance(plan, PlateauRate) or self.train_state.rate_waited < plan.patience:
            return None
        self.train_state.rate_waited = 0
        before = learner.learning_rate
        learner.learning_rate = max(plan.floor, learner.learning_rate * plan.factor)
        if learner.learning_rate == before:
            return None
        return Adjustment("optim.learning_rate", before, learner.learning_rate, plan.patience)

    def grow_batch(self) -> Adjustment | None:
        """A larger batch, if patience has run out; the gate goes on to count updates, so their number stays."""
        plan = self.plan.batch
        batch_source = self.line.batch_source
        if not (isinstance(plan, GrowingBatch) and isinstance(batch_source, ReplaySource)):
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
        """Is it time to stop?"""
        return self.plan.stop_patience is not None and self.train_state.stale >= self.plan.stop_patience
