"""One seed: a scheduler with a clock of its own, faults, and the ground truth that promises are compared with.

Promises: I3 (once), I4 (nothing invented), I6 (versions rise), I7 (ratio), I8 (goes on), I9 (noticed and replaced).
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from qfleet.audit.checks import check_records
from qfleet.audit.history import Record
from qfleet.data import Batch, Rollout, Sequences
from qfleet.distributed.worker.supervisor import WorkerFault
from tests.sim.actors import SimActor
from tests.sim.driver import LIFE, REPLACE_SECONDS, START_SECONDS, TURN_SECONDS, WINDOW_SECONDS, Driver, Memory, Parts
from tests.sim.parts import Broken, Ring, Settings, Truth, Wire, require

LIMIT_SECONDS = 3000.0
SEEN_SECONDS = 2.0


@dataclass
class Notes:
    """A history in memory."""

    sim: "Simulation"
    records: list[Record] = field(default_factory=list)

    def note(self, role: str, op: str, **fields: Any) -> None:
        """Keep a record."""
        self.records.append({"role": role, "op": op, "at": self.sim.now, **fields})

    def close(self) -> None:
        """Nothing to close."""


@dataclass
class Failing:
    """Since when an actor is dead or asleep, and how long the driver had slept by then."""

    kind: str
    at: float
    slept: float
    limit: float
    until: float  # when it wakes


class Simulation:
    """Runs one seed to its end."""

    def __init__(
        self,
        seed: int,
        parts: Parts | None = None,
        bugs: frozenset[str] = frozenset(),
        *,
        make: Callable[..., Any] = Driver,
        wire: bool = True,
    ) -> None:
        self.seed, self.rng, self.bugs, self.make = seed, random.Random(seed), bugs, make
        settings = Settings.draw(self.rng)
        self.settings = replace(settings, wire=settings.wire and wire)
        self.parts = parts or Parts()
        self.now = self.stalled = self.asleep_until = 0.0
        self.longest_stall = 4.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.notes, self.truth = Notes(self), Truth()
        self.wire = Wire(self.settings, self.rng, self.later)
        self.inbox: list[tuple[SimActor, Rollout]] = []
        self.all_actors: list[SimActor] = []
        self.failing: dict[SimActor, Failing] = {}
        self.lost_at: dict[int, tuple[float, float]] = {}
        self.starts: dict[tuple[int, int], list[float]] = {}
        self.checkpoint: Any = None
        self.life = 0
        self.driver: Driver = make(self, self.parts, 0, None)

    # The scheduler

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Schedule a call."""
        self.count += 1
        heapq.heappush(self.events, (self.now + seconds, self.count, what))

    def run(self) -> list[Record]:
        """Until the run is over; returns its history."""
        self.later(0.0, self.turn)
        self.later(1.0, self.inject_faults)
        while not self.driver.done:
            self.now, _, what = heapq.heappop(self.events)
            require(self.now < LIMIT_SECONDS, "I8 the run does not end")
            what()
        self.check_end()
        return self.notes.records

    def turn(self) -> None:
        """One turn of the driver; schedules the next."""
        seconds = self.driver.turn()
        self.later(seconds, self.turn)
        self.sleep(seconds - TURN_SECONDS)  # updates delay a turn as well, and with it the supervision

    def inject_faults(self) -> None:
        """Once a second, inject random faults."""
        settings, rng = self.settings, self.rng
        for actor in [actor for actor in self.all_actors if actor.alive]:
            if rng.random() < settings.crash:
                self.crash(actor)
            elif rng.random() < settings.pause:
                self.pause(actor, rng.choice([1.0, 5.0, 20.0, 60.0]) * rng.random())
        if rng.random() < settings.stall:
            self.stall(self.longest_stall * rng.random())
        if rng.random() < settings.restart:
            self.restart()
        self.all_actors = [actor for actor in self.all_actors if actor.alive]
        self.later(1.0, self.inject_faults)

    def crash(self, actor: SimActor) -> None:
        """Kill an actor, perhaps in the middle of a put."""
        actor.alive = False
        self.fail(actor, "dead", SEEN_SECONDS)

    def pause(self, actor: SimActor, seconds: float) -> None:
        """Pause an actor; it wakes without noticing."""
        actor.wakes_at = max(actor.wakes_at, self.now + seconds)
        start = START_SECONDS if actor.progress == 0 else 0.0
        self.fail(actor, "hung", max(self.settings.hung_seconds, start) + SEEN_SECONDS)

    def fail(self, actor: SimActor, kind: str, limit: float) -> None:
        """Expect the driver to notice this failure, if it supervises the actor."""
        if self.driver.actors.get(actor.worker) is actor and self.kind_of(actor) != "dead":
            known = self.failing.get(actor)
            if kind == "hung" and known is not None and self.now < known.until:
                known.until = actor.wakes_at  # it was asleep already
            else:
                self.failing[actor] = Failing(kind, self.now, self.slept(), limit, actor.wakes_at)

    def kind_of(self, actor: SimActor) -> str | None:
        """How the actor fails."""
        return self.failing[actor].kind if actor in self.failing else None

    def stall(self, seconds: float) -> None:
        """The driver does nothing for a while."""
        self.sleep(seconds)
        self.events = [(at + seconds if what == self.turn else at, n, what) for at, n, what in self.events]
        heapq.heapify(self.events)

    def sleep(self, seconds: float) -> None:
        """Let the driver sleep, from now on or after its current sleep."""
        self.stalled += seconds
        self.asleep_until = max(self.asleep_until, self.now) + seconds

    def slept(self) -> float:
        """How long the driver has slept up to now."""
        return self.stalled - max(0.0, self.asleep_until - self.now)

    def restart(self) -> None:
        """The driver dies and goes on from its checkpoint; on a network its actors may outlive it."""
        for actor in self.all_actors:
            actor.alive = actor.alive and self.settings.wire and self.rng.random() < 0.5
        self.inbox = self.inbox if self.settings.wire else []
        self.failing, self.lost_at = {}, {}
        self.life += 1
        self.driver = self.make(self, self.parts, self.life, self.checkpoint)

    # Called by the driver

    def launch(self, worker: int, incarnation: int) -> SimActor:
        """Launch an actor; some are slow."""
        seconds = self.rng.choice([0.2, 0.5, 0.5, 1.5])
        if worker in self.lost_at:
            at, slept = self.lost_at.pop(worker)
            late = self.now - at - (self.slept() - slept) > REPLACE_SECONDS
            require(not late, f"I9 worker {worker} was replaced after {self.now - at:.1f} s")
        starts = self.starts.setdefault((self.life, worker), [])
        starts.append(self.now)
        recent = sum(self.now - at < WINDOW_SECONDS for at in starts)
        require(recent <= self.settings.restarts + 1, f"I8 worker {worker} was started {recent} times")
        actor = SimActor(self, worker, incarnation, Ring(self.settings.slots), seconds)
        self.all_actors.append(actor)
        return actor

    def board_version(self, actor: SimActor) -> int:
        """The newest weights there are; an actor that outlived its driver sees no others."""
        if self.settings.wire and actor.incarnation // LIFE != self.life:
            return actor.version
        old = "old version" in self.bugs and self.rng.random() < 0.3
        return max(1, self.driver.version - 1) if old else self.driver.version

    def check_noticed(self, fault: WorkerFault, actor: SimActor) -> None:
        """Check that a reported fault is real and was noticed in time."""
        failing = self.failing.pop(actor, None)
        fails = failing is not None and (failing.kind == "dead" or self.now < failing.until)
        require(fails, f"I9 worker {fault.worker} was called {fault.kind} but is well")
        self.require_noticed_in_time(actor, failing)
        if fault.delay_seconds is not None:
            self.lost_at[fault.worker] = (self.now, self.slept())

    def require_noticed_in_time(self, actor: SimActor, failing: Failing | None) -> None:
        """Check that a failure was not unnoticed for too long."""
        if failing is not None:
            seconds = self.now - failing.at - (self.slept() - failing.slept)
            require(seconds <= failing.limit, f"I9 worker {actor.worker} was {failing.kind} for {seconds:.1f} s")

    def check_inserted(self, rollout: Rollout, memory: Memory) -> None:
        """Check that every step is inserted once (I3)."""
        for obs, last in zip(rollout.obs, rollout.last, strict=True):
            for row, final in zip(obs.astype(int).tolist(), last.tolist(), strict=True):
                memory.newest[row[0]] = tuple(row)
                if not final:
                    require(tuple(row) not in memory.rows, f"I3 {row} came in twice")
                    memory.rows.add(tuple(row))

    def record_seal(self, worker: int, memory: Memory) -> None:
        """Record that the newest row of each of the worker's lanes is final."""
        lanes = self.settings.lanes
        own = range(worker * lanes, (worker + 1) * lanes)
        self.truth.finals.update(memory.newest[lane] for lane in own if lane in memory.newest)

    def check_sampled(self, batch: Batch | Sequences) -> None:
        """Check that a batch holds real transitions only (I4)."""
        wrong = self.truth.check(batch, self.settings.n) if isinstance(batch, Batch) else "is no batch"
        require(not wrong, f"I4 {wrong}")

    def check_end(self) -> None:
        """Check that counts are exact (I3, I7) and no failure is unnoticed (I9)."""
        memory, settings = self.driver.memory, self.settings
        require(memory.steps == len(memory.rows) == sum(memory.ledger.steps), "I3 env_steps is not what came in")
        for actor, failing in self.failing.items():
            if failing.kind == "dead" or self.now < failing.until:
                self.require_noticed_in_time(actor, failing)
        if len(self.driver.supervisor.quarantined) < settings.workers:
            updates_due = int(settings.ratio * max(0, memory.steps - settings.start_steps))
            require(memory.updates == updates_due, f"I7 {memory.updates} updates instead of {updates_due}")


def failures(
    seed: int, parts: Parts | None = None, bugs: frozenset[str] = frozenset(), **options: Any
) -> tuple[str | None, list[str]]:
    """The promise that the simulation found broken, and the violations that the audit found."""
    sim = Simulation(seed, parts, bugs, **options)
    broken = None
    try:
        sim.run()
    except Broken as promise:
        broken = str(promise)
    return broken, [f"{violation.rule}: {violation.text}" for violation in check_records(sim.notes.records)]
