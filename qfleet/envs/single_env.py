"""One Gymnasium environment as one lane of a world: what it is told, and what of its answers is let in. A actions."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from qfleet.data import Array, Spec, Step
from qfleet.envs.answers import as_flag, as_info, as_mask, as_reward
from qfleet.envs.bounds import OutsideSpace
from qfleet.envs.spaces import adapt_actions, adapt_obs
from qfleet.errors import UsageError, conceal
from qfleet.frames import place
from qfleet.heartbeat import MAKE, RESET, STEP, enter, inside, leave
from qfleet.system.child_process import StopRequested

AnyEnv = gym.Env[Any, Any]


class EnvRaised(Exception):
    """A method of an environment (`call`) raised, or called sys.exit(); the exception is this one's cause."""

    def __init__(self, call: str, error: BaseException) -> None:
        super().__init__(call, error)
        self.call = call
        self.error = error


def describe(error: BaseException) -> str:
    """What an environment's code did, and where: `raised ValueError: text at my_env.py:12 in step`."""
    first = (str(error).splitlines() or [""])[0]
    called = " (it called sys.exit)" if isinstance(error, SystemExit) else ""
    return f"raised {type(error).__name__}: {first}{called}{place(error)}"


class SingleEnv:
    """Resets and steps environments like `env`, writing what they answer into a row of a `Step`."""

    def __init__(
        self, env: AnyEnv, bins: int | None, name: str, *, masked: bool = False, check_bounds: bool = True
    ) -> None:
        self._obs = adapt_obs(env.observation_space, name)
        self.bounds = self._obs.bounds if check_bounds else None
        self.notes = self._obs.notes
        self._actions = adapt_actions(env.action_space, bins, name)
        self.spec = Spec(self._obs.shape, self._obs.dtype, self._actions.counts, masked=masked)
        self.finite = self._obs.dtype != "uint8"  # can its observations be anything else?

    def learn_masks(self, env: AnyEnv, seed: int) -> None:
        """Reset an environment, to see whether it gives masks."""
        masked = "action_mask" in _reset(env, seed)[1]
        self.spec = Spec(self._obs.shape, self._obs.dtype, self._actions.counts, masked=masked)

    def begin(self, env: AnyEnv, seed: int, step: Step, lane: int) -> None:
        """Begin the episode of this seed."""
        obs, info = _reset(env, seed, lane)
        step.reward[lane] = 0.0
        step.terminated[lane] = False
        step.truncated[lane] = False
        self._show(lane, obs, info, step)

    def advance(self, env: AnyEnv, action: int, step: Step, lane: int) -> None:
        """Take one step."""
        enter(STEP, lane)
        try:
            obs, reward, terminated, truncated, info = env.step(self._actions.decode(action))
        except StopRequested:
            raise
        except (Exception, SystemExit) as error:
            conceal(error)
            raise EnvRaised("step", error) from error
        finally:
            leave()
        step.reward[lane] = reward if type(reward) is float else as_reward(reward)
        step.terminated[lane] = terminated if type(terminated) is bool else as_flag("terminated", terminated)
        step.truncated[lane] = truncated if type(truncated) is bool else as_flag("truncated", truncated)
        self._show(lane, obs, as_info(info), step)

    def is_fine(self, step: Step) -> bool:
        """Are the numbers of all lanes finite, and within the bounds of their space?"""
        if not np.isfinite(step.reward).all():
            return False
        if self.bounds is not None and not self.bounds.contain(step.obs):
            return False
        # What is within finite bounds is finite.
        bounded = self.bounds is not None and self.bounds.finite
        return bounded or not self.finite or bool(np.isfinite(step.obs).all())

    def check_numbers(self, step: Step, lane: int) -> None:
        """Nothing but finite numbers within their bounds goes on from here."""
        check_finite("reward", step.reward[lane])
        if self.finite:
            check_finite("observation", step.obs[lane])
        if self.bounds is not None:
            self.bounds.check(step.obs[lane])

    def _show(self, lane: int, obs: Any, info: dict[str, Any], step: Step) -> None:
        step.obs[lane] = self._obs.encode(obs)
        if step.mask is not None:
            step.mask[lane] = self._mask(info, bool(step.terminated[lane]))

    def _mask(self, info: dict[str, Any], terminated: bool) -> Array:
        num = self.spec.num_actions
        given = info.get("action_mask")
        if given is None and not terminated:
            raise OutsideSpace('info["action_mask"]', "a mask with every reset and step, as with the first", "none")
        mask = np.ones(num, bool) if given is None else as_mask(given, num)
        if not mask.any():
            if not terminated:
                raise OutsideSpace('info["action_mask"]', "at least one allowed action", "none allowed")
            mask[:] = True  # nothing is chosen after the end, but a maximum over no actions would not be finite
        return mask


def made(make: Callable[[], AnyEnv], name: str) -> AnyEnv:
    """One environment, if that is what it is."""
    with inside(MAKE):
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


def _reset(env: AnyEnv, seed: int, lane: int = 0) -> tuple[Any, dict[str, Any]]:
    enter(RESET, lane)
    try:
        obs, info = env.reset(seed=seed)
    except StopRequested:
        raise
    except (Exception, SystemExit) as error:
        conceal(error)
        raise EnvRaised("reset", error) from error
    finally:
        leave()
    return obs, as_info(info)
