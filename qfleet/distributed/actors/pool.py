"""The actor pool: actors in other processes, used by the training loop like a single actor.

The pool accepts each rollout once and in order (ledger), replaces actors that die or hang (supervisor) and seals their
lanes, so that no n-step return or sequence spans the gap. Slow actors are logged, not waited for. An `ActorLauncher`
decides where actors run and how their rollouts travel.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qfleet.act import Explore, Explorer, Policy, PopulationPolicy, make_explorer
from qfleet.audit.history import History, HistoryLog, NoHistory
from qfleet.build.components import LearnerSide
from qfleet.build.seeds import stream
from qfleet.data import Array, Episode, Rollout, Spec, State, count_steps
from qfleet.data.array_messages import COLUMNS, arrays_of
from qfleet.data.state_reader import saved_value
from qfleet.distributed.actors.handle import ActorHandle
from qfleet.distributed.actors.launcher import ActorLauncher
from qfleet.distributed.worker.ledger import Ledger
from qfleet.distributed.worker.supervisor import INVALID_ROLLOUT, StragglerWatch, Supervisor, WorkerFault
from qfleet.errors import EnvError
from qfleet.plan.schema import InlineRuntime, Plan
from qfleet.plan.validate.placement import num_senders
from qfleet.system.worker_errors import WorkerFailed, WorkerHung, WorkerLost, raise_usage_error

POLL_SECONDS = 0.05
SUPERVISE = 108  # random stream for the jitter of restart delays
WAITING_SECONDS = 30.0  # without a place to run, until it is reported
LARGEST_DELAY_SECONDS = 2.0  # so that a lost actor is back within five seconds


@dataclass(eq=False)
class ActorPool:
    """Workers 0, 1, ..., each with an equal share of the lanes."""

    is_remote = True
    learning: InitVar[LearnerSide]
    explorer: Explorer
    launcher: ActorLauncher
    supervisor: Supervisor
    _: KW_ONLY
    workers: int
    lanes: int
    until_steps: int = 2**62
    clock: Callable[[], float] = time.monotonic
    keeps_history: bool = False

    def __post_init__(self, learning: LearnerSide) -> None:
        self.policy: Policy | PopulationPolicy = learning.policy
        self.batch_source = learning.batch_source
        self.history: HistoryLog = NoHistory()
        self.history_opened = False
        self.log_event: Callable[..., object] = lambda kind, **fields: None
        self.ledger = Ledger(self.workers)
        self.straggler_watch = StragglerWatch()
        self.handles: dict[int, ActorHandle] = {}
        self.next_worker = 0  # polled first for a rollout
        self.version = 0
        self.version_offset = 0  # keeps published versions rising after a rollback to a checkpoint
        self.polled_at = float("-inf")
        self.rescued_episodes: list[Episode] = []  # from rollouts of lost actors
        self.lost_at: dict[int, float] = {}  # of workers that are not back yet
        self.launched_at: dict[int, float] = {}  # of workers whose waiting was not reported
        self.env_faults: list[dict[str, Any]] = []  # for the next tick
        self.last_cause = ""  # of a lost actor

    def counts(self) -> dict[str, int]:
        """Nanoseconds by stage and bytes sent, of all actors so far."""
        return self.launcher.counts()

    def num_working(self) -> int:
        """Number of running actors."""
        return self.supervisor.num_running

    def num_given_up(self) -> int:
        """Number of actors that failed too often and are not started again."""
        return len(self.supervisor.quarantined)

    # Workers

    def use_run_folder(self, folder: Path, log_event: Callable[..., object]) -> None:
        """Keep logs and history in the run directory; `log_event` writes to its events."""
        self.launcher.folder = folder
        self.log_event = log_event
        if self.keeps_history:
            self.history = History(folder / "history" / "learner.jsonl")

    def open_history(self) -> None:
        """Record the start of a history, or its restart from a checkpoint."""
        limiter = getattr(self.batch_source, "limiter", None)
        self.record_bounds(
            "opened",
            ratio=None if limiter is None else str(limiter.ratio),
            start_steps=0 if limiter is None else limiter.start_steps,
            band=None,
            ahead=0,
            capacity=self.batch_source.replay.capacity,
            env_steps=self.batch_source.steps,
            updates=0 if limiter is None else limiter.updates,
        )
        self.history.note("supervisor", "supervising", **self.supervisor.limits())
        self.history_opened = True

    def start(self) -> None:
        """Launch all workers that are due."""
        if not self.history_opened:
            self.open_history()
        for worker in self.supervisor.due(now := self.clock()):
            self.launch(worker, now)

    def launch(self, worker: int, now: float) -> None:
        """Launch the next incarnation of a worker."""
        incarnation = self.supervisor.started(worker, now)
        self.ledger.begin(worker, incarnation)
        self.history.note("learner", "began", worker=worker, incarnation=incarnation)
        self.history.note("supervisor", "started", worker=worker, incarnation=incarnation)
        self.handles[worker] = self.launcher.launch(worker, incarnation)
        self.launched_at[worker] = now

    def poll(self) -> None:
        """Check all workers every POLL_SECONDS and replace those that failed."""
        now = self.clock()
        if now - self.polled_at < POLL_SECONDS:
            return
        self.polled_at = now
        for worker, handle in list(self.handles.items()):
            self.env_faults.extend({"actor": worker, **env_fault} for env_fault in handle.env_faults())
            fault = self.check(worker, handle, now)
            if fault is not None:
                hang = WorkerHung(f"it did not move for {fault.silent_seconds:.0f} s (runtime.hung_seconds)")
                self.remove_lost(fault, handle.control.why_lost() if fault.kind == "dead" else hang)
        self.log_stragglers(now)
        self.start()
        if len(self.supervisor.quarantined) == self.workers:
            raise EnvError(
                f"all {self.workers} actors have failed more often than runtime.restarts allows",
                f"The last error was: {self.last_cause}",
                "See logs/actor-*.log in the run's folder.",
            )

    def check(self, worker: int, handle: ActorHandle, now: float) -> WorkerFault | None:
        """Check one worker; one that waits for a place to run is reported once."""
        pending = handle.control.is_pending()
        if pending and now - self.launched_at.get(worker, now) > WAITING_SECONDS:
            del self.launched_at[worker]
            self.log_event("actor_waiting", worker=worker, seconds=WAITING_SECONDS)
        progress = handle.channel.progress()
        return self.supervisor.check(worker, now, alive=handle.control.is_alive(), progress=progress, pending=pending)

    def log_stragglers(self, now: float) -> None:
        """Log actors that send far fewer rollouts than the others; under back-pressure all send equally many."""
        sequences = self.ledger.sequences
        incarnations = self.ledger.incarnations
        # All rollouts are equally long. An incarnation without a rollout is still starting.
        rollouts = {(worker, incarnations[worker]): sequences[worker] for worker in self.handles if sequences[worker]}
        for (worker, incarnation), share in self.straggler_watch.check(now, rollouts).items():
            self.log_event("actor_slow", worker=worker, incarnation=incarnation, share=round(share, 3))

    def remove_lost(self, fault: WorkerFault, loss: WorkerLost) -> None:
        """Remove a lost actor: insert the rollouts it had sent and seal its lanes. A user's mistake ends the run."""
        worker = fault.worker
        handle = self.handles.pop(worker)
        if fault.kind == "hung":
            handle.kill()  # it would use up its time to end, and the learner with it
        else:
            handle.stop()
        steps_before = self.batch_source.steps
        with suppress(ValueError):  # an invalid rollout and all after it are lost with the actor
            while (rollout := self.accept(handle.channel.get())) is not None:
                self.insert(rollout)
                self.rescued_episodes.extend(rollout.finished)
        self.lost_at[worker] = self.clock()
        self.batch_source.seal(worker)
        self.record_bounds("sealed", worker=worker)
        handle.close()
        if isinstance(loss, WorkerFailed):
            raise_usage_error(loss.report)
        self.last_cause = str(loss)
        self.history.note("supervisor", fault.kind, worker=worker, incarnation=fault.incarnation)
        if fault.delay_seconds is None:
            self.history.note("supervisor", "quarantined", worker=worker)
        self.log_event(
            "actor_lost",
            worker=worker,
            incarnation=fault.incarnation,
            cause=fault.kind,
            words=self.last_cause,
            steps_rescued=self.batch_source.steps - steps_before,
            restart_seconds=fault.delay_seconds,
        )

    def publish(self, version: int, weights: Any) -> None:
        """Publish the newest weights and the step count to all actors."""
        if version + self.version_offset <= self.version:
            self.version_offset = self.version + 1 - version
        self.version = version + self.version_offset
        self.history.note("learner", "published", version=self.version)
        self.launcher.publish(self.version, weights, self.batch_source.steps)

    # Rollouts

    def collect(self) -> Rollout | None:
        """The next new rollout, polling workers in turn."""
        for worker in sorted(self.handles, key=lambda worker: (worker - self.next_worker) % self.workers):
            try:
                rollout = self.accept(self.handles[worker].channel.get())
            except ValueError as error:
                loss = WorkerLost(f"it sent an invalid rollout: {error}")
                self.remove_lost(self.supervisor.record_fault(worker, self.clock(), INVALID_ROLLOUT), loss)
                continue
            if rollout is not None:
                self.next_worker = (worker + 1) % self.workers
                return rollout
        return None

    def accept(self, rollout: Rollout | None) -> Rollout | None:
        """The rollout if the ledger admits it, cut to the steps that the run still needs."""
        if rollout is None or self.batch_source.steps >= self.until_steps:
            return None
        kept = cut_to(rollout, self.until_steps - self.batch_source.steps)
        verdict = self.ledger.admit(rollout.source, count_steps(kept))
        if verdict == "accept":
            self.log_recovery(rollout.source)
            return kept
        self.history.note("learner", "duplicate" if verdict == "duplicate" else "refused", source=rollout.source)
        return None

    def log_recovery(self, source: tuple[int, int, int]) -> None:
        """Log the first rollout of a worker that was replaced."""
        worker, incarnation, _ = source
        if (since := self.lost_at.pop(worker, None)) is not None:
            seconds = round(self.clock() - since, 3)
            self.log_event("actor_back", worker=worker, incarnation=incarnation, seconds=seconds)

    def insert(self, rollout: Rollout) -> None:
        """Insert a rollout into the batch source."""
        self.batch_source.insert(rollout)
        env_steps = self.batch_source.steps
        self.launcher.publish_steps(env_steps)
        self.record_bounds("accepted", source=rollout.source, steps=count_steps(rollout), env_steps=env_steps)

    def record_bounds(self, op: str, **fields: Any) -> None:
        """Record an operation with the range of serial numbers that can be sampled after it."""
        if self.keeps_history:
            replay = self.batch_source.replay
            self.history.note("learner", op, **fields, tail=replay.tail, head=replay.head)

    def drain_stats(self) -> State:
        """Return and clear the episodes of lost actors and the environment faults."""
        stats = {"episodes": self.rescued_episodes, "faults": self.env_faults}
        self.rescued_episodes = []
        self.env_faults = []
        return stats

    # Checkpoints

    def state_dict(self) -> State:
        """The ledger; the state of actors is not saved."""
        return {"ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: State) -> Array:
        """Restore. All actors restart as later incarnations than any before, so every lane is lost."""
        self.stop()
        self.rescued_episodes = []
        self.env_faults = []
        self.lost_at = {}
        current = self.ledger.incarnations
        saved = self.restore_ledger(state)
        self.supervisor.reset([max(pair) for pair in zip(current, saved, strict=True)])
        self.open_history()
        for worker in range(self.workers):
            self.batch_source.seal(worker)
            self.record_bounds("sealed", worker=worker)
        return np.ones(self.lanes, np.bool_)

    def restore_ledger(self, state: State) -> list[int]:
        """Restore the ledger; return its incarnations."""
        self.ledger.load_state_dict(saved_value(state, "ledger"))
        return self.ledger.incarnations

    def stop(self) -> None:
        """Stop all actors in parallel."""
        for handle in self.handles.values():
            handle.request_stop()
        for handle in self.handles.values():
            handle.stop()
        for handle in self.handles.values():
            handle.close()
        self.handles.clear()

    def close(self) -> None:
        """Stop all actors and free all resources."""
        self.stop()
        self.launcher.close()
        self.history.close()


def make_actor_pool(
    plan: Plan,
    spec: Spec,
    learning: LearnerSide,
    launcher: ActorLauncher,
    explore: Explore | None,
    *,
    start_seconds: float = 60.0,
) -> ActorPool:
    """The actor pool of a plan. `spec` is that of the environments; `start_seconds` limits an actor's start."""
    runtime = plan.runtime
    workers = num_senders(plan)
    if isinstance(runtime, InlineRuntime):
        raise TypeError("an inline run has no actor pool")

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
        launcher,
        supervisor,
        workers=workers,
        lanes=plan.env.num,
        until_steps=plan.until.steps,
        keeps_history=plan.log.history,
    )


def cut_to(rollout: Rollout, room: int) -> Rollout:
    """The first rows that hold at least `room` steps, so that a run ends exactly at its limit."""
    if count_steps(rollout) <= room:
        return rollout
    steps = np.cumsum((~rollout.last).sum(1))
    rows = int(np.searchsorted(steps, room)) + 1
    kept: dict[str, Any] = {name: array[:rows] for name, array in arrays_of(rollout, COLUMNS).items()}
    finished = [(episode, row) for episode, row in zip(rollout.finished, rollout.ends, strict=True) if row < rows]
    return replace(
        rollout, **kept, finished=tuple(pair[0] for pair in finished), ends=tuple(pair[1] for pair in finished)
    )
