"""Worlds of toys, and a record of rows whose observations identify their episode and step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from qfleet.act import Actor, Policy
from qfleet.act.explore import EpsilonGreedyExplorer
from qfleet.data import Array, Step, World
from qfleet.envs import TRAIN, make_world
from qfleet.envs.episodes import episode_seed
from qfleet.nets import QNet
from qfleet.plan.schema import Env
from qfleet.qlearn import Scalar
from qfleet.testing.toys import Traced

SEED = 11
NUM = 4


@contextmanager
def world_of(toy: str, num: int = NUM, workers: int = 2, **settings: Any) -> Iterator[Any]:
    """A world of toys; `every`, `at`, `fault` and `allow` are options of the toy, the others settings of the plan."""
    own = {name: settings.pop(name) for name in list(settings) if name in ("every", "at", "fault", "allow")}
    logs = settings.pop("logs", None)
    env = Env(id=f"qfleet.testing.toys:toys/{toy}-v0", num=num, workers=workers, options=own, **settings)
    world = make_world(env, seed=SEED, stream=TRAIN, logs=logs)
    try:
        yield world
    finally:
        world.close()


def choose(step: Step, rng: np.random.Generator, actions: int) -> Array:
    score = rng.random((len(step.reward), actions))
    return np.argmax(score if step.mask is None else score * step.mask, axis=1)


def drive(world: World, steps: int, rng: np.random.Generator, step: Step) -> list[Step]:
    seen = [step]
    for _ in range(steps):
        world.send(choose(seen[-1], rng, world.spec.num_actions))
        seen.append(world.receive())
    return seen


def make_actor(world: World) -> Actor:
    net = QNet(nn.Linear(world.spec.obs[0], world.spec.num_actions), nn.Identity())
    explorer = EpsilonGreedyExplorer(lambda step: 1.0, world.spec.actions)
    return Actor(world, Policy(net, Scalar(), world.spec.actions), explorer, np.random.default_rng(0))


class Record:
    """The rows that an actor collects from a world of traced toys, and checks of them."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.actor = make_actor(world)
        self.actor.start()
        self.rows: list[dict[str, Array]] = []
        self.finished = 0
        self.faults: list[Any] = []

    def turn(self) -> None:
        self.actor.send()
        rollout, finished = self.actor.receive()
        self.finished += len(finished)
        self.rows.append({name: getattr(rollout, name)[0] for name in ("obs", "reward", "discount", "last")})
        self.faults += self.world.take_faults()

    def run(self, rows: int, until: Callable[[], bool] = lambda: False) -> "Record":
        for _ in range(rows):
            self.turn()
            if until():
                break
        return self

    def check(self) -> None:
        """Every step occurred in its environment once and in sequence; no row joins two episodes."""
        steps = sum(self.check_lane(lane) for lane in range(self.world.num))
        assert self.actor.steps == steps > 0

    def check_lane(self, lane: int) -> int:
        numbers = {Traced.shown(episode_seed(SEED, TRAIN, lane, e), 0)[:2]: e for e in range(len(self.rows) + 10)}
        after = [row["obs"][lane] for row in self.rows[1:]] + [self.actor.current().obs[lane]]
        position = (-1, 0)
        steps = 0
        for row, then in zip(self.rows, after, strict=True):
            high, low, step = (int(x) for x in row["obs"][lane])
            if row["last"][lane]:
                # A lane without a new result repeats its last observation.
                repeated = (position, (position[0], position[1] + 1), (position[0] + 1, 0))
                assert (numbers.get((high, low), -1), step) in repeated
                continue
            seed = high << 16 | low
            assert (numbers[high, low], step) > position, "an episode came twice, or went back"
            position = (numbers[high, low], step)
            assert tuple(then) == Traced.shown(seed, step + 1)
            assert row["reward"][lane] == step + 1
            over = step + 1 == Traced.length(seed)
            assert row["discount"][lane] == (0.0 if over and Traced.length(seed) % 2 else 1.0)
            steps += 1
        return steps

    def whole(self, lane: int) -> bool:
        """Did this lane run whole episodes only, without an extra row?"""
        expected: list[tuple[int, ...]] = []
        episode = 0
        while len(expected) < len(self.rows):
            seed = episode_seed(SEED, TRAIN, lane, episode)
            expected += [Traced.shown(seed, step) for step in range(Traced.length(seed) + 1)]
            episode += 1
        return [tuple(row["obs"][lane]) for row in self.rows] == expected[: len(self.rows)]


def lanes_of(faults: list[Any]) -> set[int]:
    return {lane for fault in faults for lane in fault.lanes}


def worker_pids(world: Any) -> list[int]:
    return [child.process.pid for child in world._pool.workers if child is not None]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ended_within(pids: list[int], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(alive, pids))
