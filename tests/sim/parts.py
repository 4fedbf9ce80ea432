"""The pieces of the simulation: settings, lanes whose observations say who they are, and two kinds of carriers."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from qfleet.data import Batch, Rollout

GAMMA = 0.5  # powers of it are exact
Row = tuple[int, int, int, int]  # lane, incarnation, episode, step
Made = tuple[Rollout, list[tuple[Row, bool]], list[Row]]  # with every step and whether it terminated, and final rows


class Broken(Exception):
    """A promise was broken; the first word says which."""


def require(kept: bool, promise: str) -> None:
    """Or the seed has failed."""
    if not kept:
        raise Broken(promise)


@dataclass(frozen=True)
class Settings:
    """One world of faults, drawn from a seed. Rates are per second, shares per message."""

    workers: int
    lanes: int  # per worker
    rows: int
    n: int
    capacity: int
    ratio: Fraction
    start_steps: int
    band: int
    target_steps: int
    wire: bool  # at least once, as a network; else rings in shared memory
    slots: int
    end: float
    crash: float
    pause: float
    stall: float
    restart: float
    drop: float
    repeat: float
    hung_seconds: float
    restarts: int
    update_seconds: float

    @staticmethod
    def draw(rng: random.Random) -> "Settings":
        """A quiet one now and then: faults must not be what keeps a run correct."""

        def rate(most: float) -> float:
            return most * rng.random() if rng.random() < 0.7 else 0.0

        workers, lanes, rows = rng.randint(1, 4), rng.randint(1, 2), rng.randint(1, 4)
        return Settings(
            workers=workers,
            lanes=lanes,
            rows=rows,
            n=rng.randint(1, 3),
            capacity=rng.choice([20, 60, 1000]),
            ratio=Fraction(rng.choice(["1/4", "1/2", "2/3", "1", "3/2"])),
            start_steps=rng.choice([0, 10, 50]),
            band=rng.randint(1, 8),
            target_steps=workers * lanes * rows * rng.randint(8, 24),
            wire=rng.random() < 0.5,
            slots=rng.randint(2, 4),
            end=rng.choice([0.0, 0.05, 0.3]),
            crash=rate(0.1),
            pause=rate(0.1),
            stall=rate(0.1),
            restart=rate(0.04),
            drop=rate(0.2),
            repeat=rate(0.2),
            hung_seconds=rng.uniform(3.0, 6.0),
            restarts=rng.randint(1, 5),
            update_seconds=rng.choice([0.01, 0.05]),
        )


def as_row(obs: list[float]) -> Row:
    """What an observation says."""
    lane, incarnation, episode, step = map(int, obs)
    return lane, incarnation, episode, step


def reward_of(row: Row) -> float:
    """What a step pays: different from its neighbours', and a small whole number."""
    lane, incarnation, episode, step = row
    return float((7 * lane + 5 * incarnation + 3 * episode + step) % 11 - 5)


@dataclass
class Lane:
    """One environment: it only counts, and shows what it counts."""

    number: int
    incarnation: int
    episode: int = 0
    step: int = 0
    over: bool = False

    @property
    def row(self) -> Row:
        """What it shows."""
        return self.number, self.incarnation, self.episode, self.step


class Truth:
    """What really happened: every row that lanes produced, and how their episodes ended."""

    def __init__(self) -> None:
        self.terminated: dict[Row, bool] = {}  # of every step
        self.finals: set[Row] = set()  # final rows, by the world or by a seal

    def check(self, batch: Batch, n: int) -> str | None:
        """What is wrong with a batch of steps, if anything (I4)."""
        columns = (batch.obs, batch.action, batch.reward, batch.discount, batch.next_obs)
        for obs, action, reward, discount, after in zip(*(column.tolist() for column in columns), strict=True):
            begin, end = as_row(obs), as_row(after)
            if wrong := self.wrong(begin, int(action), reward, discount, end, n):
                return f"{begin} -> {end}: {wrong}"
        return None

    def wrong(self, begin: Row, action: int, reward: float, discount: float, end: Row, n: int) -> str | None:
        """Compare one item with what its lane did."""
        num = end[3] - begin[3]
        if begin[:3] != end[:3] or not 1 <= num <= n:
            return "spans a gap"
        steps = [(*begin[:3], begin[3] + i) for i in range(num)]
        if any(step not in self.terminated for step in steps) or action != begin[3] % 3:
            return "was never acted"
        if reward != sum(GAMMA**i * reward_of(step) for i, step in enumerate(steps)):
            return f"reward {reward}"
        ended = self.terminated[steps[-1]]
        if discount != (0.0 if ended else GAMMA**num):
            return f"discount {discount}"
        return None if num == n or ended or end in self.finals else "is too short"


def produce(lanes: list[Lane], rows: int, source: tuple[int, int, int], end: float, rng: random.Random) -> Made:
    """The next rows of some lanes as a rollout, and what is true of them."""
    shape = (rows, len(lanes))
    obs, last = np.zeros((*shape, 4), np.float32), np.zeros(shape, np.bool_)
    action, reward, discount = np.zeros(shape, np.int64), np.full(shape, 99.0, np.float32), np.ones(shape, np.float32)
    steps: list[tuple[Row, bool]] = []
    finals: list[Row] = []
    for time in range(rows):
        for at, lane in enumerate(lanes):
            obs[time, at] = lane.row
            if lane.over:
                last[time, at] = True
                finals.append(lane.row)
                lane.episode, lane.step, lane.over = lane.episode + 1, 0, False
                continue
            lane.over = rng.random() < end
            dead = lane.over and rng.random() < 0.5
            action[time, at], reward[time, at], discount[time, at] = lane.step % 3, reward_of(lane.row), 1.0 - dead
            steps.append((lane.row, dead))
            lane.step += 1
    return Rollout(obs, action, reward, discount, last, source, 0), steps, finals


@dataclass
class Ring:
    """In shared memory: in order, bounded, readable after its writer's death."""

    slots: int
    waiting: deque[Rollout] = field(default_factory=deque)

    def put(self, rollout: Rollout) -> bool:
        """False when it is full."""
        if len(self.waiting) >= self.slots:
            return False
        self.waiting.append(rollout)
        return True

    def get(self) -> Rollout | None:
        """The oldest one."""
        return self.waiting.popleft() if self.waiting else None


class Wire:
    """A network: what is sent arrives never, once or twice, sooner or later."""

    def __init__(
        self, settings: Settings, rng: random.Random, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self.settings, self.rng, self.later = settings, rng, later

    def send(self, deliver: Callable[[], None]) -> None:
        """Deliver, perhaps."""
        if self.rng.random() < self.settings.drop:
            return
        for _ in range(2 if self.rng.random() < self.settings.repeat else 1):
            slow = self.rng.random() < self.settings.drop
            self.later(self.rng.uniform(0.5, 8.0) if slow else self.rng.uniform(0.01, 0.1), deliver)
