"""The real actor pool, batch source and ledger of the processes runtime, with simulated actors and rings."""

import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qfleet.data import Array, Rollout, Spec
from qfleet.distributed.actors.handle import ActorHandle
from qfleet.distributed.actors.messages import EnvFaultMessage
from qfleet.distributed.actors.pool import ActorPool
from qfleet.distributed.worker.ledger import Ledger
from qfleet.distributed.worker.supervisor import Supervisor, WorkerFault
from qfleet.errors import EnvError
from qfleet.learn import ReplaySource
from qfleet.learn.rate_limiter import RateLimiter
from qfleet.replay import Replay
from qfleet.replay.cuts import NStepReturn, StepCut
from qfleet.replay.samplers import Uniform
from qfleet.system.worker_errors import WorkerDied, WorkerLost
from qfleet.training.async_loop import RecordedSource
from tests.sim.actors import SimActor
from tests.sim.driver import START_SECONDS, TURN_SECONDS, Parts
from tests.sim.parts import GAMMA, Row
from tests.sim.simulation import Simulation, failures

SEEDS, BUG_SEEDS = 100, 200


@dataclass
class Watcher:
    """An observer that checks inserted rollouts and records seals."""

    driver: "PoolDriver"
    returns: Array

    def observe(self, rollout: Rollout, lanes: slice) -> None:
        self.driver.sim.check_inserted(rollout, self.driver)  # type: ignore[arg-type]

    def reset_returns(self, lanes: slice) -> None:
        width = self.driver.sim.settings.lanes
        self.driver.sim.record_seal(lanes.start // width, self.driver)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Watcher":
        return self  # the next driver puts its own in its place


@dataclass
class SimProcess:
    """The process and the channel of a simulated actor."""

    actor: SimActor

    def is_alive(self) -> bool:
        return self.actor.alive

    def is_pending(self) -> bool:
        return False

    def why_lost(self) -> WorkerLost:
        return WorkerDied("it crashed")

    def progress(self) -> int:
        return self.actor.progress

    def get(self) -> Rollout | None:
        return self.actor.ring.get()

    def env_faults(self) -> list[EnvFaultMessage]:
        return []

    def request_stop(self) -> None:
        pass

    def stop(self) -> None:
        self.actor.alive = False

    def close(self) -> None:
        pass


@dataclass
class SimLauncher:
    """Launches simulated actors."""

    driver: "PoolDriver"
    folder: Path | None = None

    def launch(self, worker: int, incarnation: int) -> ActorHandle:
        self.driver.actors[worker] = self.driver.sim.launch(worker, incarnation)
        process = SimProcess(self.driver.actors[worker])
        return ActorHandle(process, process, stop_seconds=0.0)

    def publish(self, version: int, weights: Any, steps: int) -> None:
        self.driver.version = version

    def publish_steps(self, steps: int) -> None:
        pass

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


@dataclass
class Saved:
    """What a checkpoint holds."""

    batch_source: ReplaySource
    pool: dict[str, Any]
    rows: set[Row] = field(default_factory=set)
    newest: dict[int, Row] = field(default_factory=dict)


class PoolDriver:
    """The process of the actor pool, driven as the training loop drives it."""

    def __init__(self, sim: Simulation, parts: Parts, life: int, saved: Saved | None, pool: type[ActorPool]) -> None:
        self.sim, self.settings, self.version, self.done = sim, sim.settings, 0, False
        saved = copy.deepcopy(saved)
        self.actors: dict[int, SimActor] = {}
        self.rows = saved.rows if saved else set()
        self.newest = saved.newest if saved else {}
        self.batch_source = saved.batch_source if saved else self.blank()
        self.batch_source.normalization = Watcher(self, np.zeros(self.lanes))  # type: ignore[assignment]
        learning: Any = SimpleNamespace(policy=None, batch_source=self.batch_source)
        where = {"workers": self.settings.workers, "lanes": self.lanes, "until_steps": self.settings.target_steps}
        explorer: Any = None
        others: Any = {"clock": lambda: sim.now, "keeps_history": True, **where}
        self.pool = pool(learning, explorer, SimLauncher(self), self.make_supervisor(), **others)
        self.pool.history, self.pool.log_event = sim.notes, self.on_event
        self.noted = RecordedSource(self.batch_source, sim.notes)
        self.committed_at = sim.now
        if saved:
            self.pool.load_state_dict(saved.pool)
        else:
            self.pool.open_history()
        self.pool.publish(self.updates + 1, None)

    @property
    def lanes(self) -> int:
        return self.settings.workers * self.settings.lanes

    def blank(self) -> ReplaySource:
        settings, rng = self.settings, np.random.default_rng(self.sim.seed)
        how = {"cut": StepCut(settings.n), "n_step": NStepReturn(settings.n, GAMMA)}
        replay = Replay(Spec((4,), "float32", (3,)), self.lanes, settings.capacity, Uniform(), rng, **how)  # type: ignore[arg-type]
        watcher: Any = Watcher(self, np.zeros(self.lanes))
        return ReplaySource(
            replay, RateLimiter(settings.ratio, settings.start_steps), watcher, 4, lanes_per_actor=settings.lanes
        )

    def make_supervisor(self) -> Supervisor:
        limits = {"hung_seconds": self.settings.hung_seconds, "start_seconds": START_SECONDS}
        rng, restarts = np.random.default_rng(self.sim.seed), self.settings.restarts
        made = Supervisor(self.settings.workers, **limits, restarts=restarts, rng=rng)
        late = 25.0 if self.settings.stall else 0.0  # as in the driver
        limits = {**made.limits(), "hung_seconds": made.hung_seconds + late, "replace_seconds": 5.0 + late}
        made.limits = lambda: limits  # type: ignore[method-assign]
        return made

    def on_event(self, kind: str, **fields: Any) -> None:
        """Check an `actor_lost` event."""
        if kind != "actor_lost":
            return
        worker, delay = fields["worker"], fields["restart_seconds"]
        fault = WorkerFault(worker, fields["incarnation"], fields["cause"], 0.0, delay)
        self.sim.check_noticed(fault, self.actors.pop(worker))

    # For the checks of the simulation

    @property
    def memory(self) -> "PoolDriver":
        return self

    @property
    def steps(self) -> int:
        return self.batch_source.steps

    @property
    def updates(self) -> int:
        return self.batch_source.limiter.updates

    @property
    def ledger(self) -> Ledger:
        return self.pool.ledger

    @property
    def supervisor(self) -> Supervisor:
        return self.pool.supervisor

    def turn(self) -> float:
        """As the training loop does: poll, learn, insert one rollout, learn."""
        try:
            self.pool.poll()
        except EnvError:
            self.close(whole=False)
            return TURN_SECONDS
        made = self.learn()
        if (rollout := self.pool.collect()) is not None:
            self.pool.insert(rollout)
            made += self.learn()
        if self.sim.now - self.committed_at > 5.0:
            self.commit()
        if self.steps >= self.settings.target_steps and not self.batch_source.limiter.can_update(self.steps):
            self.close(whole=True)
        return max(TURN_SECONDS, made * self.settings.update_seconds)

    def learn(self) -> int:
        before = self.updates
        while (batch := self.noted.next_batch(0)) is not None:
            self.sim.check_sampled(batch)
            self.noted.after_update(batch, np.ones(len(batch.ids), np.float32))
        if self.updates > before:
            self.pool.publish(self.updates + 1, None)
        return self.updates - before

    def counters(self) -> dict[str, int]:
        return {"env_steps": self.steps, "updates": self.updates}

    def commit(self) -> None:
        self.committed_at = self.sim.now
        self.sim.checkpoint = copy.deepcopy(Saved(self.batch_source, self.pool.state_dict(), self.rows, self.newest))
        self.sim.notes.note("learner", "committed", **self.counters())

    def close(self, *, whole: bool) -> None:
        self.done = True
        self.sim.notes.note("learner", "closed", **self.counters(), forgiven=0, done=whole)


def pool_failures(seed: int, pool: type[ActorPool] = ActorPool) -> tuple[str | None, list[str]]:
    """One seed with this actor pool."""
    return failures(seed, make=partial(PoolDriver, pool=pool), wire=False)


def test_the_actor_pool_keeps_its_promises_under_faults() -> None:
    found = {seed: pool_failures(seed) for seed in range(SEEDS)}
    assert {seed: wrong for seed, wrong in found.items() if wrong != (None, [])} == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_actor_pool_keeps_its_promises_under_faults_many_times() -> None:
    found = {seed: pool_failures(seed) for seed in range(SEEDS, SEEDS + 3_000)}
    assert {seed: wrong for seed, wrong in found.items() if wrong != (None, [])} == {}


class NeverSeals(ActorPool):
    """Lets windows span the gap of a lost actor."""

    def remove_lost(self, fault: WorkerFault, loss: WorkerLost) -> None:
        batch_source, self.batch_source = self.batch_source, copy.copy(self.batch_source)
        self.batch_source.seal = lambda worker: 0  # type: ignore[method-assign]
        super().remove_lost(fault, loss)
        batch_source.steps, self.batch_source = self.batch_source.steps, batch_source


class CountsRescuedTwice(ActorPool):
    """Inserts the rollouts of a lost actor twice."""

    def remove_lost(self, fault: WorkerFault, loss: WorkerLost) -> None:
        left = list(self.handles[fault.worker].channel.actor.ring.waiting)  # type: ignore[attr-defined]
        super().remove_lost(fault, loss)
        for rollout in left:
            self.insert(rollout)


class ForgetsTheLedger(ActorPool):
    """Resumes from a checkpoint with an empty ledger."""

    def restore_ledger(self, state: dict[str, Any]) -> list[int]:
        return [-1] * self.workers


@pytest.mark.parametrize("pool", [NeverSeals, CountsRescuedTwice, ForgetsTheLedger])
def test_a_bug_in_the_actor_pool_is_found(pool: type[ActorPool]) -> None:
    found = (pool_failures(seed, pool)[0] for seed in range(BUG_SEEDS))
    assert any(found)
