"""Simulated actors: they act, send, wait, crash and sleep. Those on a wire send again until they are answered."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qfleet.data import Rollout
from qfleet.distributed.worker.ledger import Verdict
from tests.sim.parts import Lane, Ring, produce, require

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

RETRY_SECONDS = 0.5


@dataclass
class Answer:
    """What the learner says to a rollout; no verdict: not now."""

    verdict: Verdict | None
    current: bool  # is its incarnation the one that is listened to?


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
        """One turn, and the next one after it; a sleeper's turn comes when it wakes."""
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
        """Into its log."""
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
        """Before anybody can see it."""
        self.note("sent", source=rollout.source, steps=int((~rollout.last).sum()))

    def turn_on_ring(self) -> None:
        """Act, and put; while there is no room, wait."""
        if self.pending is None:
            self.pending = self.act()
            self.note_sent(self.pending)
        if self.ring.put(self.pending):
            self.pending = None

    def turn_on_wire(self) -> None:
        """Act while little is unanswered, and send again what was not answered in time."""
        if len(self.unanswered) < self.sim.settings.slots:
            rollout = self.act()
            self.unanswered[rollout.source[2]] = (rollout, 0.0)
        for sequence, (rollout, due) in sorted(self.unanswered.items()):
            if due <= self.sim.now:
                self.send(self.renamed(rollout) if due and "new id" in self.sim.bugs else rollout, sequence)

    def renamed(self, rollout: Rollout) -> Rollout:
        """The planted bug: what was not answered gets a new name."""
        self.sequence += 1
        again = Rollout(
            rollout.obs, rollout.action, rollout.reward, rollout.discount, rollout.last, rollout.source, rollout.version
        )
        again.source = (self.worker, self.incarnation, self.sequence - 1)
        return again

    def send(self, rollout: Rollout, sequence: int) -> None:
        """On the wire; the answer is awaited for a while."""
        self.unanswered.pop(sequence)
        self.unanswered[rollout.source[2]] = (rollout, self.sim.now + RETRY_SECONDS)
        self.note_sent(rollout)
        self.sim.wire.send(lambda: self.sim.inbox.append((self, rollout)))

    def hear(self, rollout: Rollout, answer: Answer) -> None:
        """An answer came, if there is still somebody to hear it."""
        if not self.alive or self.sim.now < self.wakes_at:
            return  # a sleeper's socket may overflow
        if answer.verdict in ("accept", "duplicate"):
            self.note("acked", source=rollout.source, verdict=answer.verdict)
            self.unanswered.pop(rollout.source[2], None)
        elif answer.verdict == "refuse" and not answer.current:
            self.alive = False
        elif answer.verdict == "refuse":
            self.unanswered = {number: (known, self.sim.now) for number, (known, _) in self.unanswered.items()}
