"""Supervision of workers: who is dead, hung or slow, who is to be started and when. State machines: `now` is passed in.

The runtime asks `due(now)` whom to start, calls `started`, and several times a second tells what it `see`s of each.
One that fails is due again after a delay that doubles with every fault of the last `window_seconds`; one that failed
more than `restarts` times in that time is quarantined for good, and the others go on (promises I8, I9). One that only
brings in far less than the others is named by its `StragglerWatch` and left at work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal, TypeAlias

import numpy as np

from qfleet.system.restart_budget import RestartBudget

# Time in which nobody looked counts so much at most: a driver that was itself stopped must not find all others hung.
LOOK_SECONDS = 2.0
PACE_SECONDS = 10.0  # the least time over which workers are compared
SLOW_SHARE = 1 / 3  # of what the others bring in
FEW_ROLLOUTS = 10  # fewer say nothing: one more or less is chance

Who: TypeAlias = tuple[int, int]  # worker, incarnation
Condition: TypeAlias = Literal["waiting", "running", "quarantined"]
Failing: TypeAlias = Literal["dead", "hung", "senseless"]  # the last: what it handed over makes no sense


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """What was seen of a worker that must be ended and replaced."""

    worker: int
    incarnation: int
    kind: Failing
    silent_seconds: float  # since its progress moved last
    delay_seconds: float | None  # until it is due again; None: it is quarantined


@dataclass(slots=True)
class _WorkerRecord:
    """What is known of one worker."""

    incarnation: int
    budget: RestartBudget
    state: Condition = "waiting"
    due_at: float = float("-inf")
    progress: int = 0
    seen_at: float = 0.0
    silent_seconds: float = 0.0  # since its progress moved last, as far as somebody looked
    moved: bool = False  # since it was started


class Supervisor:
    """Decides; ending and starting processes is the runtime's part. `incarnations`: the last ones used before."""

    def __init__(
        self,
        workers: int,
        *,
        hung_seconds: float,
        restarts: int,
        rng: np.random.Generator,
        window_seconds: float = 600.0,
        first_delay: float = 0.1,
        largest_delay: float = 10.0,
        start_seconds: float = 60.0,
        incarnations: Sequence[int] | None = None,
    ) -> None:
        # Long enough for one that never moves to fail as often as it may, and once more.
        window_seconds = max(window_seconds, (restarts + 1) * (max(hung_seconds, start_seconds) + largest_delay))
        self.hung_seconds = hung_seconds
        self.restarts = restarts
        self.window_seconds = window_seconds
        self.first_delay = first_delay
        self.largest_delay = largest_delay
        self.rng = rng
        self.start_seconds = start_seconds  # the least time until it first moves: a start imports and builds worlds
        self.seats = [
            _WorkerRecord(last, RestartBudget(restarts, window_seconds)) for last in incarnations or [-1] * workers
        ]
        if len(self.seats) != workers:
            raise ValueError(f"{workers} workers, but {len(self.seats)} incarnations")

    @property
    def state(self) -> list[Condition]:
        """Of every worker."""
        return [seat.state for seat in self.seats]

    @property
    def quarantined(self) -> set[int]:
        """Workers that will not be started again."""
        return {worker for worker, seat in enumerate(self.seats) if seat.state == "quarantined"}

    @property
    def working(self) -> int:
        """How many run at this moment."""
        return self.state.count("running")

    def terms(self) -> dict[str, float]:
        """What it promises, for a history."""
        return {
            "restarts": self.restarts,
            "window_seconds": self.window_seconds,
            "hung_seconds": self.hung_seconds,
            "start_seconds": self.start_seconds,
            "replace_seconds": self.largest_delay + 5.0,
        }

    def incarnation(self, worker: int) -> int:
        """The newest one of a worker; -1 before the first."""
        return self.seats[worker].incarnation

    def begin_anew(self, incarnations: Sequence[int]) -> None:
        """Nobody runs any more, and later incarnations than these are to be started. What failed too often stays so."""
        for seat, used in zip(self.seats, incarnations, strict=True):
            seat.incarnation = max(seat.incarnation, used)
            if seat.state != "quarantined":
                seat.state = "waiting"
                seat.due_at = float("-inf")

    def due(self, now: float) -> list[int]:
        """Workers to be started now."""
        return [w for w, seat in enumerate(self.seats) if seat.state == "waiting" and seat.due_at <= now]

    def started(self, worker: int, now: float, progress: int = 0) -> int:
        """It is about to be started, with its counter at `progress`; returns its incarnation."""
        seat = self.seats[worker]
        if seat.state != "waiting":
            raise ValueError(f"worker {worker} is {seat.state}")
        seat.incarnation += 1
        seat.state = "running"
        seat.progress = progress
        seat.moved = False
        seat.seen_at = now
        seat.silent_seconds = 0.0
        return seat.incarnation

    def see(self, worker: int, now: float, *, alive: bool, progress: int) -> WorkerFault | None:
        """What a look at a worker shows. `progress` is its own count of things done, waiting for a turn included."""
        seat = self.seats[worker]
        if seat.state != "running":
            return None
        seat.silent_seconds += min(now - seat.seen_at, LOOK_SECONDS)
        seat.seen_at = now
        if not alive:
            return self.fail(worker, now, "dead")
        if progress != seat.progress:
            seat.progress = progress
            seat.moved = True
            seat.silent_seconds = 0.0
        limit = self.hung_seconds if seat.moved else max(self.hung_seconds, self.start_seconds)
        return self.fail(worker, now, "hung") if seat.silent_seconds >= limit else None

    def fail(self, worker: int, now: float, kind: Failing) -> WorkerFault:
        """Charge a fault to the worker's budget: it is started again later, or quarantined."""
        seat = self.seats[worker]
        delay = self.delay(len(seat.budget.faults)) if seat.budget.charge(now) else None
        seat.state, seat.due_at = ("quarantined", now) if delay is None else ("waiting", now + delay)
        return WorkerFault(worker, seat.incarnation, kind, seat.silent_seconds, delay)

    def delay(self, faults: int) -> float:
        """Seconds until the next start after so many faults: doubling, with jitter so that not all start at once."""
        # The exponent is bounded because a float is: 2.0**1024 is an error.
        longest = min(self.largest_delay, self.first_delay * 2.0 ** min(faults - 1, 64))
        return longest * (0.5 + 0.5 * float(self.rng.random()))


class StragglerWatch:
    """Who brings in far less than the others, told once of each incarnation. It compares; nobody waits for it."""

    def __init__(self, window_seconds: float = PACE_SECONDS) -> None:
        self.window_seconds = window_seconds
        self.began_at = float("-inf")
        self.before: dict[Who, int] = {}  # how much each had brought in when the window began
        self.named: set[Who] = set()

    def see(self, now: float, brought: Mapping[Who, int]) -> dict[Who, float]:
        """Who is found slow now, with its share; `brought` counts rollouts of those who were heard and are there."""
        if now - self.began_at < self.window_seconds:
            return {}
        # Whoever was not heard yet when the window began was starting, which takes longer for one than for another.
        gained = {who: count - self.before[who] for who, count in brought.items() if who in self.before}
        if sum(gained.values()) < FEW_ROLLOUTS * len(gained):
            return {}  # where all are slow the window lasts longer
        self.began_at = now
        self.before = dict(brought)
        found = {who: share for who, share in stragglers(gained).items() if who not in self.named}
        self.named = (self.named | found.keys()) & brought.keys()
        return found


def stragglers(brought: Mapping[Who, int]) -> dict[Who, float]:
    """Those who brought in less than SLOW_SHARE of the median of the others, with their share of it."""
    found = {}
    for who, own in brought.items():
        others = [count for other, count in brought.items() if other != who]
        # The lower one of two in the middle: of three actors, one that is fast must not make the others slow.
        if others and (usual := median_low(others)) >= FEW_ROLLOUTS and own < SLOW_SHARE * usual:
            found[who] = own / usual
    return found
