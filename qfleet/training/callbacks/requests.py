"""What callbacks ask of a run: metrics for the next row, changes of settings, a save, an evaluation, the end."""

import math
import re
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from qfleet.data import State
from qfleet.errors import UsageError
from qfleet.training.log.run_status import Ending

METRIC = "callback."  # how the names of callbacks' metrics begin in rows
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,79}")
MAX_METRICS = 200  # in one row
MAX_REASON_CHARACTERS = 200
STOPPED = "stopped by a callback"


@dataclass
class RunRequests:
    """The requests since the last safe point, and the metrics since the last row."""

    save: bool = False
    evaluate: bool = False
    ending: Ending | None = None
    changes: dict[str, float | int] = field(default_factory=dict)  # by path
    metrics: dict[str, tuple[float, int]] = field(default_factory=dict)  # sum and count by name

    def add_metric(self, name: str, value: Any, *, mean: bool) -> None:
        """Put a number into the next progress row: the newest one, or the mean since the last row."""
        number = metric_number(name, value)
        if name not in self.metrics and len(self.metrics) == MAX_METRICS:
            raise UsageError(
                f"callbacks have logged more than {MAX_METRICS} metrics",
                "Each becomes a field of every progress row.",
                f"Log fewer names; the last one was {name!r}.",
            )
        total, count = self.metrics.get(name, (0.0, 0)) if mean else (0.0, 0)
        self.metrics[name] = (total + number, count + 1)

    def take_metrics(self) -> dict[str, float]:
        """The fields of a progress row; numbers that are not finite become null there."""
        taken = {f"{METRIC}{name}": total / count for name, (total, count) in self.metrics.items()}
        self.metrics = {}
        return taken

    def take_changes(self) -> dict[str, float | int]:
        """The changes of settings since the last call."""
        taken = self.changes
        self.changes = {}
        return taken

    def stop(self, reason: str, *, done: bool) -> None:
        """End the run at the next safe point; the first reason counts."""
        if self.ending is None:
            text = f"{STOPPED}: {str(reason)[:MAX_REASON_CHARACTERS]}" if reason else STOPPED
            self.ending = Ending("done", 0, text) if done else Ending("stopped", 75, text)

    def state_dict(self) -> State:
        """The metrics that no row has shown yet."""
        return {name: list(pair) for name, pair in self.metrics.items() if math.isfinite(pair[0])}

    def load_state_dict(self, state: State) -> None:
        """Restore them; requests since the checkpoint are dropped."""
        self.save = False
        self.evaluate = False
        self.ending = None
        self.changes = {}
        self.metrics = {str(name): (float(total), max(1, int(count))) for name, (total, count) in state.items()}


def metric_number(name: str, value: Any) -> float:
    """The value of a metric as a float; refuses bad names and what is not a number."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} cannot be the name of a metric",
            "A name has letters, digits and _ . / - only, and at most 80 of them.",
            'Write run.log("name", number).',
        )
    if isinstance(value, Real):
        return float(value)
    if getattr(value, "ndim", None) == 0 or getattr(value, "size", None) == 1:
        return float(value.item())
    raise UsageError(
        f"the metric {name!r} was given a {type(value).__name__}", "A metric is one number.", "Log float(value)."
    )
