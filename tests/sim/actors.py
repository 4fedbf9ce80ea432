"""Simulated actors: they act, send, wait, crash and sleep. Those on a network send again until a reply comes."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qfleet.data import Rollout
from qfleet.distributed.worker.ledger import Verdict
from tests.sim.parts import Lane, Ring, produce, require

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

RETRY_SECONDS = 0.5


@dataclass
class Reply:
    """The learner's reply to a rollout; without a verdict it is not accepted yet."""

    verdict: Verdict | None
    current: bool  # is its incarnation the one that is accepted?


@dataclass(eq=False)
class SimActor:
    """One incarnation of a worker."""

    sim: "Simulation"
    worker: int
    incarnation: int
    ring: Ring
    turn_seconds: float
    alive: bool = True
    wakes_at: float = 0.0
    progress: int = 0
    sequence: int = 0
    version: int = 0
    lanes: list[Lane] = field(default_factory=list)
    pending: Rollout | None = None
    unanswered: dict[int, tuple[Rollout, float]] = field(default_factory=dict)  # sequence: what, and when to send again
    ticked_at: float = -1.0

    def __post_init__(self) -> None:
        first = self.worker * self.sim.settings.lanes
        self.lanes = [Lane(first + i, self.incarnation) for i in range(self.sim.settings.lanes)]
        self.sim.later(self.sim.rng.uniform(0.1, 1.0), self.run)

    def run(self) -> None:
        """Take one turn and schedule the next; a sleeping actor's turn comes when it wakes."""
        if not self.alive:
            return
        if self.sim.now < self.wakes_at:
            self.sim.later(self.wakes_at - self.sim.now, self.run)
            return
        self.progress += 1
        if self.sim.now - self.ticked_at >= 1.0:
            self.note("ticked", worker=self.worker, incarnation=self.incarnation)
            self.ticked_at = self.sim.now
        self.load()
        if self.sim.settings.wire:
            self.turn_on_wire()
        else:
            self.turn_on_ring()
        self.sim.later(self.turn_seconds, self.run)

    def note(self, op: str, **fields: object) -> None:
        """Record an operation of the actor."""
        self.sim.notes.note("actor", op, **fields)

    def load(self) -> None:
        """Take the newest weights, unless the read was torn."""
        if self.sim.rng.random() < 0.2:
            return
        version = self.sim.board_version(self)
        if version > self.version or (version and "old version" in self.sim.bugs):
            self.note("loaded", worker=self.worker, incarnation=self.incarnation, version=version)
            require(version >= self.version, f"I6 acts with {version} after {self.version}")
            self.version = version

    def act(self) -> Rollout:
        """The next rollout."""
        source = (self.worker, self.incarnation, self.sequence)
        rollout, steps, finals = produce(
            self.lanes, self.sim.settings.rows, source, self.sim.settings.end, self.sim.rng
        )
        self.sim.truth.terminated.update(steps)
        self.sim.truth.finals.update(finals)
        self.sequence += 1
        return rollout

    def note_sent(self, rollout: Rollout) -> None:
        """Record a rollout before it is sent."""
        self.note("sent", source=rollout.source, steps=int((~rollout.last).sum()))

    def turn_on_ring(self) -> None:
        """Act, and put; while there is no room, wait."""
        if self.pending is None:
            self.pending = self.act()
            self.note_sent(self.pending)
        if self.ring.put(self.pending):
            self.pending = None

    def turn_on_wire(self) -> None:
        """Act while few rollouts are unanswered, and send those again whose reply is late."""
        if len(self.unanswered) < self.sim.settings.slots:
            rollout = self.act()
            self.unanswered[rollout.source[2]] = (rollout, 0.0)
        for sequence, (rollout, due) in sorted(self.unanswered.items()):
            if due <= self.sim.now:
                self.send(self.with_new_id(rollout) if due and "new id" in self.sim.bugs else rollout, sequence)

    def with_new_id(self, rollout: Rollout) -> Rollout:
        """The planted bug: an unanswered rollout gets a new sequence number."""
        self.sequence += 1
        again = Rollout(
            rollout.obs, rollout.action, rollout.reward, rollout.discount, rollout.last, rollout.source, rollout.version
        )
        again.source = (self.worker, self.incarnation, self.sequence - 1)
        return again

    def send(self, rollout: Rollout, sequence: int) -> None:
        """Send on the network; the reply may take RETRY_SECONDS."""
        self.unanswered.pop(sequence)
        self.unanswered[rollout.source[2]] = (rollout, self.sim.now + RETRY_SECONDS)
        self.note_sent(rollout)
        self.sim.wire.send(lambda: self.sim.inbox.append((self, rollout)))

    def receive_reply(self, rollout: Rollout, reply: Reply) -> None:
        """Receive a reply, unless the actor is dead or asleep."""
        if not self.alive or self.sim.now < self.wakes_at:
            return  # its socket may overflow
        if reply.verdict in ("accept", "duplicate"):
            self.note("acked", source=rollout.source, verdict=reply.verdict)
            self.unanswered.pop(rollout.source[2], None)
        elif reply.verdict == "refuse" and not reply.current:
            self.alive = False
        elif reply.verdict == "refuse":
            self.unanswered = {number: (known, self.sim.now) for number, (known, _) in self.unanswered.items()}
