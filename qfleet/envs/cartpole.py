"""Gymnasium's own vector CartPole: all lanes in one set of arrays, which together with a generator are its state."""

from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from qfleet.data import Array, Spec, State, Step
from qfleet.data.state_reader import (
    FLAGS,
    FLOATS,
    INTEGERS,
    check_lanes,
    restore_generator,
    saved_array,
    saved_count,
    saved_numbers,
)
from qfleet.envs.options import Option
from qfleet.plan.part import Positive

OPTIONS = {"max_episode_steps": Option(Positive, 500), "sutton_barto_reward": Option(bool, False)}
_PHILOX = {"counter": 4, "key": 2, "buffer": 4}  # words of 64 bits


class _Trusted(spaces.MultiDiscrete):
    """Takes any action: `step` asks each time, which costs a sixth of it, and a policy's argmax is never outside."""

    def contains(self, x: Any) -> bool:
        return True


class CartPole:
    """CartPole-v0 and -v1 for many lanes at once."""

    def __init__(
        self, num: int, *, seed: int, stream: int, max_episode_steps: int = 500, sutton_barto_reward: bool = False
    ) -> None:
        self.num = num
        self.spec = Spec((4,), "float32", (2,))
        self._entropy = (seed, stream)
        self._env: Any = CartPoleVectorEnv(num, max_episode_steps, sutton_barto_reward=sutton_barto_reward)
        self._env.action_space = _Trusted(np.full(num, 2))
        self._sent: Array | None = None
        self._last = self._seen(np.zeros((num, 4), np.float32))

    def reset(self) -> Step:
        """Begin the first episode in every lane, from the first seed."""
        # Philox, because its state is arrays of 64 bits, which any file format keeps.
        self._env.np_random = np.random.Generator(np.random.Philox(np.random.SeedSequence(self._entropy)))
        self._sent = None
        self._last = self._seen(self._env.reset()[0])
        return self._last

    def send(self, action: Array) -> None:
        """Keep the actions; the arithmetic is done in `receive`."""
        self._sent = np.array(action)

    def receive(self) -> Step:
        """Step every lane."""
        if self._sent is None:
            raise RuntimeError("receive() without send()")
        obs, reward, terminated, truncated, _ = self._env.step(self._sent)
        self._sent = None
        self._last = Step(obs, reward, terminated, truncated)
        return self._last

    def abandon(self, lanes: Array) -> None:
        """Give these lanes' episodes up (bool [B]): their next step begins a new one, as after a truncation."""
        self._require_idle()
        self._last = replace(self._last, truncated=self._last.truncated | lanes)
        self._env.prev_done = self._env.prev_done | lanes

    def state_dict(self) -> State:
        """The arrays and the generator."""
        self._require_idle()
        generator = self._env.np_random.bit_generator.state
        return {
            "state": self._env.state.copy(),
            "steps": self._env.steps.copy(),
            "reward": self._last.reward.copy(),
            "terminated": self._last.terminated.copy(),
            "truncated": self._last.truncated.copy(),
            "counter": generator["state"]["counter"].copy(),
            "key": generator["state"]["key"].copy(),
            "buffer": generator["buffer"].copy(),
            "buffer_pos": int(generator["buffer_pos"]),
        }

    def load_state_dict(self, state: State) -> Step:
        """Put the arrays and the generator back."""
        num = self.num
        env = self._env
        check_lanes(len(saved_array(state, "steps", INTEGERS, (None,))), num)
        steps = saved_numbers(state, "steps", (num,), 0, env.max_episode_steps).astype(np.int32)
        place = saved_array(state, "state", FLOATS, (4, num)).astype(np.float64)
        reward = saved_array(state, "reward", FLOATS, (num,)).astype(np.float32)
        terminated, truncated = (saved_array(state, name, FLAGS, (num,)).copy() for name in ("terminated", "truncated"))
        words = {name: saved_array(state, name, "u", (size,)) for name, size in _PHILOX.items()}
        position = saved_count(state, "buffer_pos")
        self.reset()
        generator = env.np_random.bit_generator.state
        generator["state"] = {"counter": words["counter"], "key": words["key"]}
        generator["buffer"] = words["buffer"]
        generator["buffer_pos"] = position
        restore_generator(env.np_random, generator)
        env.state = place
        env.steps = steps
        env.prev_done = terminated | truncated
        self._last = Step(env.state.T.astype(np.float32), reward, terminated, truncated)
        return self._last

    def close(self) -> None:
        """Nothing is held."""
        self._env.close()

    def _seen(self, obs: Array) -> Step:
        return Step(obs, np.zeros(self.num, np.float32), np.zeros(self.num, bool), np.zeros(self.num, bool))

    def _require_idle(self) -> None:
        if self._sent is not None:
            raise RuntimeError("a step is under way: call receive() first")
