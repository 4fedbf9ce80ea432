"""A policy at play, for people who watch: episodes one after the other, at the pace of a film."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from rich.console import Console

from qfleet.act import Policy, add_reward
from qfleet.data import World
from qfleet.envs import TEST, make_world, render_modes
from qfleet.training.evaluation.screens import EpisodeScreen, WindowClosed, choose_mode, has_display, make_screen
from qfleet.training.evaluation.variants import OtherWorld, require_same_spaces

FRAMES_PER_SECOND = 30
MOST_FRAMES_PER_SECOND = 120
LATE_SECONDS = 0.25  # a pace that is further behind starts anew instead of hurrying


@dataclass(frozen=True, slots=True)
class Moment:
    """An episode after some of its steps; `ended` says how, once it has."""

    episode: int
    steps: int = 0
    total: float = 0.0
    ended: str = ""

    @property
    def text(self) -> str:
        """The moment as a line."""
        return f"episode {self.episode}: return {self.total:g}, {self.steps} steps{self.ended and f' ({self.ended})'}"


def played(policy: Policy, world: World, episodes: int, max_steps: int) -> Iterator[Moment]:
    """Play greedily in a world of one lane; a moment after each reset and each step."""
    now = world.reset()
    state = policy.initial_state(1)
    moment = Moment(1)
    yield moment
    while not (moment.ended and moment.episode >= episodes):
        action, state, _ = policy.act(now.obs, state, mask=now.mask)
        world.send(action)
        now = world.receive()
        state = add_reward(state, now.reward, np.array([bool(moment.ended)]))
        if moment.ended:
            moment = Moment(moment.episode + 1)  # this step was the reset
        else:
            ends = {"terminated": now.terminated[0], "truncated": now.truncated[0]}
            ended = next((name for name, true in ends.items() if true), "")
            if not ended and moment.steps + 1 >= max_steps:
                world.abandon(np.ones(1, np.bool_))
                ended = "cut at eval.max_steps"
            moment = replace(moment, steps=moment.steps + 1, total=moment.total + float(now.reward[0]), ended=ended)
        yield moment


class Pace:
    """Waits so that moments come at a given rate."""

    def __init__(
        self,
        per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.seconds = 1.0 / per_second
        self.clock = clock
        self.sleep = sleep
        self.next_at = clock()

    def hold(self) -> None:
        """Sleep until the next moment is due."""
        self.next_at += self.seconds
        left = self.next_at - self.clock()
        if left > 0:
            self.sleep(left)
        elif left < -LATE_SECONDS:
            self.next_at = self.clock()


@dataclass(frozen=True)
class Player:
    """How episodes are shown: on which console, how many, how fast, in a window or not."""

    console: Console
    episodes: int
    per_second: float | None = None
    window: bool = True  # if there is a display

    def play(self, policy: Policy, other: OtherWorld) -> list[Moment]:
        """Play and show the episodes; returns how each of them ended."""
        window = self.window and has_display()
        mode = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            mode = choose_mode(render_modes(other.plan.env, other.make), other.plan.env.id, window=window)
        if not window:
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws into memory only
        with closing(open_world(other, mode)) as world:
            screen = make_screen(mode, self.console, window=window)
            try:
                return self._show(played(policy, world, self.episodes, other.plan.eval.max_steps), world, screen, mode)
            finally:
                screen.close()

    def _show(self, moments: Iterator[Moment], world: World, screen: EpisodeScreen, mode: str | None) -> list[Moment]:
        pace = None if mode is None else Pace(self.per_second or world_rate(world))
        ended: list[Moment] = []
        with suppress(WindowClosed):
            for moment in moments:
                screen.show(world, f"{moment.text}; {self.episodes} episodes in all", ended=bool(moment.ended))
                if moment.ended:
                    ended.append(moment)
                    screen.write(moment.text)
                if pace is not None:
                    pace.hold()
        return ended


def open_world(other: OtherWorld, mode: str | None) -> World:
    """The world of one lane in this process, drawn in a render mode, if its spaces are those of the policy."""
    env = msgspec.structs.replace(other.plan.env, workers=0)
    world = make_world(env, seed=other.plan.seed, stream=TEST, num=1, make=other.make, render_mode=mode)
    if other.spec is not None:
        try:
            require_same_spaces(world.spec, other.spec, env.id)
        except BaseException:
            world.close()
            raise
    return world


def world_rate(world: World) -> float:
    """Frames per second that the environment itself asks for."""
    rate = getattr(world, "render_fps", None)
    usable = isinstance(rate, int | float) and not isinstance(rate, bool) and 1 <= rate <= MOST_FRAMES_PER_SECOND
    return float(rate) if usable else float(FRAMES_PER_SECOND)  # type: ignore[arg-type]
