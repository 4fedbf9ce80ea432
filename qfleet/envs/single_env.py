"""Gymnasium environments as lanes of a world: converting actions, and checking what they return. A actions."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from qfleet.data import Array, Spec, Step
from qfleet.envs.bounds import OutsideSpace
from qfleet.envs.spaces import adapt_actions, adapt_obs
from qfleet.envs.step_values import as_flag, as_info, as_mask, as_reward, info_number, reset_step
from qfleet.errors import UsageError, redact_error
from qfleet.frames import user_location
from qfleet.heartbeat import MAKE, RESET, STEP, enter_env_call, env_call, leave_env_call
from qfleet.system.child_process import StopRequested

AnyEnv = gym.Env[Any, Any]


class EnvRaised(Exception):
    """A method of an environment (`call`) raised `error`, or called sys.exit()."""

    def __init__(self, call: str, error: BaseException) -> None:
        super().__init__(call, error)
        self.call = call
        self.error = error


def describe_error(error: BaseException) -> str:
    """An error of an environment and where it was raised: `raised ValueError: text at my_env.py:12 in step`."""
    first_line = (str(error).splitlines() or [""])[0]
    exit_note = " (it called sys.exit)" if isinstance(error, SystemExit) else ""
    return f"raised {type(error).__name__}: {first_line}{exit_note}{user_location(error)}"


class EnvAdapter:
    """Resets and steps environments with the spaces of `env`, and writes each result into a row of a `Step`."""

    def __init__(
        self,
        env: AnyEnv,
        bins: int | None,
        name: str,
        *,
        masked: bool = False,
        check_bounds: bool = True,
        info: tuple[str, ...] = (),
    ) -> None:
        self._info = info  # the numbers to read from the info of every step
        self._obs = adapt_obs(env.observation_space, name)
        self.bounds = self._obs.bounds if check_bounds else None
        self.notes = self._obs.notes
        self._actions = adapt_actions(env.action_space, bins, name)
        self.spec = Spec(self._obs.shape, self._obs.dtype, self._actions.counts, masked=masked)
        self._check_finite = self._obs.dtype != "uint8"

    def detect_masks(self, env: AnyEnv, seed: int) -> None:
        """Reset an environment to find out whether it gives action masks."""
        masked = "action_mask" in _reset(env, seed)[1]
        self.spec = Spec(self._obs.shape, self._obs.dtype, self._actions.counts, masked=masked)

    def reset(self, env: AnyEnv, seed: int, out: Step, lane: int) -> None:
        """Reset an environment and write the result into a row of `out`."""
        obs, info = _reset(env, seed, lane)
        out.reward[lane] = 0.0
        out.terminated[lane] = False
        out.truncated[lane] = False
        self._write_obs(lane, obs, info, out)

    def step(self, env: AnyEnv, action: int, out: Step, lane: int) -> None:
        """Step an environment and write the result into a row of `out`."""
        enter_env_call(STEP, lane)
        try:
            obs, reward, terminated, truncated, info = env.step(self._actions.decode(action))
        except StopRequested:
            raise
        except (Exception, SystemExit) as error:
            redact_error(error)
            raise EnvRaised("step", error) from error
        finally:
            leave_env_call()
        out.reward[lane] = reward if type(reward) is float else as_reward(reward)
        out.terminated[lane] = terminated if type(terminated) is bool else as_flag("terminated", terminated)
        out.truncated[lane] = truncated if type(truncated) is bool else as_flag("truncated", truncated)
        self._write_obs(lane, obs, as_info(info), out)
        if out.info is not None:
            out.info[lane] = [info_number(info, name) for name in self._info]

    def all_valid(self, step: Step) -> bool:
        """Are all rewards and observations finite and within the bounds of their space?"""
        if not np.isfinite(step.reward).all():
            return False
        if self.bounds is not None and not self.bounds.contain(step.obs):
            return False
        # Values within finite bounds are finite.
        bounded = self.bounds is not None and self.bounds.finite
        return bounded or not self._check_finite or bool(np.isfinite(step.obs).all())

    def check_values(self, step: Step, lane: int) -> None:
        """Refuse a lane's reward or observation that is not finite or out of bounds."""
        check_finite("reward", step.reward[lane])
        if self._check_finite:
            check_finite("observation", step.obs[lane])
        if self.bounds is not None:
            self.bounds.check(step.obs[lane])

    def _write_obs(self, lane: int, obs: Any, info: dict[str, Any], out: Step) -> None:
        out.obs[lane] = self._obs.encode(obs)
        if out.mask is not None:
            out.mask[lane] = self._mask(info, bool(out.terminated[lane]))

    def _mask(self, info: dict[str, Any], terminated: bool) -> Array:
        num = self.spec.num_actions
        given = info.get("action_mask")
        if given is None and not terminated:
            raise OutsideSpace('info["action_mask"]', "a mask with every reset and step, as with the first", "none")
        mask = np.ones(num, bool) if given is None else as_mask(given, num)
        if not mask.any():
            if not terminated:
                raise OutsideSpace('info["action_mask"]', "at least one allowed action", "none allowed")
            mask[:] = True  # no action is chosen after the end, but a maximum over no actions would not be finite
        return mask


def make_checked_env(make: Callable[[], AnyEnv], name: str) -> AnyEnv:
    """Make one environment; refuse an object that is not a single Gymnasium environment."""
    with env_call(MAKE):
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


def defines_render(env: AnyEnv) -> bool:
    """Does the environment define render()? The one inherited from Gymnasium draws nothing."""
    kind = type(getattr(env, "unwrapped", env))
    return getattr(kind, "render", gym.Env.render) is not gym.Env.render


def declared_render_modes(env: AnyEnv) -> tuple[str, ...]:
    """The render modes of an environment: the one it was made with, or those that its metadata lists."""
    if not defines_render(env):
        return ()
    if isinstance(chosen := getattr(env, "render_mode", None), str):
        return (chosen,)
    metadata = getattr(env, "metadata", None)
    listed = metadata.get("render_modes") if isinstance(metadata, dict) else None
    modes = tuple(mode for mode in listed or () if isinstance(mode, str))
    return modes or ("rgb_array",)


def blank_step(spec: Spec, num: int, num_info: int = 0) -> Step:
    """A `Step` of zeros in new arrays: callers keep the steps they receive."""
    mask = np.ones((num, spec.num_actions), bool) if spec.masked else None
    step = reset_step(np.zeros((num, *spec.obs), spec.dtype), mask)
    step.info = np.full((num, num_info), np.nan) if num_info else None
    return step


def check_finite(field: str, values: Array) -> None:
    """Refuse NaN and infinity."""
    if not np.isfinite(values).all():
        row = np.ravel(values)
        raise OutsideSpace(field, "finite numbers", str(row[~np.isfinite(row)][0]))


def _reset(env: AnyEnv, seed: int, lane: int = 0) -> tuple[Any, dict[str, Any]]:
    enter_env_call(RESET, lane)
    try:
        obs, info = env.reset(seed=seed)
    except StopRequested:
        raise
    except (Exception, SystemExit) as error:
        redact_error(error)
        raise EnvRaised("reset", error) from error
    finally:
        leave_env_call()
    return obs, as_info(info)
