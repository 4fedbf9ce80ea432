"""Single Gymnasium environments side by side, one lane each. B lanes, A actions.

A lane that ended shows its final observation; its next step ignores the action and resets (NEXT_STEP). Every
episode has a seed of its own and its actions are recorded, so that it can be driven again to the same moment.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np

from qfleet.data import Array, Spec, State, Step
from qfleet.data.saved import FLAGS, saved_array
from qfleet.envs.adapt import ActionAdapter, ObsAdapter, OutsideSpace, adapt_actions, adapt_obs
from qfleet.envs.episodes import Episodes, episode_seed
from qfleet.errors import EnvError, UsageError

AnyEnv = gym.Env[Any, Any]


class Lanes:
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
    ) -> None:
        self.num, self._name = num, name
        self._envs: list[AnyEnv] = []
        try:
            for _ in range(num):
                self._envs.append(_made(make, name))
            self._obs: ObsAdapter = adapt_obs(self._envs[0].observation_space, name)
            self._actions: ActionAdapter = adapt_actions(self._envs[0].action_space, bins, name)
            self._episodes = Episodes(num, seed, stream)
            masked = "action_mask" in self._reset_env(0, episode_seed(seed, stream, 0, 0))[1]
        except BaseException:
            self.close()
            raise
        self.spec = Spec(self._obs.shape, self._obs.dtype, self._actions.counts, masked=masked)
        self._finite = self._obs.dtype != "uint8"
        self._sent: Array | None = None
        self._last = self._blank()

    def reset(self) -> Step:
        """Begin the first episode in every lane."""
        self._episodes.rewind()
        self._sent = None
        self._episodes.begin(np.ones(self.num, bool))
        step = self._blank()
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
        action, self._sent = self._sent, None
        fresh = self._last.terminated | self._last.truncated
        step = self._blank()
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
        step = self._blank()
        for lane in range(self.num):
            self._redrive(lane, step)
        # An episode that was given up did not end by itself, and does not when it is driven again.
        step.truncated |= ended & ~step.terminated
        return self._checked(step)

    def render(self) -> Any:
        """What the first lane's environment draws."""
        return self._envs[0].render()

    def close(self) -> None:
        """Close every environment."""
        while self._envs:
            self._envs.pop().close()

    def _redrive(self, lane: int, step: Step) -> None:
        self._begin(lane, step)
        for action in self._episodes.actions(lane).tolist():
            # An environment that is not repeatable may end early: the caller sees it and gives the episode up.
            if step.terminated[lane] or step.truncated[lane]:
                return
            self._advance(lane, action, step)

    def _begin(self, lane: int, step: Step) -> None:
        obs, info = self._reset_env(lane, int(self._episodes.seed[lane]))
        step.reward[lane], step.terminated[lane], step.truncated[lane] = 0.0, False, False
        self._show(lane, obs, info, step)

    def _advance(self, lane: int, action: int, step: Step) -> None:
        try:
            obs, reward, terminated, truncated, info = self._envs[lane].step(self._actions.decode(action))
            step.reward[lane] = float(reward)
        except Exception as error:
            raise self._raised(lane, "step", error) from error
        step.terminated[lane], step.truncated[lane] = terminated, truncated
        self._show(lane, obs, info, step)

    def _reset_env(self, lane: int, seed: int) -> tuple[Any, dict[str, Any]]:
        try:
            obs, info = self._envs[lane].reset(seed=seed)
        except Exception as error:
            raise self._raised(lane, "reset", error) from error
        return obs, info

    def _show(self, lane: int, obs: Any, info: dict[str, Any], step: Step) -> None:
        try:
            step.obs[lane] = self._obs.encode(obs)
            if step.mask is not None:
                step.mask[lane] = self._mask(info, bool(step.terminated[lane]))
        except OutsideSpace as error:
            raise self._outside(lane, error.field, error.expected, error.got) from error

    def _mask(self, info: dict[str, Any], terminated: bool) -> Array:
        num = self.spec.num_actions
        given = info.get("action_mask")
        if given is None and not terminated:
            raise OutsideSpace('info["action_mask"]', "a mask with every reset and step, as with the first", "none")
        mask = np.ones(num, bool) if given is None else np.asarray(given).astype(bool).ravel()
        if mask.shape != (num,):
            raise OutsideSpace('info["action_mask"] size', str(num), str(mask.size))
        if not mask.any():
            if not terminated:
                raise OutsideSpace('info["action_mask"]', "at least one allowed action", "none allowed")
            mask[:] = True  # nothing is chosen after the end, but a maximum over no actions would not be finite
        return mask

    def _blank(self) -> Step:
        # New arrays each time: callers keep what they were given.
        spec, num = self.spec, self.num
        flags = np.zeros((2, num), bool)
        mask = np.ones((num, spec.num_actions), bool) if spec.masked else None
        return Step(np.zeros((num, *spec.obs), spec.dtype), np.zeros(num, np.float32), flags[0], flags[1], mask)

    def _checked(self, step: Step) -> Step:
        if not np.isfinite(step.reward).all():
            self._not_finite("reward", step.reward)
        if self._finite and not np.isfinite(step.obs).all():
            self._not_finite("observation", step.obs)
        self._last = step
        return step

    def _not_finite(self, field: str, values: Array) -> None:
        lane = int(np.flatnonzero(~np.isfinite(values.reshape(self.num, -1)).all(axis=1))[0])
        row = np.ravel(values[lane])
        raise self._outside(lane, field, "finite numbers", str(row[~np.isfinite(row)][0]))

    def _require_idle(self) -> None:
        if self._sent is not None:
            raise RuntimeError("a step is under way: call receive() first")

    def _outside(self, lane: int, field: str, expected: str, got: str) -> EnvError:
        return EnvError(
            f"{self._name}, lane {lane}: {field}: expected {expected}, got {got}.",
            "The environment returned something outside its own declared spaces.",
            f"Mend the environment or its declared spaces; `qfleet env check {self._name}` looks for this.",
        )

    def _raised(self, lane: int, call: str, error: Exception) -> EnvError:
        return EnvError(
            f"{self._name}, lane {lane}: {call}() raised {type(error).__name__}: {error}",
            f"The exception came from inside the environment, in episode {self._episodes.number[lane]}"
            f" (seed {self._episodes.seed[lane]}) after {self._episodes.length[lane]} steps.",
            "Mend the environment; its own traceback is this error's cause.",
        )


def _made(make: Callable[[], AnyEnv], name: str) -> AnyEnv:
    env = make()
    missing = [part for part in ("observation_space", "action_space", "reset", "step") if not hasattr(env, part)]
    if missing:
        raise UsageError(
            f"env.id={name!r} made a {type(env).__name__}, which is not a Gymnasium environment.",
            f"It lacks {', '.join(missing)}.",
            "Give a gymnasium.Env class or a function that returns an environment.",
        )
    return env
