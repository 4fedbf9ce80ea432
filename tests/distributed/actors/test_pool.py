"""A fleet whose actors are turned by hand: who is heard, who is replaced, and that nothing is counted twice."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet import Plan
from qfleet.act import acting, make_explorer
from qfleet.act.actor import joined
from qfleet.build import components
from qfleet.build.components import Components, join_parts, make_actor, make_own_world, make_policy, make_train_world
from qfleet.build.resolve import resolve
from qfleet.data import Rollout, Tick, count_steps
from qfleet.distributed.actors.pool import COUNTS, SUPERVISE, ActorPool, cut_to
from qfleet.distributed.worker.supervisor import Supervisor
from qfleet.errors import EnvError
from qfleet.plan import make_plan
from qfleet.training.async_loop import AsyncLoop
from qfleet.training.channels import LatestWeights, RolloutQueue
from tests.support.runs import SMALL

CPU = "cpu"


class Puppet:
    """An actor that moves only when it is asked for a rollout."""

    def __init__(
        self, plan: Plan, shelf: LatestWeights, worker: int, incarnation: int, steps: Callable[[], int]
    ) -> None:
        import torch

        world = make_own_world(plan, worker, incarnation)
        policy = make_policy(plan, world.spec, torch.device(CPU))
        actor = make_actor(plan, world, policy, worker=worker, incarnation=incarnation, elapsed=steps)
        actor.start()
        self.queue, self.lives, self.moved = RolloutQueue(4), True, 0
        self.stuck = self.senseless = self.ended = self.closed = False
        self.extra: deque[Rollout] = deque()  # what a bad wire delivers besides
        self.act: Iterator[Tick] = acting(actor, self.queue, shelf, rows=3)

    def alive(self) -> bool:
        return self.lives

    def progress(self) -> int:
        self.moved += not self.stuck
        return self.moved

    def get(self) -> Rollout | None:
        if self.senseless:
            self.senseless = False
            raise ValueError("an action that there is not")
        if self.extra:
            return self.extra.popleft()
        while not self.queue.waiting and self.lives and not self.stuck:
            next(self.act)
        return self.queue.get()

    def troubles(self) -> list[dict[str, Any]]:
        return []

    def ask(self) -> None:
        pass

    def end(self) -> None:
        self.lives, self.ended = False, True

    def last_words(self) -> str:
        return "the puppet fell"

    def close(self) -> None:
        self.closed = True


class Theatre:
    """A site of puppets."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.shelf, self.folder = plan, LatestWeights(), None
        self.steps, self.hired = 0, list[tuple[int, int]]()
        self.published: list[int] = []
        self.closed = False

    def hire(self, worker: int, incarnation: int) -> Puppet:
        self.hired.append((worker, incarnation))
        return Puppet(self.plan, self.shelf, worker, incarnation, lambda: self.steps)

    def publish(self, version: int, weights: Any, steps: int) -> None:
        self.shelf.publish(version, weights)
        self.published.append(version)
        self.steps = steps

    def tell(self, steps: int) -> None:
        self.steps = steps

    def counts(self) -> dict[str, int]:
        return dict.fromkeys(COUNTS, 0)

    def close(self) -> None:
        self.closed = True


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_theatre(**settings: Any) -> tuple[Components, ActorPool, Theatre, Clock]:
    overrides = {**SMALL, "runtime.type": "processes", "actors.num": 2, "until.steps": 5_000, **settings}
    plan = make_plan("CartPole-v1", overrides=overrides)
    world = make_train_world(plan)
    plan, clock = resolve(plan, world.spec), Clock()
    theatre = Theatre(plan)

    workers = plan.actors.num
    supervisor = Supervisor(workers, hung_seconds=5, restarts=2, rng=np.random.default_rng(0))

    def hire(learning: Any) -> ActorPool:
        explorer = make_explorer(plan.algo, world.spec.actions, plan.env.num)
        return ActorPool(
            learning,
            explorer,
            theatre,
            supervisor,
            workers=workers,
            lanes=plan.env.num,
            until_steps=plan.until.steps,
            clock=clock,
        )

    line = join_parts(plan, world.spec, hire)
    pool = line.actor
    assert isinstance(pool, ActorPool)
    return line, pool, theatre, clock


def turn(runtime: AsyncLoop, times: int = 1) -> list[Tick]:
    return [tick for _ in range(times) for tick in runtime.turn()]


def owed(line: Components) -> int:
    limiter = line.batch_source.limiter  # type: ignore[attr-defined]
    return int(limiter.allowed(line.steps) - limiter.updates - limiter.forgiven)


def test_after_every_turn_all_updates_are_made() -> None:
    line, pool, _, _ = make_theatre()
    runtime = AsyncLoop(line, pool)
    for _ in range(20):
        turn(runtime)
        assert owed(line) == 0
    assert line.steps == pool.ledger.total_steps > 100
    assert line.learner.updates == int(line.batch_source.limiter.ratio * (line.steps - 40))  # type: ignore[attr-defined]


def test_everyone_is_heard_in_turn() -> None:
    line, pool, _, _ = make_theatre()
    runtime = AsyncLoop(line, pool)
    turn(runtime, 10)
    assert pool.ledger.rollouts == [5, 5]


def test_a_run_ends_with_the_row_that_reaches_its_steps() -> None:
    line, pool, _, _ = make_theatre(**{"until.steps": 101})
    runtime = AsyncLoop(line, pool)
    while line.steps < 101:
        turn(runtime)
    assert 101 <= line.steps < 101 + 2  # two lanes per actor


def test_cutting_keeps_whole_rows() -> None:
    last = np.array([[0, 0], [1, 0], [0, 0], [0, 1]], bool)
    ones = np.ones((4, 2), np.float32)
    rollout = Rollout(ones, ones.astype(np.int64), ones, ones, last, (0, 0, 0), 1)
    assert count_steps(rollout) == 6
    rows = [len(cut_to(rollout, room).last) for room in range(1, 8)]
    assert rows == [1, 1, 2, 3, 3, 4, 4]


def test_episodes_of_rows_that_were_cut_off_are_not_told() -> None:
    ones = np.ones((4, 1), np.float32)
    rows = [
        Rollout(
            *(ones[:1], ones[:1].astype(np.int64), ones[:1], ones[:1], np.array([[last]], np.bool_), (0, 0, row), 1),
            finished=finished,
        )
        # The last row of all was truncated: nothing but its number says where its episode ended.
        for row, (last, finished) in enumerate([(0, ((1.0, 1),)), (1, ()), (0, ((2.0, 2),)), (1, ()), (0, ((3.0, 3),))])
    ]
    whole = joined(rows)
    assert [len(cut_to(whole, room).finished) for room in (1, 2, 3)] == [1, 2, 3]
    assert cut_to(whole, 2).finished == ((1.0, 1), (2.0, 2))
    assert cut_to(cut_to(whole, 2), 1).finished == ((1.0, 1),)


def test_every_purpose_of_random_numbers_has_a_number_of_its_own() -> None:
    purposes = [number for name, number in vars(components).items() if name.isupper() and type(number) is int]
    assert len({*purposes, SUPERVISE}) == len(purposes) + 1 >= 8


def test_versions_only_rise_even_after_going_back() -> None:
    line, pool, theatre, _ = make_theatre()
    runtime = AsyncLoop(line, pool)
    turn(runtime, 20)
    state, updates = line.state_dict(), line.learner.updates
    turn(runtime, 6)
    line.load_state_dict(state)
    assert line.learner.updates == updates
    turn(AsyncLoop(line, pool), 6)
    assert theatre.published == sorted(set(theatre.published))


def test_what_comes_twice_enters_once() -> None:
    line, pool, _, _ = make_theatre()
    runtime = AsyncLoop(line, pool)
    turn(runtime, 2)
    puppet: Any = pool.hands[0]
    again = puppet.get()
    puppet.extra.extend([again, replace(again), replace(again, source=(0, 0, 99))])
    before = line.steps
    turn(runtime, 8)
    assert line.steps == pool.ledger.total_steps > before
    assert pool.ledger.sequences[0] == pool.ledger.rollouts[0]


@pytest.mark.parametrize("how", ["dead", "hung", "senseless"])
def test_an_actor_that_fails_is_replaced_and_its_lanes_are_sealed(how: str) -> None:
    line, pool, theatre, clock = make_theatre()
    told: list[dict[str, Any]] = []
    pool.settle(Path(), lambda kind, **fields: told.append({"kind": kind, **fields}))
    runtime = AsyncLoop(line, pool)
    turn(runtime, 6)
    victim: Any = pool.hands[1]
    for _ in range(4):
        next(victim.act)  # in the middle of a rollout that will never arrive
    victim.lives, victim.stuck, victim.senseless = how != "dead", how == "hung", how == "senseless"
    store, row = line.batch_source.replay.store, int(line.batch_source.replay.store.heads[2]) - 1
    while not told:
        clock.now += 0.1
        turn(runtime)
    assert store.last[row % store.rows, 2:].all()  # the newest row of both of its lanes became a final one
    for _ in range(20):
        clock.now += 0.1
        turn(runtime)
    assert victim.ended
    assert victim.closed
    assert theatre.hired == [(0, 0), (1, 0), (1, 1)]
    assert [(row["kind"], row["worker"]) for row in told] == [("actor_lost", 1), ("actor_back", 1)]
    assert told[0]["cause"] == how
    assert 0 < told[1]["seconds"] < 1
    # What the fleet saw itself counts for more than how the process says that it ended.
    nonsense = "it handed over what makes no sense: an action that there is not"
    silence = "it did not move for 5 s (runtime.hung_seconds)"
    assert told[0]["words"] == {"senseless": nonsense, "hung": silence, "dead": "the puppet fell"}[how]
    assert line.steps == pool.ledger.total_steps
    assert owed(line) == 0


def test_a_death_is_seen_in_the_middle_of_a_long_turn() -> None:
    line, pool, _, clock = make_theatre()
    runtime = AsyncLoop(line, pool)
    while not line.learner.updates:
        clock.now += 0.1
        turn(runtime)
    seen_at = list[int]()
    for tick in runtime.turn():
        if "loss" in tick.stats and not seen_at:
            pool.hands[1].lives = False  # type: ignore[attr-defined]
            clock.now += 0.1
            seen_at.append(line.learner.updates)
        elif seen_at and 1 not in pool.hands:
            seen_at.append(line.learner.updates)
            break
    assert seen_at[1] == seen_at[0] + 1  # with the next update


def test_when_all_have_failed_too_often_the_run_ends_and_says_why() -> None:
    line, pool, _, clock = make_theatre()
    runtime = AsyncLoop(line, pool)

    def kill_all() -> None:
        for _ in range(400):
            clock.now += 1.0
            for hand in pool.hands.values():
                hand.lives = False  # type: ignore[attr-defined]
            turn(runtime)

    with pytest.raises(EnvError, match="all 2 actors have failed more often") as raised:
        kill_all()
    assert "the puppet fell" in raised.value.why


def test_one_that_is_given_up_leaves_the_others_at_work() -> None:
    line, pool, _, clock = make_theatre()
    runtime = AsyncLoop(line, pool)
    for _ in range(60):
        clock.now += 1.0
        if 0 in pool.hands:
            pool.hands[0].lives = False  # type: ignore[attr-defined]
        turn(runtime)
    assert pool.supervisor.quarantined == {0}
    before = pool.ledger.rollouts[1]
    turn(runtime, 5)
    assert pool.ledger.rollouts[1] == before + 5
    line.load_state_dict(line.state_dict())  # going back is no reason to try it again
    turn(AsyncLoop(line, pool), 5)
    assert list(pool.hands) == [1]


def test_coming_back_begins_later_incarnations_and_counts_on() -> None:
    line, pool, theatre, _ = make_theatre()
    runtime = AsyncLoop(line, pool)
    turn(runtime, 12)
    state, steps = line.state_dict(), line.steps
    turn(runtime, 4)
    lost = line.load_state_dict(state)
    assert lost.all()
    assert not pool.hands
    assert line.steps == steps == pool.ledger.total_steps
    turn(AsyncLoop(line, pool), 6)
    assert theatre.hired[2:] == [(0, 1), (1, 1)]
    assert line.steps == pool.ledger.total_steps > steps


def test_closing_ends_everyone() -> None:
    line, pool, theatre, _ = make_theatre()
    AsyncLoop(line, pool)
    puppets: list[Any] = list(pool.hands.values())
    line.close()
    assert theatre.closed
    assert all((puppet.ended, puppet.closed) == (True, True) for puppet in puppets)


TICK_SECONDS, NUM_TICKS = 0.25, 140


class Paced:
    """A puppet that has a rollout only every so many seconds, and the next one only after this one was taken."""

    def __init__(self, puppet: Any, clock: Clock, every_seconds: float, start_seconds: float) -> None:
        self.puppet, self.clock, self.every_seconds = puppet, clock, every_seconds
        self.ready_at = clock.now + start_seconds + every_seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.puppet, name)

    def get(self) -> Rollout | None:
        if self.clock.now < self.ready_at:
            return None
        self.ready_at = self.clock.now + self.every_seconds
        return self.puppet.get()  # type: ignore[no-any-return]


def paced_run(*paces: int, turns: int = 100, late: int = 0) -> tuple[list[int], list[dict[str, Any]]]:
    """Rollouts of actors that need so many ticks each, and what was told; the learner makes so many turns per tick.

    The last actor begins some ticks late.
    """
    line, pool, theatre, clock = make_theatre(**{"actors.num": len(paces), "until.steps": 100_000})
    hire, told = theatre.hire, list[dict[str, Any]]()

    def hired(worker: int, incarnation: int) -> Any:
        start = late * TICK_SECONDS if worker == len(paces) - 1 else 0.0
        return Paced(hire(worker, incarnation), clock, paces[worker] * TICK_SECONDS, start)

    theatre.hire = hired  # type: ignore[method-assign]
    pool.settle(Path(), lambda kind, **fields: told.append({"kind": kind, **fields}))
    runtime = AsyncLoop(line, pool)
    for _ in range(NUM_TICKS):
        clock.now += TICK_SECONDS
        before = -1
        for _ in range(turns):
            if before == (before := line.steps):
                break
            turn(runtime)
    assert line.steps == pool.ledger.total_steps
    return pool.ledger.rollouts, told


def test_an_actor_ten_times_slower_costs_its_share_and_is_named() -> None:
    equal, nothing = paced_run(1, 1, 1, 1)
    rollouts, told = paced_run(1, 1, 10, 1)
    assert equal == [NUM_TICKS] * 4
    assert nothing == []
    assert rollouts == [NUM_TICKS, NUM_TICKS, NUM_TICKS // 10, NUM_TICKS]  # nobody waited for the slowest
    assert sum(rollouts) >= 0.9 * 3 / 4 * sum(equal)
    (slow,) = told  # once, though it stayed slow
    assert (slow["kind"], slow["worker"], slow["incarnation"]) == ("actor_slow", 2, 0)
    assert 0.05 < slow["share"] < 0.15


def test_an_actor_that_takes_its_time_to_start_is_not_slow() -> None:
    rollouts, told = paced_run(1, 1, 1, 1, late=32)
    assert rollouts == [NUM_TICKS, NUM_TICKS, NUM_TICKS, NUM_TICKS - 32]
    assert told == []


def test_under_back_pressure_nobody_is_slow() -> None:
    rollouts, told = paced_run(1, 1, 4, 1, turns=1)  # one rollout per tick is less than even the slow one's share
    assert max(rollouts) - min(rollouts) <= 2
    assert told == []
