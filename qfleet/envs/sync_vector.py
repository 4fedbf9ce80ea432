"""A world of single Gymnasium environments, one per lane. B lanes, A actions.

A lane whose episode ended shows its final observation; its next step ignores the action and resets (NEXT_STEP). Every
episode has a seed of its own and its actions are recorded, so that they can be repeated to restore the same state.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from qfleet.data import Array, State, Step
from qfleet.data.space_format import EnvSpaces
from qfleet.data.state_reader import FLAGS, saved_array
from qfleet.envs.bounds import OutsideSpace
from qfleet.envs.episodes import EpisodeRecorder, episode_seed
from qfleet.envs.single_env import AnyEnv as AnyEnv
from qfleet.envs.single_env import EnvAdapter, EnvRaised, blank_step, defines_render, describe_error, make_checked_env
from qfleet.envs.step_values import require_idle
from qfleet.errors import EnvError
from qfleet.heartbeat import CLOSE, RENDER, env_call
from qfleet.system.child_process import StopRequested


class SyncVectorEnv:
    """A world of single environments, stepped one after the other in this thread."""

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
        info: tuple[str, ...] = (),
    ) -> None:
        self.num = num
        self._num_info = len(info)
        self._name = name
        self._envs: list[AnyEnv] = []
        try:
            for _ in range(num):
                self._envs.append(make_checked_env(make, name))
            self._adapter = EnvAdapter(self._envs[0], bins, name, check_bounds=check_bounds, info=info)
            self._episodes = EpisodeRecorder(num, seed, stream)
            self._adapter.detect_masks(self._envs[0], episode_seed(seed, stream, 0, 0))
        except (EnvRaised, OutsideSpace) as error:
            self.close()
            raise self._env_error(0, error) from getattr(error, "error", error)
        except BaseException:
            self.close()
            raise
        self.spec = self._adapter.spec
        first = self._envs[0]
        self.spaces = EnvSpaces(first.observation_space, first.action_space, self.spec.masked)
        self.notes = self._adapter.notes
        self._sent: Array | None = None
        self._last = blank_step(self.spec, num, self._num_info)

    def reset(self) -> Step:
        """Begin the first episode in every lane."""
        self._episodes.rewind()
        self._sent = None
        self._episodes.begin(np.ones(self.num, bool))
        step = blank_step(self.spec, self.num, self._num_info)
        for lane in range(self.num):
            self._reset_lane(lane, step)
        return self._checked(step)

    def send(self, action: Array) -> None:
        """Keep the actions; the environments are stepped in `receive`."""
        self._sent = np.array(action)

    def receive(self) -> Step:
        """Step every lane, or reset it if its episode has ended."""
        if self._sent is None:
            raise RuntimeError("receive() without send()")
        action = self._sent
        self._sent = None
        ended = self._last.terminated | self._last.truncated
        step = blank_step(self.spec, self.num, self._num_info)
        if ended.any():
            self._episodes.begin(ended)
        for lane in range(self.num):
            if ended[lane]:
                self._reset_lane(lane, step)
            else:
                self._step_lane(lane, int(action[lane]), step)
        self._episodes.record(action, ~ended)
        return self._checked(step)

    def abandon(self, lanes: Array) -> None:
        """Give up the episodes of these lanes (bool [B]): their next step begins a new one, as after a truncation."""
        require_idle(self._sent)
        self._last = replace(self._last, truncated=self._last.truncated | lanes)

    def state_dict(self) -> State:
        """Each lane's episode, seed and actions; `ended` marks lanes that reset on their next step."""
        require_idle(self._sent)
        return {**self._episodes.state_dict(), "ended": self._last.terminated | self._last.truncated}

    def load_state_dict(self, state: State) -> Step:
        """Restore every lane by repeating its recorded actions from its episode's seed."""
        self._episodes.load_state_dict(state, self.spec.num_actions)
        ended = saved_array(state, "ended", FLAGS, (self.num,))
        self._sent = None
        step = blank_step(self.spec, self.num, self._num_info)
        for lane in range(self.num):
            self._redrive(lane, step)
        # An abandoned episode had not ended by itself, and does not end when it is repeated.
        step.truncated |= ended & ~step.terminated
        return self._checked(step)

    def render(self) -> Any:
        """What the first lane's environment draws."""
        with env_call(RENDER):
            return self._envs[0].render()

    @property
    def render_mode(self) -> str | None:
        """The render mode of the first lane's environment."""
        return getattr(self._envs[0], "render_mode", None)

    @property
    def has_render(self) -> bool:
        """Does the environment define render()?"""
        return defines_render(self._envs[0])

    @property
    def render_fps(self) -> Any:
        """The frames per second that the first lane's environment asks for."""
        return (getattr(self._envs[0], "metadata", None) or {}).get("render_fps")

    def close(self) -> None:
        """Close every environment, even if close() of another one fails."""
        while self._envs:
            env = self._envs.pop()
            try:
                with env_call(CLOSE, len(self._envs)):
                    env.close()
            except StopRequested:
                raise
            except (Exception, SystemExit) as error:
                warnings.warn(f"{self._name}: close() {describe_error(error)}", stacklevel=2)

    def _redrive(self, lane: int, step: Step) -> None:
        self._reset_lane(lane, step)
        for action in self._episodes.actions(lane).tolist():
            # A non-deterministic environment may end early: the caller notices and abandons the episode.
            if step.terminated[lane] or step.truncated[lane]:
                return
            self._step_lane(lane, action, step)

    def _reset_lane(self, lane: int, step: Step) -> None:
        try:
            self._adapter.reset(self._envs[lane], int(self._episodes.seed[lane]), step, lane)
        except (EnvRaised, OutsideSpace) as error:
            raise self._env_error(lane, error) from getattr(error, "error", error)

    def _step_lane(self, lane: int, action: int, step: Step) -> None:
        try:
            self._adapter.step(self._envs[lane], action, step, lane)
        except (EnvRaised, OutsideSpace) as error:
            raise self._env_error(lane, error) from getattr(error, "error", error)

    def _checked(self, step: Step) -> Step:
        # All lanes together: checking each would take longer than a step of a small environment.
        if not self._adapter.all_valid(step):
            self._raise_for_invalid_lane(step)
        self._last = step
        return step

    def _raise_for_invalid_lane(self, step: Step) -> None:
        for lane in range(self.num):
            try:
                self._adapter.check_values(step, lane)
            except OutsideSpace as error:
                raise self._env_error(lane, error) from error

    def _env_error(self, lane: int, error: EnvRaised | OutsideSpace) -> EnvError:
        if isinstance(error, EnvRaised):
            return EnvError(
                f"{self._name}, lane {lane}: {error.call}() {describe_error(error.error)}",
                f"This came from inside the environment, in episode {self._episodes.number[lane]}"
                f" (seed {self._episodes.seed[lane]}) after {self._episodes.length[lane]} steps.",
                "Mend the environment.",
            )
        return EnvError(
            f"{self._name}, lane {lane}: {error.field}: expected {error.expected}, got {error.got}.",
            "The environment returned something outside its own declared spaces.",
            error.fix
            or f"Mend the environment or its declared spaces; `qfleet env check {self._name}` looks for this.",
        )
