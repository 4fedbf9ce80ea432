"""The counters of a run, which a checkpoint holds and an exact resume repeats."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import msgspec

from qfleet.data import State, Tick
from qfleet.data.state_reader import saved_count, saved_number
from qfleet.training.log.info_numbers import InfoNumbers

RECENT = 100  # episodes that `return_mean` and `length_mean` average over
MAX_REASONS = 20  # kept of a run that is not exact
SAVED_NAMES = {"evaluated_steps": "judged_steps"}  # fields with another name in checkpoints
UNKNOWN = "an earlier version of qfleet did not write down why"


def field_types() -> dict[str, Any]:
    """The type of each field as it is saved, by its name in checkpoints."""
    types = {**get_type_hints(TrainState), "recent": list[float], "lengths": list[int], "info": dict[str, list[float]]}
    return {SAVED_NAMES.get(name, name): kind for name, kind in types.items()}


def require_score(row: dict[str, Any] | None) -> None:
    """Refuse a saved evaluation that lacks its step or its scores."""
    if row is not None:
        for name in ("env_steps", "episodes"):
            saved_count(row, name)
        for name in ("mean", "low", "high"):
            saved_number(row, name)


@dataclass
class TrainState:
    """Sums since the last row, recent returns, and the best evaluation."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    episodes: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    lag_sum: int = 0  # updates between the weights that chose a rollout's actions and those when it arrived
    lag_count: int = 0
    last_loss: float | None = None
    gradient_norm: float = 0.0
    value_mean: float = 0.0  # of the last update: the first sign of divergence
    skipped: int = 0
    skipped_in_a_row: int = 0
    rollbacks: int = 0
    exact: bool = True  # still the run that its plan and seed decide
    not_exact: list[str] = field(default_factory=list)  # the reasons why not
    lost: list[str] = field(default_factory=list)  # actors and learners that were given up, and why
    logged_steps: int = 0
    evaluated_steps: int = 0  # at the last evaluation
    best: dict[str, Any] | None = None
    last_eval: dict[str, Any] | None = None
    evaluations: int | None = 0  # that the best was chosen from; None: an older version did not count them
    # Plateau control: the best score it saw, and evaluations since then or since its last adjustment.
    peak: float | None = None
    stale: int = 0
    rate_waited: int = 0
    batch_waited: int = 0
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))  # of recent episodes
    info: InfoNumbers = field(default_factory=InfoNumbers)  # of recent episodes

    def add_tick(self, tick: Tick) -> None:
        """Add what a worker's tick reports."""
        stats = tick.stats
        if "loss" in stats:
            self.loss_sum += stats["loss"]
            self.loss_count += 1
            self.last_loss = stats["loss"]
            self.gradient_norm = stats["gradient_norm"]
            self.value_mean = stats["value_mean"]
            self.skipped_in_a_row = 0
        elif "skipped" in stats:
            self.skipped += 1
            self.skipped_in_a_row += 1
        if "lag" in stats:
            self.lag_sum += stats["lag"]
            self.lag_count += 1
        for value, length, *info in stats.get("episodes", ()):
            self.recent.append(value)
            self.lengths.append(length)
            self.episodes += 1
            if info:
                self.info.add(info)

    def mark_inexact(self, reason: str) -> None:
        """The run is not exact, for this reason."""
        self.exact = False
        if reason not in self.not_exact and len(self.not_exact) < MAX_REASONS:
            self.not_exact.append(reason)

    def add_evaluation(self, row: dict[str, Any]) -> bool:
        """Add a validation; is it the best so far? Of equals the later one is, because it has learned longer."""
        self.last_eval = row
        self.evaluations = None if self.evaluations is None else self.evaluations + 1
        if self.best is not None and row["mean"] < self.best["mean"]:
            return False
        self.best = row
        return True

    def best_context(self) -> dict[str, Any]:
        """What puts the best score into context: how many it was chosen from, and the last one."""
        return {"best_of": self.evaluations, "last_eval": self.last_eval}

    def add_lost(self, text: str) -> None:
        """Keep that an actor or learner was given up."""
        if text not in self.lost and len(self.lost) < MAX_REASONS:
            self.lost.append(text)

    def return_mean(self) -> float | None:
        """Mean return of the newest training episodes."""
        return sum(self.recent) / len(self.recent) if self.recent else None

    def length_mean(self) -> float | None:
        """Mean length of the newest training episodes, in steps."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else None

    def take_loss(self) -> float | None:
        """Mean loss since it was last taken."""
        mean = self.loss_sum / self.loss_count if self.loss_count else None
        self.loss_sum = 0.0
        self.loss_count = 0
        return mean

    def take_lag(self) -> float | None:
        """Mean lag of the policy since it was last taken, in updates."""
        mean = self.lag_sum / self.lag_count if self.lag_count else None
        self.lag_sum = 0
        self.lag_count = 0
        return mean

    def state_dict(self) -> State:
        """Plain values."""
        values = {SAVED_NAMES.get(name, name): value for name, value in vars(self).items()}
        lists = {name: list(getattr(self, name)) for name in ("recent", "lengths", "not_exact", "lost")}
        return {**values, **lists, "info": self.info.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Load them; counters that an older version did not have start afresh, but the best score is known."""
        fresh = vars(TrainState())
        types = field_types()
        known = {name: msgspec.convert(value, types[name]) for name, value in state.items() if name in types}
        for name in known:
            if types[name] is int:
                saved_count(known, name)
        for row in (known.get("best"), known.get("last_eval")):
            require_score(row)
        fresh["peak"] = (known["best"] or {}).get("mean")
        fresh["evaluations"] = None if known["best"] else 0
        self.info.load_state_dict(known.get("info"))
        for name in fresh.keys() - {"info"}:
            setattr(self, name, known.get(SAVED_NAMES.get(name, name), fresh[name]))
        self.recent = deque(state["recent"], maxlen=RECENT)
        self.lengths = deque(known.get("lengths", ()), maxlen=RECENT)
        self.not_exact = list(self.not_exact or ([] if self.exact else [UNKNOWN]))
