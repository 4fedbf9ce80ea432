"""The fleet: many actors that live elsewhere, to the rest of a run as one that acts.

It takes each rollout in once and in order (the ledger), replaces actors that die or hang (the supervisor) and seals
their lanes, so that nothing that is learned spans the gap. One that is slow is named and not waited for. Where actors
live and what carries their rollouts is the site's business.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from qfleet.act import Explore, Explorer, Policy, PopulationPolicy, make_explorer
from qfleet.audit.history import History, HistoryLog, NoHistory
from qfleet.build.components import LearnerSide, stream
from qfleet.data import Array, Rollout, Spec, State, count_steps
from qfleet.data.array_messages import COLUMNS, present
from qfleet.data.state_reader import saved_value
from qfleet.distributed.worker.ledger import Ledger
from qfleet.distributed.worker.supervisor import StragglerWatch, Supervisor, WorkerFault
from qfleet.errors import EnvError
from qfleet.plan.schema import InlineRuntime, Plan
from qfleet.plan.validate.placement import num_senders
from qfleet.training.log.timing import ACTOR_TIMES

TEND_SECONDS = 0.05
SUPERVISE = 108  # the purpose of random numbers that spread restarts
LARGEST_DELAY_SECONDS = 2.0  # an actor is back within five seconds of its loss

# What actors count of themselves, over all incarnations.
FREIGHT = ("raw_bytes", "sent_bytes", "pack_ns")  # of rollouts that travel compressed
COUNTS = (*ACTOR_TIMES, *FREIGHT)
IN_FLIGHT = ("obs", "state")  # the columns worth compressing


class ActorHandle(Protocol):
    """One incarnation of an actor, wherever it lives."""

    def alive(self) -> bool:
        """Is it there?"""
        ...

    def progress(self) -> int:
        """Its own count of things done; turns spent waiting for room count too."""
        ...

    def get(self) -> Rollout | None:
        """The oldest rollout waiting, if any; also after its end."""
        ...

    def troubles(self) -> list[dict[str, Any]]:
        """What went wrong in its environments since this was last asked."""
        ...

    def ask(self) -> None:
        """Ask it to end, without waiting."""
        ...

    def end(self) -> None:
        """End it, by force if need be."""
        ...

    def last_words(self) -> str:
        """Why it ended, as far as it could say; an error that no other try can mend is raised."""
        ...

    def close(self) -> None:
        """Free what it held."""
        ...


class ActorLauncher(Protocol):
    """Where actors live, and what carries their data."""

    folder: Path | None  # the run's, for their logs

    def hire(self, worker: int, incarnation: int) -> ActorHandle:
        """Start one."""
        ...

    def publish(self, version: int, weights: Any, steps: int) -> None:
        """Show the newest weights and how many steps came in so far."""
        ...

    def tell(self, steps: int) -> None:
        """Show how many steps came in so far."""
        ...

    def counts(self) -> dict[str, int]:
        """Of all actors so far: nanoseconds by stage (ACTOR_TIMES; `wait` is for room), and their FREIGHT."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class ActorPool:
    """Workers 0, 1, ... with an equal share of the lanes each."""

    is_remote = True

    def __init__(
        self,
        learning: LearnerSide,
        explorer: Explorer,
        site: ActorLauncher,
        supervisor: Supervisor,
        *,
        workers: int,
        lanes: int,
        until_steps: int = 2**62,
        clock: Callable[[], float] = time.monotonic,
        keeps_history: bool = False,
    ) -> None:
        self.policy: Policy | PopulationPolicy = learning.policy
        self.batch_source = learning.batch_source
        self.explorer = explorer
        self.site = site
        self.supervisor = supervisor
        self.workers = workers
        self.lanes = lanes
        self.clock = clock
        self.until_steps = until_steps
        self.history: HistoryLog = NoHistory()
        self.keeps_history = keeps_history
        self.opened = False
        self.tell: Callable[..., object] = lambda kind, **fields: None  # a diary's events, when there is one
        self.ledger = Ledger(workers)
        self.pace = StragglerWatch()
        self.hands: dict[int, ActorHandle] = {}
        self.next = 0  # whose turn it is to be asked first
        self.version = self.ahead = 0  # versions shown only rise, also after a run went back to a checkpoint
        self.tended_at = float("-inf")
        self.rescued: list[tuple[float, int]] = []  # episodes in rollouts of actors that have failed
        self.lost_at: dict[int, float] = {}  # when somebody who is not back yet was lost
        self.troubles: list[dict[str, Any]] = []  # of environments, to be told with the next tick
        self.last_words = ""

    def counts(self) -> dict[str, int]:
        """Nanoseconds by stage and bytes sent, of all actors so far."""
        return self.site.counts()

    def num_working(self) -> int:
        """Actors that are at work."""
        return self.supervisor.working

    def num_given_up(self) -> int:
        """Actors that failed too often and are not started again."""
        return len(self.supervisor.quarantined)

    # Who acts

    def settle(self, folder: Path, tell: Callable[..., object]) -> None:
        """The run has a folder now, for logs, and somebody who writes down what happens."""
        self.site.folder = folder
        self.tell = tell
        if self.keeps_history:
            self.history = History(folder / "history" / "learner.jsonl")

    def open(self) -> None:
        """A history begins, or begins again from a checkpoint."""
        limiter = getattr(self.batch_source, "gate", None)
        self.note_bounds(
            "opened",
            ratio=None if limiter is None else str(limiter.ratio),
            start_steps=0 if limiter is None else limiter.start_steps,
            band=None,
            ahead=0,
            capacity=self.batch_source.replay.capacity,
            env_steps=self.batch_source.steps,
            updates=0 if limiter is None else limiter.updates,
        )
        self.history.note("supervisor", "supervising", **self.supervisor.terms())
        self.opened = True

    def start(self) -> None:
        """Hire everyone who is due."""
        if not self.opened:
            self.open()
        for worker in self.supervisor.due(now := self.clock()):
            self.hire(worker, now)

    def hire(self, worker: int, now: float) -> None:
        """Start the next incarnation of a worker."""
        incarnation = self.supervisor.started(worker, now)
        self.ledger.begin(worker, incarnation)
        self.history.note("learner", "began", worker=worker, incarnation=incarnation)
        self.history.note("supervisor", "started", worker=worker, incarnation=incarnation)
        self.hands[worker] = self.site.hire(worker, incarnation)

    def tend(self) -> None:
        """Look after everyone, now and then: replace those who failed."""
        now = self.clock()
        if now - self.tended_at < TEND_SECONDS:
            return
        self.tended_at = now
        for worker, hand in list(self.hands.items()):
            self.troubles.extend({"actor": worker, **trouble} for trouble in hand.troubles())
            fault = self.supervisor.see(worker, now, alive=hand.alive(), progress=hand.progress())
            if fault is not None:
                self.lose(fault, silence(fault))
        self.name_slow(now)
        self.start()
        if len(self.supervisor.quarantined) == self.workers:
            raise EnvError(
                f"all {self.workers} actors have failed more often than runtime.restarts allows",
                f"The last one said: {self.last_words}",
                "See logs/actor-*.log in the run's folder.",
            )

    def name_slow(self, now: float) -> None:
        """Tell of actors that bring in far less than the others; under back-pressure all are heard in turn: equal."""
        sequences = self.ledger.sequences
        incarnations = self.ledger.incarnations
        # All rollouts are equally long. The ledger counts those of this incarnation; none yet: it is starting.
        brought = {(worker, incarnations[worker]): sequences[worker] for worker in self.hands if sequences[worker]}
        for (worker, incarnation), share in self.pace.see(now, brought).items():
            self.tell("actor_slow", worker=worker, incarnation=incarnation, share=round(share, 3))

    def lose(self, fault: WorkerFault, seen: str = "") -> None:
        """An actor is gone: take in what it had handed over, and let nothing span the gap. `seen` is why, if known."""
        worker = fault.worker
        hand = self.hands.pop(fault.worker)
        hand.end()
        before = self.batch_source.steps
        with suppress(ValueError):  # what makes no sense, and all behind it, is lost with the actor
            while (rollout := self.accepted(hand.get())) is not None:
                self.take_in(rollout)
                self.rescued.extend(rollout.finished)
        self.lost_at[worker] = self.clock()
        self.batch_source.seal(worker)
        self.note_bounds("sealed", worker=worker)
        self.last_words = seen or hand.last_words()  # that it was ended here is not why
        hand.close()
        self.history.note("supervisor", fault.kind, worker=worker, incarnation=fault.incarnation)
        if fault.delay_seconds is None:
            self.history.note("supervisor", "quarantined", worker=worker)
        self.tell(
            "actor_lost",
            worker=worker,
            incarnation=fault.incarnation,
            cause=fault.kind,
            words=self.last_words,
            steps_rescued=self.batch_source.steps - before,
            restart_seconds=fault.delay_seconds,
        )

    def publish(self, version: int, weights: Any) -> None:
        """Show everyone the newest weights and how far the run has come."""
        if version + self.ahead <= self.version:
            self.ahead = self.version + 1 - version
        self.version = version + self.ahead
        self.history.note("learner", "published", version=self.version)
        self.site.publish(self.version, weights, self.batch_source.steps)

    # Rollouts

    def collect(self) -> Rollout | None:
        """The next rollout that is new, everyone in turn."""
        order = sorted(self.hands, key=lambda worker: (worker - self.next) % self.workers)
        for worker in order:
            try:
                rollout = self.accepted(self.hands[worker].get())
            except ValueError as nonsense:
                seen = f"it handed over what makes no sense: {nonsense}"
                self.lose(self.supervisor.fail(worker, self.clock(), "senseless"), seen)
                continue
            if rollout is not None:
                self.next = (worker + 1) % self.workers
                return rollout
        return None

    def accepted(self, rollout: Rollout | None) -> Rollout | None:
        """The rollout, if the ledger has not seen it yet: as many rows as the run still has use for."""
        if rollout is None or self.batch_source.steps >= self.until_steps:
            return None
        kept = cut_to(rollout, self.until_steps - self.batch_source.steps)
        verdict = self.ledger.judge(rollout.source, count_steps(kept))
        if verdict == "accept":
            self.welcome(rollout.source)
            return kept
        self.history.note("learner", "duplicate" if verdict == "duplicate" else "refused", source=rollout.source)
        return None

    def welcome(self, source: tuple[int, int, int]) -> None:
        """Somebody who was replaced is heard again."""
        worker, incarnation, _ = source
        if (since := self.lost_at.pop(worker, None)) is not None:
            seconds = round(self.clock() - since, 3)
            self.tell("actor_back", worker=worker, incarnation=incarnation, seconds=seconds)

    def take_in(self, rollout: Rollout) -> None:
        """Give it to the feed."""
        self.batch_source.insert(rollout)
        self.site.tell(self.batch_source.steps)
        self.note_bounds(
            "accepted", source=rollout.source, steps=count_steps(rollout), env_steps=self.batch_source.steps
        )

    def note_bounds(self, op: str, **fields: Any) -> None:
        """An operation with the serial numbers that can be drawn after it."""
        if self.keeps_history:
            replay = self.batch_source.replay
            self.history.note("learner", op, **fields, tail=replay.tail, head=replay.head)

    def news(self) -> State:
        """Episodes found in the rollouts of failed actors, and troubles of environments, once."""
        news = {"episodes": self.rescued, "faults": self.troubles}
        self.rescued = []
        self.troubles = []
        return news

    # At rest

    def state_dict(self) -> State:
        """Who was heard; what actors were doing is not kept."""
        return {"ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: State) -> Array:
        """Come back. Everyone begins anew, as a later incarnation than any before; so every lane is lost."""
        self.dismiss()
        self.rescued = []
        self.troubles = []
        self.lost_at = {}
        used = [max(pair) for pair in zip(self.ledger.incarnations, self.restored(state), strict=True)]
        self.supervisor.begin_anew(used)
        self.open()
        for worker in range(self.workers):
            self.batch_source.seal(worker)
            self.note_bounds("sealed", worker=worker)
        return np.ones(self.lanes, np.bool_)

    def restored(self, state: State) -> list[int]:
        """Take the ledger back; answers the incarnations it knows."""
        self.ledger.load_state_dict(saved_value(state, "ledger"))
        return self.ledger.incarnations

    def dismiss(self) -> None:
        """End everyone, side by side."""
        for hand in self.hands.values():
            hand.ask()
        for hand in self.hands.values():
            hand.end()
        for hand in self.hands.values():
            hand.close()
        self.hands.clear()

    def close(self) -> None:
        """End everyone and free everything."""
        self.dismiss()
        self.site.close()
        self.history.close()


def silence(fault: WorkerFault) -> str:
    """What to say of somebody who hung; the dead speak for themselves."""
    return f"it did not move for {fault.silent_seconds:.0f} s (runtime.hung_seconds)" if fault.kind == "hung" else ""


def make_actor_pool(
    plan: Plan,
    spec: Spec,
    learning: LearnerSide,
    site: ActorLauncher,
    explore: Explore | None,
    *,
    start_seconds: float = 60.0,
) -> ActorPool:
    """The fleet the plan describes at this site; `spec` is the world's own. An actor may take so long to start."""
    runtime = plan.runtime
    workers = num_senders(plan)
    if isinstance(runtime, InlineRuntime):
        raise TypeError("an inline run has no fleet")

    supervisor = Supervisor(
        workers,
        hung_seconds=runtime.hung_seconds,
        restarts=runtime.restarts,
        largest_delay=LARGEST_DELAY_SECONDS,
        start_seconds=start_seconds,
        rng=stream(plan.seed, SUPERVISE),
    )
    return ActorPool(
        learning,
        make_explorer(plan.algo, spec.actions, plan.env.num, explore),
        site,
        supervisor,
        workers=workers,
        lanes=plan.env.num,
        until_steps=plan.until.steps,
        keeps_history=plan.log.history,
    )


def cut_to(rollout: Rollout, room: int) -> Rollout:
    """The first rows that make at least `room` steps, so that a run ends as soon as it may."""
    if count_steps(rollout) <= room:
        return rollout
    made = np.cumsum((~rollout.last).sum(1))
    rows = int(np.searchsorted(made, room)) + 1
    kept: dict[str, Any] = {name: array[:rows] for name, array in present(rollout, COLUMNS).items()}
    told = [(episode, row) for episode, row in zip(rollout.finished, rollout.ends, strict=True) if row < rows]
    return replace(rollout, **kept, finished=tuple(pair[0] for pair in told), ends=tuple(pair[1] for pair in told))
