"""Single Gymnasium environments side by side, one lane each. B lanes, A actions.

A lane that ended shows its final observation; its next step ignores the action and resets (NEXT_STEP). Every
episode has a seed of its own and its actions are recorded, so that it can be driven again to the same moment.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np

from qfleet.data import Array, State, Step
from qfleet.data.state_reader import FLAGS, saved_array
from qfleet.envs.bounds import OutsideSpace
from qfleet.envs.episodes import EpisodeRecorder, episode_seed
from qfleet.envs.single_env import AnyEnv as AnyEnv
from qfleet.envs.single_env import EnvRaised, SingleEnv, blank, describe, made
from qfleet.errors import EnvError
from qfleet.heartbeat import CLOSE, RENDER, inside
from qfleet.system.child_process import StopRequested


class SyncVectorEnv:
    """A world made of single environments, stepped one after the other in this thread."""

    def __init__(
        self,
        make: Callable[[], AnyEnv],
        num: int,
        *,
        seed: int,
        stream: int,
        name: str = "the environment",
        bins: int | None = None,
        check_bounds: bool = True,
    ) -> None:
        self.num = num
        self._name = name
        self._envs: list[AnyEnv] = []
        try:
            for _ in range(num):
                self._envs.append(made(make, name))
            self._single = SingleEnv(self._envs[0], bins, name, check_bounds=check_bounds)
            self._episodes = EpisodeRecorder(num, seed, stream)
            self._single.learn_masks(self._envs[0], episode_seed(seed, stream, 0, 0))
        except (EnvRaised, OutsideSpace) as error:
            self.close()
            raise self._named(0, error) from getattr(error, "error", error)
        except BaseException:
            self.close()
            raise
        self.spec = self._single.spec
        self.notes = self._single.notes
        self._sent: Array | None = None
        self._last = blank(self.spec, num)

    def reset(self) -> Step:
        """Begin the first episode in every lane."""
        self._episodes.rewind()
        self._sent = None
        self._episodes.begin(np.ones(self.num, bool))
        step = blank(self.spec, self.num)
        for lane in range(self.num):
            self._begin(lane, step)
        return self._checked(step)

    def send(self, action: Array) -> None:
        """Keep the actions; the environments move in `receive`."""
        self._sent = np.array(action)

    def receive(self) -> Step:
        """Step every lane, or reset it if its last step ended the episode."""
        if self._sent is None:
            raise RuntimeError("receive() without send()")
        action = self._sent
        self._sent = None
        fresh = self._last.terminated | self._last.truncated
        step = blank(self.spec, self.num)
        if fresh.any():
            self._episodes.begin(fresh)
        for lane in range(self.num):
            if fresh[lane]:
                self._begin(lane, step)
            else:
                self._advance(lane, int(action[lane]), step)
        self._episodes.record(action, ~fresh)
        return self._checked(step)

    def abandon(self, lanes: Array) -> None:
        """Give these lanes' episodes up (bool [B]): their next step begins a new one, as after a truncation."""
        self._require_idle()
        self._last = replace(self._last, truncated=self._last.truncated | lanes)

    def state_dict(self) -> State:
        """Each lane's episode, seed and actions; `ended` marks lanes that reset on their next step."""
        self._require_idle()
        return {**self._episodes.state_dict(), "ended": self._last.terminated | self._last.truncated}

    def load_state_dict(self, state: State) -> Step:
        """Drive every lane again from its episode's seed."""
        self._episodes.load_state_dict(state, self.spec.num_actions)
        ended = saved_array(state, "ended", FLAGS, (self.num,))
        self._sent = None
        step = blank(self.spec, self.num)
        for lane in range(self.num):
            self._redrive(lane, step)
        # An episode that was given up did not end by itself, and does not when it is driven again.
        step.truncated |= ended & ~step.terminated
        return self._checked(step)

    def render(self) -> Any:
        """What the first lane's environment draws."""
        with inside(RENDER):
            return self._envs[0].render()

    @property
    def render_mode(self) -> str | None:
        """How the first lane's environment says it draws."""
        return getattr(self._envs[0], "render_mode", None)

    @property
    def has_render(self) -> bool:
        """Has the environment a render() of its own? The one that it inherits from Gymnasium draws nothing."""
        kind = type(getattr(self._envs[0], "unwrapped", self._envs[0]))
        return getattr(kind, "render", gym.Env.render) is not gym.Env.render

    def close(self) -> None:
        """Close every environment; one that cannot be closed does not keep the others from it."""
        while self._envs:
            env = self._envs.pop()
            try:
                with inside(CLOSE, len(self._envs)):
                    env.close()
            except StopRequested:
                raise
            except (Exception, SystemExit) as error:
                warnings.warn(f"{self._name}: close() {describe(error)}", stacklevel=2)

    def _redrive(self, lane: int, step: Step) -> None:
        self._begin(lane, step)
        for action in self._episodes.actions(lane).tolist():
            # An environment that is not repeatable may end early: the caller sees it and gives the episode up.
            if step.terminated[lane] or step.truncated[lane]:
                return
            self._advance(lane, action, step)

    def _begin(self, lane: int, step: Step) -> None:
        try:
            self._single.begin(self._envs[lane], int(self._episodes.seed[lane]), step, lane)
        except (EnvRaised, OutsideSpace) as error:
            raise self._named(lane, error) from getattr(error, "error", error)

    def _advance(self, lane: int, action: int, step: Step) -> None:
        try:
            self._single.advance(self._envs[lane], action, step, lane)
        except (EnvRaised, OutsideSpace) as error:
            raise self._named(lane, error) from getattr(error, "error", error)

    def _checked(self, step: Step) -> Step:
        # All lanes at once: asking each would take longer than a small environment's step.
        if not self._single.is_fine(step):
            self._find_fault(step)
        self._last = step
        return step

    def _find_fault(self, step: Step) -> None:
        for lane in range(self.num):
            try:
                self._single.check_numbers(step, lane)
            except OutsideSpace as error:
                raise self._named(lane, error) from error

    def _require_idle(self) -> None:
        if self._sent is not None:
            raise RuntimeError("a step is under way: call receive() first")

    def _named(self, lane: int, error: EnvRaised | OutsideSpace) -> EnvError:
        if isinstance(error, EnvRaised):
            return self._raised(lane, error.call, error.error)
        return EnvError(
            f"{self._name}, lane {lane}: {error.field}: expected {error.expected}, got {error.got}.",
            "The environment returned something outside its own declared spaces.",
            error.fix
            or f"Mend the environment or its declared spaces; `qfleet env check {self._name}` looks for this.",
        )

    def _raised(self, lane: int, call: str, error: BaseException) -> EnvError:
        return EnvError(
            f"{self._name}, lane {lane}: {call}() {describe(error)}",
            f"This came from inside the environment, in episode {self._episodes.number[lane]}"
            f" (seed {self._episodes.seed[lane]}) after {self._episodes.length[lane]} steps.",
            "Mend the environment.",
        )
