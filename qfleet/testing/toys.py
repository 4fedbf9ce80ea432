"""Small environments with known values or known faults, for tests; importing this registers them as `toys/X-v0`."""

import ctypes
import os
import sys
import time
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from qfleet.data import Array

Info = dict[str, Any]


class Constant(gym.Env[Array, Any]):
    """One observation, reward 1, truncated after 10 steps: at gamma 0.9 Q is 10, or 5.26 if truncation ends returns."""

    def __init__(self, limit: int = 10) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._limit = limit
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        """Begin again."""
        super().reset(seed=seed)
        self._step = 0
        return np.ones(1, np.float32), {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, Info]:
        """Return the same observation until the limit."""
        self._step += 1
        return np.ones(1, np.float32), 1.0, False, self._step >= self._limit, {}


class Counting(gym.Env[Array, Any]):
    """Observes (copy, episode, step); episode k lasts `lengths[k % len]` steps and is terminated if k is even.

    Copies are numbered from 0 in creation sequence since `Counting.made` was set to 0. The reward is 100 * episode +
    step, which identifies the step it belongs to.
    """

    made: ClassVar[int] = 0

    def __init__(self, lengths: tuple[int, ...] = (3, 5, 1, 4), num_actions: int = 3) -> None:
        self.observation_space = spaces.Box(0.0, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(num_actions)
        self._lengths = lengths
        self._copy = Counting.made
        self._episode = -1
        self._step = 0
        self.seeds: list[int | None] = []
        self.actions: list[int] = []
        Counting.made += 1

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        """Begin the next episode; a known seed repeats its episode."""
        super().reset(seed=seed)
        if seed not in self.seeds:
            self.seeds.append(seed)
        self._episode = self.seeds.index(seed)
        self._step = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, Info]:
        """Increase the step by one."""
        self.actions.append(action)
        self._step += 1
        over = self._step >= self._lengths[self._episode % len(self._lengths)]
        terminated = over and self._episode % 2 == 0
        return self._obs(), 100.0 * self._episode + self._step, terminated, over and not terminated, {}

    def _obs(self) -> Array:
        return np.array([self._copy, self._episode, self._step], np.float32)


class Random(gym.Env[Array, Any]):
    """A random walk decided by the seed; terminated at distance 2, truncated after 50 steps. Base of other toys."""

    size: ClassVar[int] = 2

    def __init__(self, num_actions: int = 4) -> None:
        self.observation_space: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (self.size,), np.float32)
        self.action_space: spaces.Space[Any] = spaces.Discrete(num_actions)
        self._place = np.zeros(self.size, np.float32)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Return to the middle."""
        super().reset(seed=seed)
        self._place = self._draw(0.1)
        self._step = 0
        return self._show(), self._info()

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        """Walk one random step, plus a small step by the action."""
        self._place = self._place + self._draw(0.3) + np.float32(0.01) * np.float32(np.sum(action))
        self._step += 1
        far = bool(np.abs(self._place).max() > 2)
        return self._show(), float(self._place.sum()), far, self._step >= 50, self._info()

    def _draw(self, scale: float) -> Array:
        return self.np_random.normal(0, scale, self.size).astype(np.float32)

    def _show(self) -> Any:
        return self._place.copy()

    def _info(self) -> Info:
        return {}


class Masked(Random):
    """Forbids one action at each step, in rotation; with `allow=False` it forbids all after the first step."""

    def __init__(self, allow: bool = True) -> None:
        super().__init__()
        self._allow = allow

    def _info(self) -> Info:
        mask = np.ones(4, np.int8)
        mask[self._step % 4] = 0
        return {"action_mask": mask if self._allow or self._step == 0 else np.zeros(4, np.int8)}


class DictObs(Random):
    """Observes a Dict of a position and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict({"far": spaces.Discrete(2), "place": self.observation_space})

    def _show(self) -> Any:
        return {"far": int(np.abs(self._place).max() > 1), "place": self._place.copy()}


class BoxAction(Random):
    """Takes two continuous actions; `last` holds the newest."""

    size: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(np.array([-1, 0], np.float32), np.array([1, 4], np.float32))
        self.last = np.zeros(2, np.float32)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        """Store the action, then walk."""
        self.last = np.array(action)
        return super().step(action)


class NotFinite(Random):
    """Returns NaN in its observation, or infinity as its reward, at step `at`."""

    def __init__(self, field: str = "obs", at: int = 3) -> None:
        super().__init__()
        self._field = field
        self._at = at

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        """Walk; at step `at` return a value that is not finite."""
        obs, reward, terminated, truncated, info = super().step(action)
        if self._step == self._at:
            obs, reward = (obs * np.nan, reward) if self._field == "obs" else (obs, np.inf)
        return obs, reward, terminated, truncated, info


class Misshapen(Random):
    """Returns an observation of the wrong shape (or dtype) at step 3."""

    def __init__(self, fault: str = "shape") -> None:
        super().__init__()
        self._fault = fault

    def _show(self) -> Any:
        if self._step != 3:
            return super()._show()
        return np.zeros(7, np.float32) if self._fault == "shape" else np.array(["a", "b"])


class Raising(Random):
    """Raises in `step` number `at`; at 0, in `reset`."""

    def __init__(self, at: int = 3) -> None:
        super().__init__()
        self._at = at

    def _show(self) -> Any:
        if self._step == self._at:
            raise ZeroDivisionError("the toy broke")
        return super()._show()


class Unrepeatable(Random):
    """Ignores its seed."""

    def _draw(self, scale: float) -> Array:
        return (np.frombuffer(os.urandom(self.size), np.uint8).astype(np.float32) - 127) * np.float32(scale / 100)


class Traced(gym.Env[Array, Any]):
    """Observes its seed in two halves and the step; the seed decides its length, 3 to 9. The reward is the step.

    Subclasses fail at step `at` (0: in reset) of one episode in `every`, depending on the seed.
    """

    def __init__(self, every: int = 1, at: int = 2, fault: str = "") -> None:
        self.observation_space = spaces.Box(0.0, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._every = every
        self._at = at
        self._fault = fault
        self._seed = 0
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Begin the episode of the seed."""
        self._seed = seed or 0
        self._step = 0
        return self._answer()[0], {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        """Increase the step; episodes of odd length are terminated, of even length truncated."""
        self._step += 1
        obs, reward = self._answer()
        length = self.length(self._seed)
        over = self._step >= length
        return obs, reward, over and length % 2 == 1, over and length % 2 == 0, {}

    @staticmethod
    def length(seed: int) -> int:
        """The number of steps in the episode of a seed."""
        return 3 + (seed >> 2) % 7

    @staticmethod
    def shown(seed: int, step: int) -> tuple[int, int, int]:
        """The observation at a step; halves, because float32 cannot hold a seed."""
        return seed >> 16, seed & 0xFFFF, step

    def _answer(self) -> tuple[Any, Any]:
        obs = np.array(self.shown(self._seed, self._step), np.float32)
        reward = float(self._step)
        if self._step == self._at and (self._seed >> 2) % self._every == 0:
            return self._fail(obs, reward)
        return obs, reward

    def _fail(self, obs: Array, reward: float) -> tuple[Any, Any]:
        return obs, reward


class Breaking(Traced):
    """Raises, and from then on in every reset; with fault="exit", SystemExit."""

    def _fail(self, obs: Array, reward: float) -> tuple[Any, Any]:
        self._every = 1
        self._at = 0
        if self._fault == "exit":
            sys.exit("the toy has had enough")
        raise ZeroDivisionError("the toy broke")


class Lying(Traced):
    """Returns values outside its spaces: fault is shape, dtype, nan or reward."""

    def _fail(self, obs: Array, reward: float) -> tuple[Any, Any]:
        wrong = {"shape": np.zeros(7, np.float32), "dtype": np.array(["a", "b", "c"]), "nan": obs * np.nan}
        return wrong.get(self._fault, obs), np.inf if self._fault == "reward" else reward


class Hanging(Traced):
    """Does not return; with fault="hard" it also holds the GIL, so that no other thread of its process runs."""

    def _fail(self, obs: Array, reward: float) -> tuple[Any, Any]:
        if self._fault == "hard":
            ctypes.PyDLL(None).sleep(3_600)
        time.sleep(3_600)
        return obs, reward


class Crashing(Traced):
    """Ends its process by a segmentation fault, or with fault="exit" by os._exit."""

    def _fail(self, obs: Array, reward: float) -> tuple[Any, Any]:
        if self._fault == "exit":
            os._exit(7)
        ctypes.string_at(0)
        return obs, reward


class Leaking(Traced):
    """Leaks 4 MB, or with fault="flood" prints 3 MB."""

    kept: ClassVar[list[bytes]] = []

    def _fail(self, obs: Array, reward: float) -> tuple[Any, Any]:
        if self._fault == "flood":
            sys.stdout.write("flood\n" * 500_000)
            sys.stdout.flush()
        else:
            Leaking.kept.append(os.urandom(1) * 4_000_000)
        return obs, reward


for _toy in (
    Constant, Counting, Random, Masked, DictObs, BoxAction, NotFinite, Misshapen, Raising, Unrepeatable,
    Traced, Breaking, Lying, Hanging, Crashing, Leaking,
):  # fmt: skip
    if f"toys/{_toy.__name__}-v0" not in gym.registry:
        gym.register(f"toys/{_toy.__name__}-v0", entry_point=f"{__name__}:{_toy.__name__}")
