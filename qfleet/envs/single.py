"""One Gymnasium environment as one lane of a world: what it is told, and what of its answers is let in. A actions."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from qfleet.data import Array, Spec, Step
from qfleet.envs.adapt import OutsideSpace, adapt_actions, adapt_obs
from qfleet.errors import UsageError, conceal

AnyEnv = gym.Env[Any, Any]


class Raised(Exception):
    """A method of an environment (`call`) raised; the exception is this one's cause."""

    def __init__(self, call: str, error: Exception) -> None:
        super().__init__(call, error)
        self.call, self.error = call, error


class Single:
    """Resets and steps environments like `env`, writing what they answer into a row of a `Step`."""

    def __init__(self, env: AnyEnv, bins: int | None, name: str, *, masked: bool = False) -> None:
        self._obs = adapt_obs(env.observation_space, name)
        self._actions = adapt_actions(env.action_space, bins, name)
        self.spec = Spec(self._obs.shape, self._obs.dtype, self._actions.counts, masked=masked)
        self.finite = self._obs.dtype != "uint8"  # can its observations be anything else?

    def learn_masks(self, env: AnyEnv, seed: int) -> None:
        """Reset an environment, to see whether it gives masks."""
        masked = "action_mask" in _reset(env, seed)[1]
        self.spec = Spec(self._obs.shape, self._obs.dtype, self._actions.counts, masked=masked)

    def begin(self, env: AnyEnv, seed: int, step: Step, lane: int) -> None:
        """Begin the episode of this seed."""
        obs, info = _reset(env, seed)
        step.reward[lane], step.terminated[lane], step.truncated[lane] = 0.0, False, False
        self._show(lane, obs, info, step)

    def advance(self, env: AnyEnv, action: int, step: Step, lane: int) -> None:
        """Take one step."""
        try:
            obs, reward, terminated, truncated, info = env.step(self._actions.decode(action))
            step.reward[lane] = float(reward)
        except Exception as error:
            conceal(error)
            raise Raised("step", error) from error
        step.terminated[lane], step.truncated[lane] = terminated, truncated
        self._show(lane, obs, info, step)

    def check_finite(self, step: Step, lane: int) -> None:
        """Nothing but numbers goes on from here."""
        check_finite("reward", step.reward[lane])
        if self.finite:
            check_finite("observation", step.obs[lane])

    def _show(self, lane: int, obs: Any, info: dict[str, Any], step: Step) -> None:
        step.obs[lane] = self._obs.encode(obs)
        if step.mask is not None:
            step.mask[lane] = self._mask(info, bool(step.terminated[lane]))

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


def made(make: Callable[[], AnyEnv], name: str) -> AnyEnv:
    """One environment, if that is what it is."""
    env: Any = make()
    missing = [part for part in ("observation_space", "action_space", "reset", "step") if not hasattr(env, part)]
    if missing:
        raise UsageError(
            f"env.id={name!r} made a {type(env).__name__}, which is not a Gymnasium environment.",
            f"It lacks {', '.join(missing)}.",
            "Give a gymnasium.Env class or a function that returns an environment.",
        )
    if isinstance(env, gym.vector.VectorEnv):
        raise UsageError(
            f"env.id={name!r} made a {type(env).__name__}: {env.num_envs} environments as one.",
            "qfleet makes the copies by itself, and must see each of them.",
            f"Return one environment (gym.make, not gym.make_vec), and set env.num={env.num_envs}.",
        )
    one: AnyEnv = env
    return one


def blank(spec: Spec, num: int) -> Step:
    """A `Step` in which nothing happened; its arrays are new, because callers keep what they were given."""
    flags = np.zeros((2, num), bool)
    mask = np.ones((num, spec.num_actions), bool) if spec.masked else None
    return Step(np.zeros((num, *spec.obs), spec.dtype), np.zeros(num, np.float32), flags[0], flags[1], mask)


def check_finite(field: str, values: Array) -> None:
    """Refuse NaN and infinity."""
    if not np.isfinite(values).all():
        row = np.ravel(values)
        raise OutsideSpace(field, "finite numbers", str(row[~np.isfinite(row)][0]))


def _reset(env: AnyEnv, seed: int) -> tuple[Any, dict[str, Any]]:
    try:
        obs, info = env.reset(seed=seed)
    except Exception as error:
        conceal(error)
        raise Raised("reset", error) from error
    return obs, info
