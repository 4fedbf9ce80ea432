"""The settings that a callback may change while a run goes on: checked when it asks, changed at a safe point."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import msgspec

from qfleet.build.components import Components
from qfleet.errors import StorageError, UsageError
from qfleet.learn import SizedSource
from qfleet.plan.schema import DatasetReplay, GrowingBatch
from qfleet.plan.secrets import write_run_plan
from qfleet.plan.validate.placement import has_actor_learners
from qfleet.training.log.run_log import RunLog

RATE = "optim.learning_rate"
BATCH = "algo.batch_size"
STEPS = "until.steps"
LARGEST_RECORDED_BATCH = 1 << 20  # a data set has more steps than a batch that fits into memory


def as_rate(value: Any) -> float:
    """A learning rate; ValueError with what was expected."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 < float(value) < math.inf:
        raise ValueError("a number above 0")
    return float(value)


def as_count(value: Any) -> int:
    """A number of items or steps; ValueError with what was expected."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError("a whole number from 1 on")
    return int(value)


CHANGEABLE: dict[str, Callable[[Any], float | int]] = {
    RATE: as_rate,
    BATCH: as_count,
    STEPS: as_count,
}


def typed_value(path: str, value: Any) -> float | int:
    """The value for a setting that a callback may change; all others are refused."""
    if path not in CHANGEABLE:
        raise UsageError(
            f"a callback cannot change {path!r}",
            f"While a run goes on, only these can change: {', '.join(CHANGEABLE)}.",
            "Set it in the plan, or start another run with weights_from= this one.",
        )
    try:
        return CHANGEABLE[path](value)
    except ValueError as error:
        raise UsageError(
            f"a callback cannot set {path} to {value!r}", f"It must be {error}.", f'Write run.change("{path}", ...).'
        ) from error


@dataclass
class ChangeableSettings:
    """Checks and makes the changes that callbacks ask for."""

    components: Components
    run_log: RunLog

    def checked(self, path: str, value: Any) -> float | int:
        """The value, if the run can have it; a UsageError says why not."""
        typed = typed_value(path, value)
        if path == BATCH:
            self.require_batch_size(int(typed))
        return typed

    def require_batch_size(self, size: int) -> None:
        """Refuse a batch that this run has no room for."""
        plan = self.components.plan
        if not isinstance(self.components.batch_source, SizedSource):
            raise UsageError(
                f"a callback cannot change {BATCH} with replay.type=fresh",
                "replay.minibatches sets into how many parts fresh experience is cut.",
                "Set replay.minibatches in the plan.",
            )
        if has_actor_learners(plan):
            raise UsageError(
                f"a callback cannot change {BATCH} with learners.bundles",
                "Every actor-learner draws batches of its own, in another process.",
                f"Set {BATCH} in the plan.",
            )
        largest = self.largest_batch(plan.algo.batch_size)
        if not plan.learners.num <= size <= largest:
            raise UsageError(
                f"a callback cannot set {BATCH} to {size}",
                f"This run has room for batches of {plan.learners.num} to {largest} items.",
                "Choose a number between these; where batches go to another process, steer.batch.largest makes room.",
            )

    def largest_batch(self, planned: int) -> int:
        """The most items of a batch: messages between processes have a size that the plan has decided."""
        plan = self.components.plan
        if self.components.remote_replay is None and self.components.peers is None:
            if isinstance(plan.replay, DatasetReplay):
                return LARGEST_RECORDED_BATCH
            return self.components.batch_source.replay.capacity
        steer = plan.steer.batch
        return steer.largest if isinstance(steer, GrowingBatch) else planned

    def apply(self, changes: dict[str, float | int]) -> None:
        """Make the changes; each is an event and a row, and is named in `not_exact` if it changes what is learned."""
        for path, after in changes.items():
            before = self.set(path, after)
            if before == after:
                continue
            text = f"{path} {before:g} -> {after:g}: asked for by a callback"
            self.run_log.log_change("callback", text, setting=path, before=before, after=after)
            if path != STEPS:
                self.components.changed_settings.add(path)
                self.run_log.mark_inexact([f"a callback changed {path}, which the plan and the seed do not know"])

    def set(self, path: str, value: float | int) -> float | int:
        """Set one of them; returns its value before."""
        if path == STEPS:
            return self.set_steps(int(value))
        changes_rate = path == RATE
        holder: Any = self.components.learner if changes_rate else self.components.batch_source
        name = "learning_rate" if changes_rate else "batch_size"
        before: float | int = getattr(holder, name)
        setattr(holder, name, value)
        return before

    def set_steps(self, steps: int) -> int:
        """Move the end of the run, in run.toml too, so that a resumed run ends there."""
        plan = self.components.plan
        before = plan.until.steps
        if steps == before:
            return before
        plan = msgspec.structs.replace(plan, until=msgspec.structs.replace(plan.until, steps=steps))
        self.components.plan = plan
        if self.components.remote_actors is not None:
            self.components.remote_actors.until_steps = steps
        try:
            write_run_plan(plan, self.run_log.folder / "run.toml")
        except StorageError as cause:
            self.run_log.note_failed_write(cause)
        return before
