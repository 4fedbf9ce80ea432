"""The actor pool with fake actors: rollouts are counted once, and failed actors are replaced."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet import Plan
from qfleet.act import make_explorer, run_actor
from qfleet.act.actor import concatenate_rollouts
from qfleet.build import seeds
from qfleet.build.components import Components
from qfleet.build.make import join_components, make_actor, make_policy
from qfleet.build.resolve import resolve
from qfleet.build.worlds import make_own_world, make_train_world
from qfleet.data import Rollout, Tick, count_steps
from qfleet.distributed.actors.handle import ActorHandle
from qfleet.distributed.actors.launcher import COUNTS
from qfleet.distributed.actors.messages import EnvFaultMessage
from qfleet.distributed.actors.pool import SUPERVISE, ActorPool, cut_to
from qfleet.distributed.worker.supervisor import Supervisor
from qfleet.envs.workers.pool import EnvFault
from qfleet.errors import EnvError, UsageError
from qfleet.plan import make_plan
from qfleet.system.worker_errors import FinalError, WorkerDied, WorkerFailed, WorkerLost
from qfleet.training.async_loop import AsyncLoop
from qfleet.training.channels import LatestWeights, RolloutQueue
from tests.support.runs import SMALL

CPU = "cpu"


class FakeActor:
    """The process and the channel of an actor that steps only when a rollout is read."""

    def __init__(
        self, plan: Plan, weights: LatestWeights, worker: int, incarnation: int, steps: Callable[[], int]
    ) -> None:
        import torch

        world = make_own_world(plan, worker, incarnation)
        policy = make_policy(plan, world.spec, torch.device(CPU))
        actor = make_actor(plan, world, policy, worker=worker, incarnation=incarnation, exploration_step=steps)
        actor.start()
        self.queue, self.running, self.moved = RolloutQueue(4), True, 0
        self.stuck = self.invalid = self.ended = self.closed = self.pending = False
        self.found: WorkerLost = WorkerDied("the actor broke")
        self.faults: list[EnvFaultMessage] = []
        self.extra: deque[Rollout] = deque()  # delivered before the actor's own
        self.act: Iterator[Tick] = run_actor(actor, self.queue, weights, rows=3)

    def is_alive(self) -> bool:
        return self.running

    def progress(self) -> int:
        self.moved += not self.stuck
        return self.moved

    def get(self) -> Rollout | None:
        if self.invalid:
            self.invalid = False
            raise ValueError("an action that there is not")
        if self.extra:
            return self.extra.popleft()
        while not self.queue.waiting and self.running and not self.stuck:
            next(self.act)
        return self.queue.get()

    def env_faults(self) -> list[EnvFaultMessage]:
        faults, self.faults = self.faults, []
        return faults

    def request_stop(self) -> None:
        pass

    def stop(self) -> None:
        self.running, self.ended = False, True

    def is_pending(self) -> bool:
        return self.pending

    def why_lost(self) -> WorkerLost:
        assert not self.ended  # a loss found later would only be that by the stop
        return self.found

    def close(self) -> None:
        self.closed = True


class FakeLauncher:
    """Launches fake actors."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.weights, self.folder = plan, LatestWeights(), None
        self.steps, self.launched = 0, list[tuple[int, int]]()
        self.published: list[int] = []
        self.closed = False

    def launch(self, worker: int, incarnation: int) -> ActorHandle:
        self.launched.append((worker, incarnation))
        fake_actor = FakeActor(self.plan, self.weights, worker, incarnation, lambda: self.steps)
        return ActorHandle(fake_actor, fake_actor, stop_seconds=0.0)

    def publish(self, version: int, weights: Any, steps: int) -> None:
        self.weights.publish(version, weights)
        self.published.append(version)
        self.steps = steps

    def publish_steps(self, steps: int) -> None:
        self.steps = steps

    def counts(self) -> dict[str, int]:
        return dict.fromkeys(COUNTS, 0)

    def close(self) -> None:
        self.closed = True


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_fake_pool(**settings: Any) -> tuple[Components, ActorPool, FakeLauncher, Clock]:
    overrides = {**SMALL, "runtime.type": "processes", "actors.num": 2, "until.steps": 5_000, **settings}
    plan = make_plan("CartPole-v1", overrides=overrides)
    world = make_train_world(plan)
    plan, clock = resolve(plan, world.spec), Clock()
    launcher = FakeLauncher(plan)

    workers = plan.actors.num
    supervisor = Supervisor(workers, hung_seconds=5, restarts=2, rng=np.random.default_rng(0))

    def make_actors(learning: Any) -> ActorPool:
        explorer = make_explorer(plan.algo, world.spec.actions, plan.env.num)
        return ActorPool(
            learning,
            explorer,
            launcher,
            supervisor,
            workers=workers,
            lanes=plan.env.num,
            until_steps=plan.until.steps,
            clock=clock,
        )

    components = join_components(plan, world.spec, make_actors)
    pool = components.actor
    assert isinstance(pool, ActorPool)
    return components, pool, launcher, clock


def fake_of(handle: ActorHandle) -> Any:
    """The fake actor behind a handle."""
    return handle.channel


def turn(runtime: AsyncLoop, times: int = 1) -> list[Tick]:
    return [tick for _ in range(times) for tick in runtime.turn()]


def updates_missing(components: Components) -> int:
    limiter = components.batch_source.limiter  # type: ignore[attr-defined]
    return int(limiter.allowed_updates(components.steps) - limiter.updates - limiter.forgiven)


def test_after_every_turn_all_allowed_updates_are_made() -> None:
    components, pool, _, _ = make_fake_pool()
    runtime = AsyncLoop(components, pool)
    for _ in range(20):
        turn(runtime)
        assert updates_missing(components) == 0
    assert components.steps == sum(pool.ledger.steps) > 100
    assert components.learner.updates == int(components.batch_source.limiter.ratio * (components.steps - 40))  # type: ignore[attr-defined]


def test_rollouts_are_collected_from_workers_in_turn() -> None:
    components, pool, _, _ = make_fake_pool()
    runtime = AsyncLoop(components, pool)
    turn(runtime, 10)
    assert pool.ledger.rollouts == [5, 5]


def test_a_run_ends_with_the_row_that_reaches_until_steps() -> None:
    components, pool, _, _ = make_fake_pool(**{"until.steps": 101})
    runtime = AsyncLoop(components, pool)
    while components.steps < 101:
        turn(runtime)
    assert 101 <= components.steps < 101 + 2  # two lanes per actor


def test_cut_to_keeps_whole_rows() -> None:
    last = np.array([[0, 0], [1, 0], [0, 0], [0, 1]], bool)
    ones = np.ones((4, 2), np.float32)
    rollout = Rollout(ones, ones.astype(np.int64), ones, ones, last, (0, 0, 0), 1)
    assert count_steps(rollout) == 6
    rows = [len(cut_to(rollout, room).last) for room in range(1, 8)]
    assert rows == [1, 1, 2, 3, 3, 4, 4]


def test_cut_to_drops_episodes_of_the_rows_it_cuts_off() -> None:
    ones = np.ones((4, 1), np.float32)
    rows = [
        Rollout(
            *(ones[:1], ones[:1].astype(np.int64), ones[:1], ones[:1], np.array([[last]], np.bool_), (0, 0, row), 1),
            finished=finished,
        )
        # The last episode was truncated: only `ends` has its row.
        for row, (last, finished) in enumerate([(0, ((1.0, 1),)), (1, ()), (0, ((2.0, 2),)), (1, ()), (0, ((3.0, 3),))])
    ]
    whole = concatenate_rollouts(rows)
    assert [len(cut_to(whole, room).finished) for room in (1, 2, 3)] == [1, 2, 3]
    assert cut_to(whole, 2).finished == ((1.0, 1), (2.0, 2))
    assert cut_to(cut_to(whole, 2), 1).finished == ((1.0, 1),)


def test_every_random_stream_has_its_own_number() -> None:
    purposes = [number for name, number in vars(seeds).items() if name.isupper() and type(number) is int]
    assert len({*purposes, SUPERVISE}) == len(purposes) + 1 >= 8


def test_published_versions_rise_also_after_a_rollback() -> None:
    components, pool, launcher, _ = make_fake_pool()
    runtime = AsyncLoop(components, pool)
    turn(runtime, 20)
    state, updates = components.state_dict(), components.learner.updates
    turn(runtime, 6)
    components.load_state_dict(state)
    assert components.learner.updates == updates
    turn(AsyncLoop(components, pool), 6)
    assert launcher.published == sorted(set(launcher.published))


def test_a_rollout_received_twice_is_inserted_once() -> None:
    components, pool, _, _ = make_fake_pool()
    runtime = AsyncLoop(components, pool)
    turn(runtime, 2)
    fake_actor = fake_of(pool.handles[0])
    again = fake_actor.get()
    fake_actor.extra.extend([again, replace(again), replace(again, source=(0, 0, 99))])
    before = components.steps
    turn(runtime, 8)
    assert components.steps == sum(pool.ledger.steps) > before
    assert pool.ledger.sequences[0] == pool.ledger.rollouts[0]


@pytest.mark.parametrize("how", ["dead", "hung", "senseless"])
def test_an_actor_that_fails_is_replaced_and_its_lanes_are_sealed(how: str) -> None:
    components, pool, launcher, clock = make_fake_pool()
    events: list[dict[str, Any]] = []
    pool.use_run_folder(Path(), lambda kind, **fields: events.append({"kind": kind, **fields}))
    runtime = AsyncLoop(components, pool)
    turn(runtime, 6)
    victim = fake_of(pool.handles[1])
    for _ in range(4):
        next(victim.act)  # in the middle of a rollout that will never arrive
    victim.running, victim.stuck, victim.invalid = how != "dead", how == "hung", how == "senseless"
    store, row = components.batch_source.replay.store, int(components.batch_source.replay.store.heads[2]) - 1
    while not events:
        clock.now += 0.1
        turn(runtime)
    assert store.last[row % store.rows, 2:].all()  # the newest row of both of its lanes became a final one
    for _ in range(20):
        clock.now += 0.1
        turn(runtime)
    assert victim.ended
    assert victim.closed
    assert launcher.launched == [(0, 0), (1, 0), (1, 1)]
    assert [(row["kind"], row["worker"]) for row in events] == [("actor_lost", 1), ("actor_back", 1)]
    assert events[0]["cause"] == how
    assert 0 < events[1]["seconds"] < 1
    # A reason found by the pool has precedence over the final error of the process.
    nonsense = "it sent an invalid rollout: an action that there is not"
    silence = "it did not move for 5 s (runtime.hung_seconds)"
    assert events[0]["words"] == {"senseless": nonsense, "hung": silence, "dead": "the actor broke"}[how]
    assert components.steps == sum(pool.ledger.steps)
    assert updates_missing(components) == 0


def test_an_actor_without_a_place_waits_and_is_reported_once() -> None:
    _, pool, launcher, clock = make_fake_pool()
    events: list[dict[str, Any]] = []
    pool.use_run_folder(Path(), lambda kind, **fields: events.append({"kind": kind, **fields}))
    pool.start()
    waiting = fake_of(pool.handles[1])
    waiting.pending = waiting.stuck = True
    for _ in range(200):  # many times as long as an actor may be silent
        clock.now += 1.0
        pool.poll()
    assert launcher.launched == [(0, 0), (1, 0)]
    assert [(event["kind"], event["worker"]) for event in events] == [("actor_waiting", 1)]
    assert pool.num_working() == 1
    waiting.pending = False  # it has a place now, and must move
    while len(events) < 2:
        clock.now += 1.0
        pool.poll()
    assert (events[1]["kind"], events[1]["cause"]) == ("actor_lost", "hung")
    assert 200 + 60 <= clock.now <= 200 + 62  # its start has the usual limit


def test_a_dead_actor_is_found_in_the_middle_of_a_long_turn() -> None:
    components, pool, _, clock = make_fake_pool()
    runtime = AsyncLoop(components, pool)
    while not components.learner.updates:
        clock.now += 0.1
        turn(runtime)
    seen_at = list[int]()
    for tick in runtime.turn():
        if "loss" in tick.stats and not seen_at:
            fake_of(pool.handles[1]).running = False
            clock.now += 0.1
            seen_at.append(components.learner.updates)
        elif seen_at and 1 not in pool.handles:
            seen_at.append(components.learner.updates)
            break
    assert seen_at[1] == seen_at[0] + 1  # with the next update


def test_when_all_actors_failed_too_often_the_run_ends_with_the_last_error() -> None:
    components, pool, _, clock = make_fake_pool()
    runtime = AsyncLoop(components, pool)

    def kill_all() -> None:
        for _ in range(400):
            clock.now += 1.0
            for handle in pool.handles.values():
                fake_of(handle).running = False
            turn(runtime)

    with pytest.raises(EnvError, match="all 2 actors have failed more often") as raised:
        kill_all()
    assert "the actor broke" in raised.value.why


def test_a_usage_error_in_an_actor_ends_the_run_at_once() -> None:
    components, pool, _, clock = make_fake_pool()
    runtime = AsyncLoop(components, pool)
    turn(runtime, 2)
    victim = fake_of(pool.handles[1])
    victim.running, victim.found = False, WorkerFailed(FinalError("no such game", "It is not installed.", "Do.", 2))
    clock.now += 0.1
    with pytest.raises(UsageError) as raised:
        turn(runtime)
    assert (raised.value.what, raised.value.why, raised.value.fix) == ("no such game", "It is not installed.", "Do.")
    assert (victim.ended, victim.closed) == (True, True)


def test_other_errors_that_an_actor_reports_are_the_cause_of_its_loss() -> None:
    components, pool, _, clock = make_fake_pool()
    events: list[dict[str, Any]] = []
    pool.use_run_folder(Path(), lambda kind, **fields: events.append({"kind": kind, **fields}))
    runtime = AsyncLoop(components, pool)
    turn(runtime, 2)
    victim = fake_of(pool.handles[1])
    victim.running, victim.found = False, WorkerFailed(FinalError("ZeroDivisionError: the toy broke"))
    clock.now += 0.1
    turn(runtime)
    assert [(row["cause"], row["words"]) for row in events] == [("dead", "ZeroDivisionError: the toy broke")]


def test_environment_faults_reach_the_next_tick_with_their_actor() -> None:
    components, pool, _, clock = make_fake_pool()
    runtime = AsyncLoop(components, pool)
    turn(runtime)
    fault = EnvFault("raised", 0, (2,), (2,), "it raised", "Traceback ...", 0.5)
    fake_of(pool.handles[1]).faults.append(EnvFaultMessage(fault))
    clock.now += 0.1
    (found,) = [fault for tick in turn(runtime) for fault in tick.stats.get("faults", ())]
    assert found == {"actor": 1, **asdict(fault)}


def test_other_actors_keep_running_when_one_is_quarantined() -> None:
    components, pool, _, clock = make_fake_pool()
    runtime = AsyncLoop(components, pool)
    for _ in range(60):
        clock.now += 1.0
        if 0 in pool.handles:
            fake_of(pool.handles[0]).running = False
        turn(runtime)
    assert pool.supervisor.quarantined == {0}
    before = pool.ledger.rollouts[1]
    turn(runtime, 5)
    assert pool.ledger.rollouts[1] == before + 5
    components.load_state_dict(components.state_dict())  # a rollback does not restart a quarantined worker
    turn(AsyncLoop(components, pool), 5)
    assert list(pool.handles) == [1]


def test_load_state_dict_starts_later_incarnations_and_continues_the_counts() -> None:
    components, pool, launcher, _ = make_fake_pool()
    runtime = AsyncLoop(components, pool)
    turn(runtime, 12)
    state, steps = components.state_dict(), components.steps
    turn(runtime, 4)
    lost = components.load_state_dict(state)
    assert lost.all()
    assert not pool.handles
    assert components.steps == steps == sum(pool.ledger.steps)
    turn(AsyncLoop(components, pool), 6)
    assert launcher.launched[2:] == [(0, 1), (1, 1)]
    assert components.steps == sum(pool.ledger.steps) > steps


def test_close_stops_all_actors() -> None:
    components, pool, launcher, _ = make_fake_pool()
    AsyncLoop(components, pool)
    fake_actors = [fake_of(handle) for handle in pool.handles.values()]
    components.close()
    assert launcher.closed
    assert all((fake_actor.ended, fake_actor.closed) == (True, True) for fake_actor in fake_actors)


TICK_SECONDS, NUM_TICKS = 0.25, 140


class Paced:
    """A fake actor that has a rollout every `every_seconds` after the previous one was read."""

    def __init__(self, fake_actor: Any, clock: Clock, every_seconds: float, start_seconds: float) -> None:
        self.fake_actor, self.clock, self.every_seconds = fake_actor, clock, every_seconds
        self.ready_at = clock.now + start_seconds + every_seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fake_actor, name)

    def get(self) -> Rollout | None:
        if self.clock.now < self.ready_at:
            return None
        self.ready_at = self.clock.now + self.every_seconds
        return self.fake_actor.get()  # type: ignore[no-any-return]


def paced_run(*paces: int, turns: int = 100, late: int = 0) -> tuple[list[int], list[dict[str, Any]]]:
    """Rollouts of actors that need `paces` ticks each, and the events; the learner makes `turns` turns per tick.

    The last actor starts `late` ticks late.
    """
    components, pool, launcher, clock = make_fake_pool(**{"actors.num": len(paces), "until.steps": 100_000})
    launch, events = launcher.launch, list[dict[str, Any]]()

    def launched(worker: int, incarnation: int) -> Any:
        start = late * TICK_SECONDS if worker == len(paces) - 1 else 0.0
        handle = launch(worker, incarnation)
        handle.channel = Paced(handle.channel, clock, paces[worker] * TICK_SECONDS, start)
        return handle

    launcher.launch = launched  # type: ignore[method-assign]
    pool.use_run_folder(Path(), lambda kind, **fields: events.append({"kind": kind, **fields}))
    runtime = AsyncLoop(components, pool)
    for _ in range(NUM_TICKS):
        clock.now += TICK_SECONDS
        before = -1
        for _ in range(turns):
            if before == (before := components.steps):
                break
            turn(runtime)
    assert components.steps == sum(pool.ledger.steps)
    return pool.ledger.rollouts, events


def test_a_slow_actor_is_logged_and_does_not_slow_down_the_others() -> None:
    equal, nothing = paced_run(1, 1, 1, 1)
    rollouts, events = paced_run(1, 1, 10, 1)
    assert equal == [NUM_TICKS] * 4
    assert nothing == []
    assert rollouts == [NUM_TICKS, NUM_TICKS, NUM_TICKS // 10, NUM_TICKS]  # the pool did not wait for the slowest
    assert sum(rollouts) >= 0.9 * 3 / 4 * sum(equal)
    (slow,) = events  # once, though it stayed slow
    assert (slow["kind"], slow["worker"], slow["incarnation"]) == ("actor_slow", 2, 0)
    assert 0.05 < slow["share"] < 0.15


def test_an_actor_that_starts_late_is_not_a_straggler() -> None:
    rollouts, events = paced_run(1, 1, 1, 1, late=32)
    assert rollouts == [NUM_TICKS, NUM_TICKS, NUM_TICKS, NUM_TICKS - 32]
    assert events == []


def test_under_back_pressure_no_actor_is_a_straggler() -> None:
    rollouts, events = paced_run(1, 1, 4, 1, turns=1)  # one rollout per tick is less than even the slow one's share
    assert max(rollouts) - min(rollouts) <= 2
    assert events == []
