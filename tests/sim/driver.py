"""The simulated learner and supervisor: the real ledger, rate limiter, replay and supervisor, driven by hand.

It is written once more for the simulation, in as few lines as show how the parts are meant to be used.
"""

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from qfleet.data import Rollout, Spec
from qfleet.distributed.worker.ledger import Ledger, Verdict
from qfleet.distributed.worker.supervisor import Supervisor, WorkerFault
from qfleet.learn.rate_limiter import RateLimiter
from qfleet.replay import Replay
from qfleet.replay.cuts import NStepReturn, StepCut
from qfleet.replay.samplers import Uniform
from tests.sim.actors import Reply, SimActor
from tests.sim.parts import GAMMA, Ring, Row, require

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

TURN_SECONDS = 0.1
POLL_SECONDS = 0.5
UPDATES_PER_TURN = 4
START_SECONDS = 5.0
REPLACE_SECONDS = 5.0
WINDOW_SECONDS = 600.0
LIFE = 1000  # incarnations of one driver: those of the next driver are all newer


@dataclass
class Parts:
    """The classes that a bug can be planted in."""

    ledger: type[Ledger] = Ledger
    limiter: type[RateLimiter] = RateLimiter
    replay: type[Replay] = Replay
    supervisor: type[Supervisor] = Supervisor


@dataclass
class Memory:
    """What a checkpoint holds."""

    ledger: Ledger
    limiter: RateLimiter
    replay: Replay
    steps: int = 0
    updates: int = 0
    rows: set[Row] = field(default_factory=set)  # inserted steps
    newest: dict[int, Row] = field(default_factory=dict)  # of every lane


class Driver:
    """One process: it learns and supervises the actors."""

    def __init__(self, sim: "Simulation", parts: Parts, life: int, memory: Memory | None) -> None:
        self.sim, self.parts, self.settings = sim, parts, sim.settings
        settings = self.settings
        self.memory = copy.deepcopy(memory) if memory else self.blank()
        if memory:
            self.memory.ledger = parts.ledger(settings.workers)
            self.memory.ledger.load_state_dict(memory.ledger.state_dict())
        self.supervisor = parts.supervisor(
            settings.workers,
            hung_seconds=settings.hung_seconds,
            restarts=settings.restarts,
            rng=np.random.default_rng(sim.seed),
            start_seconds=START_SECONDS,
            incarnations=[life * LIFE - 1] * settings.workers,
        )
        self.actors: dict[int, SimActor] = {}
        self.retired: list[Ring] = []
        self.polled_at = float("-inf")
        self.committed_at = sim.now
        self.version = 0
        self.done = False
        self.open(again=memory is not None)

    def blank(self) -> Memory:
        """Before the first step."""
        settings, spec = self.settings, Spec((4,), "float32", (3,))
        rng, cut, n_step = np.random.default_rng(self.sim.seed), StepCut(settings.n), NStepReturn(settings.n, GAMMA)
        lanes = settings.workers * settings.lanes
        replay = self.parts.replay(spec, lanes, settings.capacity, Uniform(), rng, cut=cut, n_step=n_step)
        limiter = self.parts.limiter(settings.ratio, settings.start_steps)
        return Memory(self.parts.ledger(settings.workers), limiter, replay)

    # Notes

    def note(self, op: str, **fields: Any) -> None:
        """Record an operation of the learner."""
        self.sim.notes.note("learner", op, **fields)

    def record_bounds(self, op: str, **fields: Any) -> None:
        """Record an operation with the range of items that can be drawn after it."""
        self.note(op, **fields, tail=self.memory.replay.tail, head=self.memory.replay.head)

    def counters(self) -> dict[str, int]:
        """Steps and updates so far."""
        return {"env_steps": self.memory.steps, "updates": self.memory.updates}

    def open(self, *, again: bool) -> None:
        """Record the start of both histories; after a restart all lanes are sealed."""
        settings = self.settings
        limiter = {"ratio": str(settings.ratio), "start_steps": settings.start_steps, "band": settings.band, "ahead": 0}
        self.record_bounds("opened", **limiter, capacity=settings.capacity, **self.counters())
        late = 25.0 if settings.stall else 0.0  # the simulation itself is stricter: it knows when the driver slept
        limits = {
            "restarts": settings.restarts,
            "window_seconds": WINDOW_SECONDS,
            "hung_seconds": settings.hung_seconds + late,
        }
        limits |= {"start_seconds": START_SECONDS, "replace_seconds": REPLACE_SECONDS + late}
        self.sim.notes.note("supervisor", "supervising", **limits)
        for worker in range(settings.workers) if again else ():
            self.seal(worker)
        self.publish()

    def publish(self) -> None:
        """Publish new weights."""
        version = self.memory.updates + 1
        if "published twice" in self.sim.bugs and self.sim.rng.random() < 0.2:
            version = max(1, version - 2)
        self.note("published", version=version)
        require(version > self.version, f"I6 published {version} after {self.version}")
        self.version = version

    # Supervision

    def poll(self) -> None:
        """Remove failed workers, and start those that are due."""
        now = self.sim.now
        if now - self.polled_at < POLL_SECONDS:
            return
        self.polled_at = now
        for worker, actor in list(self.actors.items()):
            fault = self.supervisor.check(worker, now, alive=actor.alive, progress=actor.progress)
            if fault is not None:
                self.remove_lost(fault)
        for worker in self.supervisor.due(now):
            self.start(worker)

    def remove_lost(self, fault: WorkerFault) -> None:
        """Stop an actor, insert the rollouts it had sent, and seal its lanes."""
        worker, actor = fault.worker, self.actors.pop(fault.worker)
        self.sim.check_noticed(fault, actor)
        if not (self.settings.wire and self.sim.rng.random() < 0.5):  # a kill may be lost on a network
            actor.alive = False
        while not self.settings.wire and (rollout := actor.ring.get()) is not None:
            self.admit(rollout, rescued=True)
        self.retired.append(actor.ring)
        self.note("dismissed", worker=worker)
        self.seal(worker)
        self.sim.notes.note("supervisor", fault.kind, worker=worker, incarnation=fault.incarnation)
        if fault.delay_seconds is None:
            self.sim.notes.note("supervisor", "quarantined", worker=worker)

    def start(self, worker: int) -> None:
        """Start the next incarnation of a worker."""
        incarnation = self.supervisor.started(worker, self.sim.now)
        self.memory.ledger.begin(worker, incarnation)
        self.note("began", worker=worker, incarnation=incarnation)
        self.sim.notes.note("supervisor", "started", worker=worker, incarnation=incarnation)
        self.actors[worker] = self.sim.launch(worker, incarnation)

    def lanes(self, worker: int) -> slice:
        """The lanes of a worker."""
        return slice(worker * self.settings.lanes, (worker + 1) * self.settings.lanes)

    def seal(self, worker: int) -> None:
        """Seal a worker's lanes, so that no item spans the gap."""
        if "no seal" in self.sim.bugs:
            return
        self.sim.record_seal(worker, self.memory)
        if "seal only noted" not in self.sim.bugs:
            self.memory.replay.seal(self.lanes(worker))
        self.record_bounds("sealed", worker=worker)

    # Rollouts

    def is_behind(self) -> bool:
        """Is the learner too far behind to accept more rollouts?"""
        limiter, anything = self.memory.limiter, len(self.memory.replay) > 0  # while nothing is ready, more is needed
        updates_due = limiter.allowed_updates(self.memory.steps) - limiter.updates
        return anything and updates_due >= self.settings.band and "no band" not in self.sim.bugs

    def receive(self) -> None:
        """Take in what has come while the learner keeps up."""
        inbox, self.sim.inbox = self.sim.inbox, []
        for sender, rollout in inbox:
            self.reply(sender, rollout)
        rings = [actor.ring for actor in self.actors.values()]
        # A mad reader: what old incarnations write after their end must be refused, too.
        rings += self.retired
        self.sim.rng.shuffle(rings)
        for ring in rings:
            if not self.is_behind() and (waiting := ring.get()) is not None:
                self.admit(waiting)

    def reply(self, sender: SimActor, rollout: Rollout) -> None:
        """On a wire the verdict goes back, or is lost."""
        verdict = None if self.is_behind() else self.admit(rollout)
        current = self.has_open_channel(rollout) and self.memory.ledger.is_current(*rollout.source[:2])
        reply = Reply(verdict, current)
        self.sim.wire.send(lambda: sender.receive_reply(rollout, reply))

    def admit(self, rollout: Rollout, *, rescued: bool = False) -> Verdict:
        """Once, in order, of the newest incarnation."""
        steps = int((~rollout.last).sum())
        is_read = rescued or self.has_open_channel(rollout)
        verdict = self.memory.ledger.admit(rollout.source, steps) if is_read else "refuse"
        if verdict == "accept":
            kept_up = rescued or self.keeps_up()
            self.sim.check_inserted(rollout, self.memory)
            self.memory.steps += steps
            self.memory.replay.add(rollout, lanes=self.lanes(rollout.source[0]))
            told = {"steps": steps, "env_steps": self.memory.steps, "rescued": rescued}
            self.record_bounds("accepted", source=rollout.source, **told)
            require(kept_up, "I7 too many updates were owed")
        else:
            self.note("duplicate" if verdict == "duplicate" else "refused", source=rollout.source)
        return verdict

    def has_open_channel(self, rollout: Rollout) -> bool:
        """Does its worker run? The channel of a lost worker is closed, whatever still arrives."""
        return rollout.source[0] in self.actors or "open channels" in self.sim.bugs

    def keeps_up(self) -> bool:
        """Is what is owed within the band, by a count that is not the gate's (I7)?"""
        settings, memory = self.settings, self.memory
        updates_due = int(settings.ratio * max(0, memory.steps - settings.start_steps)) - memory.updates
        return not len(memory.replay) or updates_due < settings.band

    # Learning

    def learn(self) -> int:
        """Some updates, while the gate is open; returns how many."""
        limiter, replay = self.memory.limiter, self.memory.replay
        made = 0
        while made < UPDATES_PER_TURN and limiter.can_update(self.memory.steps):
            batch = replay.sample(4)
            if batch is None:
                break  # nothing has a whole window yet
            self.note("sampled", ids=batch.ids.tolist())
            self.sim.check_sampled(batch)
            limiter.count_update()
            made += 1
            self.memory.updates += 1
            self.note("update", number=self.memory.updates, env_steps=self.memory.steps, forgiven=0)
            self.publish()
        return made

    def commit(self) -> None:
        """A checkpoint."""
        self.committed_at = self.sim.now
        self.sim.checkpoint = copy.deepcopy(self.memory)
        self.note("committed", **self.counters())

    def turn(self) -> float:
        """Everything once; returns how long it took."""
        self.poll()
        if self.memory.steps < self.settings.target_steps:
            self.receive()
        made = self.learn()
        if self.sim.now - self.committed_at > 5.0:
            self.commit()
        gone = len(self.supervisor.quarantined) == self.settings.workers
        whole = self.memory.steps >= self.settings.target_steps and not self.memory.limiter.can_update(
            self.memory.steps
        )
        if gone or whole:
            self.done = True
            self.note("closed", **self.counters(), forgiven=0, done=whole)
        return max(TURN_SECONDS, made * self.settings.update_seconds)
