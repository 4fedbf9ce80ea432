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

    def __init__(self, line: Components, book: TrainState) -> None:
        self.line = line
        self.plan = line.plan.steer
        self.book = book

    def see(self, score: float) -> list[Adjustment]:
        """Take the mean of a validation in; only a strictly better one counts as progress."""
        book = self.book
        if not self.line.learner.updates:
            return []
        if book.peak is None or score > book.peak:
            book.peak = score
            book.stale = 0
            book.rate_waited = 0
            book.batch_waited = 0
            return []
        book.stale = book.stale + 1
        book.rate_waited = book.rate_waited + 1
        book.batch_waited = book.batch_waited + 1
        return [act for act in (self.lower_rate(), self.grow_batch()) if act is not None]

    def lower_rate(self) -> Adjustment | None:
        """A lower learning rate, if patience has run out and the floor is not reached."""
        plan = self.plan.learning_rate
        learner = self.line.learner
        if not isinstance(plan, PlateauRate) or self.book.rate_waited < plan.patience:
            return None
        self.book.rate_waited = 0
        before = learner.learning_rate
        learner.learning_rate = max(plan.floor, learner.learning_rate * plan.factor)
        if learner.learning_rate == before:
            return None
        return Adjustment("optim.learning_rate", before, learner.learning_rate, plan.patience)

    def grow_batch(self) -> Adjustment | None:
        """A larger batch, if patience has run out; the gate goes on to count updates, so their number stays."""
        plan = self.plan.batch
        feed = self.line.feed
        if not (isinstance(plan, GrowingBatch) and isinstance(feed, ReplaySource)):
            return None
        if self.book.batch_waited < plan.patience:
            return None
        self.book.batch_waited = 0
        before = feed.batch_size
        feed.batch_size = min(plan.largest, feed.batch_size * plan.factor)
        if feed.batch_size == before:
            return None
        return Adjustment("algo.batch_size", before, feed.batch_size, plan.patience)

    def gave_up(self) -> bool:
        """Is it time to stop?"""
        return self.plan.stop_patience is not None and self.book.stale >= self.plan.stop_patience
