"""Supervision: finds workers that are dead, hung or slow, and decides restarts. State machines: `now` is passed in.

The runtime starts the workers in `due(now)`, calls `started`, and several times a second calls `check` for each. A
worker that fails is due again after a delay that doubles with every fault of the last `window_seconds`; a worker that
failed more than `restarts` times within them is quarantined for good, and the others go on (promises I8, I9). A worker
that sends far fewer rollouts than the others is reported by the `StragglerWatch` and keeps running.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from statistics import median_low
from typing import Literal, TypeAlias

import numpy as np

from qfleet.system.restart_budget import RestartBudget
from qfleet.system.silence import SilenceTimer

COMPARE_SECONDS = 10.0  # the least time over which workers are compared
SLOW_SHARE = 1 / 3  # of the median of the others
MIN_ROLLOUTS = 10  # fewer are chance

WorkerId: TypeAlias = tuple[int, int]  # worker, incarnation
WorkerStatus: TypeAlias = Literal["waiting", "running", "quarantined"]
FaultKind: TypeAlias = Literal["dead", "hung", "senseless"]
INVALID_ROLLOUT: FaultKind = "senseless"  # the word that events have for a worker that sent an invalid rollout


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """A fault of a worker that must be stopped and replaced."""

    worker: int
    incarnation: int
    kind: FaultKind
    silent_seconds: float  # since its progress rose last
    delay_seconds: float | None  # until it is due again; None: it is quarantined


@dataclass(slots=True)
class _WorkerRecord:
    """The state of one worker."""

    incarnation: int
    budget: RestartBudget
    state: WorkerStatus = "waiting"
    due_at: float = float("-inf")
    progress: int = 0
    silence: SilenceTimer = field(default_factory=lambda: SilenceTimer(0.0))  # since its progress rose last
    has_moved: bool = False  # has progress risen since the start?
    pending: bool = False  # does it wait for a place to run?


@dataclass(eq=False)
class Supervisor:
    """Decides restarts; the runtime starts and stops processes. `incarnations` are the last ones used before."""

    workers: int
    _: KW_ONLY
    hung_seconds: float
    restarts: int
    rng: np.random.Generator
    window_seconds: float = 600.0
    first_delay: float = 0.1
    largest_delay: float = 10.0
    start_seconds: float = 60.0  # at least, until the first progress: a start imports and makes environments
    incarnations: InitVar[Sequence[int] | None] = None

    def __post_init__(self, incarnations: Sequence[int] | None) -> None:
        # Long enough for a worker that never makes progress to use up its budget.
        longest = (self.restarts + 1) * (max(self.hung_seconds, self.start_seconds) + self.largest_delay)
        self.window_seconds = max(self.window_seconds, longest)
        used = incarnations or [-1] * self.workers
        self.records = [_WorkerRecord(last, self.make_budget()) for last in used]
        if len(self.records) != self.workers:
            raise ValueError(f"{self.workers} workers, but {len(self.records)} incarnations")

    def make_budget(self) -> RestartBudget:
        """The budget of one worker; delays have jitter, so that not all start at once."""
        delays: dict[str, float] = {"first_delay": self.first_delay, "largest_delay": self.largest_delay}
        return RestartBudget(self.restarts, self.window_seconds, rng=self.rng, **delays)

    @property
    def state(self) -> list[WorkerStatus]:
        """The status of every worker."""
        return [record.state for record in self.records]

    @property
    def quarantined(self) -> set[int]:
        """Workers that will not be started again."""
        return {worker for worker, record in enumerate(self.records) if record.state == "quarantined"}

    @property
    def num_running(self) -> int:
        """The number of running workers that have a place to run."""
        return sum(record.state == "running" and not record.pending for record in self.records)

    def limits(self) -> dict[str, float]:
        """The limits that a history is checked against."""
        return {
            "restarts": self.restarts,
            "window_seconds": self.window_seconds,
            "hung_seconds": self.hung_seconds,
            "start_seconds": self.start_seconds,
            "replace_seconds": self.largest_delay + 5.0,
        }

    def reset(self, incarnations: Sequence[int]) -> None:
        """All workers were stopped: start them as later incarnations than these, except quarantined ones."""
        for record, used in zip(self.records, incarnations, strict=True):
            record.incarnation = max(record.incarnation, used)
            if record.state != "quarantined":
                record.state = "waiting"
                record.due_at = float("-inf")

    def due(self, now: float) -> list[int]:
        """Workers to be started now."""
        return [w for w, record in enumerate(self.records) if record.state == "waiting" and record.due_at <= now]

    def started(self, worker: int, now: float, progress: int = 0) -> int:
        """Record that a worker starts, with its counter at `progress`; returns its incarnation."""
        record = self.records[worker]
        if record.state != "waiting":
            raise ValueError(f"worker {worker} is {record.state}")
        record.incarnation += 1
        record.state = "running"
        record.progress = progress
        record.has_moved = False
        record.pending = False
        record.silence.reset(now)
        return record.incarnation

    def check(
        self, worker: int, now: float, *, alive: bool, progress: int, pending: bool = False
    ) -> WorkerFault | None:
        """Check a worker; return its fault, if any. `progress` is its own counter, which also rises while it waits.

        A `pending` worker has no place to run yet. It may wait for one as long as it takes.
        """
        record = self.records[worker]
        if record.state != "running":
            return None
        record.silence.elapsed(now)
        record.pending = pending
        if pending:
            record.silence.reset(now)
        if not alive:
            return self.record_fault(worker, now, "dead")
        if progress != record.progress:
            record.progress = progress
            record.has_moved = True
            record.silence.reset(now)
        limit = self.hung_seconds if record.has_moved else max(self.hung_seconds, self.start_seconds)
        return self.record_fault(worker, now, "hung") if record.silence.seconds >= limit else None

    def record_fault(self, worker: int, now: float, kind: FaultKind) -> WorkerFault:
        """Charge a fault to the worker's budget: the worker is started again later, or quarantined."""
        record = self.records[worker]
        delay = record.budget.delay_seconds if record.budget.charge(now) else None
        record.state = "quarantined" if delay is None else "waiting"
        record.due_at = record.budget.retry_at
        return WorkerFault(worker, record.incarnation, kind, record.silence.seconds, delay)


class StragglerWatch:
    """Finds workers that send far fewer rollouts than the others, each incarnation once."""

    def __init__(self, window_seconds: float = COMPARE_SECONDS) -> None:
        self.window_seconds = window_seconds
        self.began_at = float("-inf")
        self.start_counts: dict[WorkerId, int] = {}  # at the start of the window
        self.reported: set[WorkerId] = set()

    def check(self, now: float, rollouts: Mapping[WorkerId, int]) -> dict[WorkerId, float]:
        """Workers newly found slow, with their share; `rollouts` counts those of running workers that have sent any."""
        if now - self.began_at < self.window_seconds:
            return {}
        # A worker without rollouts at the start of the window was starting, which may take long.
        gained = {
            worker_id: count - self.start_counts[worker_id]
            for worker_id, count in rollouts.items()
            if worker_id in self.start_counts
        }
        if sum(gained.values()) < MIN_ROLLOUTS * len(gained):
            return {}  # extend the window until there is enough to compare
        self.began_at = now
        self.start_counts = dict(rollouts)
        found = {worker_id: share for worker_id, share in stragglers(gained).items() if worker_id not in self.reported}
        self.reported = (self.reported | found.keys()) & rollouts.keys()
        return found


def stragglers(rollouts: Mapping[WorkerId, int]) -> dict[WorkerId, float]:
    """Workers with fewer than SLOW_SHARE of the median of the others' rollouts, with their share of it."""
    found = {}
    for worker_id, own in rollouts.items():
        others = [count for other, count in rollouts.items() if other != worker_id]
        # The lower of two middle values: of three actors, one that is fast must not make the others slow.
        if others and (usual := median_low(others)) >= MIN_ROLLOUTS and own < SLOW_SHARE * usual:
            found[worker_id] = own / usual
    return found
