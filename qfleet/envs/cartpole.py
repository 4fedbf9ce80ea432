"""Gymnasium's vector CartPole: all lanes in one set of arrays, which with a random generator are its whole state."""

from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from qfleet.data import Array, Spec, State, Step
from qfleet.data.space_format import EnvSpaces
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
from qfleet.envs.step_values import require_idle, reset_step
from qfleet.plan.part import Positive

OPTIONS = {"max_episode_steps": Option(Positive, 500), "sutton_barto_reward": Option(bool, False)}
_PHILOX = {"counter": 4, "key": 2, "buffer": 4}  # sizes of uint64 arrays


class _UncheckedActions(spaces.MultiDiscrete):
    """Contains every action: the check takes a sixth of a `step`, and a policy's argmax is always valid."""

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
        self.spaces = EnvSpaces(self._env.single_observation_space, self._env.single_action_space)
        self._env.action_space = _UncheckedActions(np.full(num, 2))
        self._sent: Array | None = None
        self._last = reset_step(np.zeros((num, 4), np.float32))

    def reset(self) -> Step:
        """Begin the first episode in every lane, from the first seed."""
        # Philox, because its state is arrays of 64-bit integers, which any file format can store.
        self._env.np_random = np.random.Generator(np.random.Philox(np.random.SeedSequence(self._entropy)))
        self._sent = None
        self._last = reset_step(self._env.reset()[0])
        return self._last

    def send(self, action: Array) -> None:
        """Keep the actions; the lanes are stepped in `receive`."""
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
        """Give up the episodes of these lanes (bool [B]): their next step begins a new one, as after a truncation."""
        require_idle(self._sent)
        self._last = replace(self._last, truncated=self._last.truncated | lanes)
        self._env.prev_done = self._env.prev_done | lanes

    def state_dict(self) -> State:
        """The arrays and the random generator."""
        require_idle(self._sent)
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
        """Restore the arrays and the random generator."""
        num = self.num
        env = self._env
        check_lanes(len(saved_array(state, "steps", INTEGERS, (None,))), num)
        steps = saved_numbers(state, "steps", (num,), 0, env.max_episode_steps).astype(np.int32)
        physics = saved_array(state, "state", FLOATS, (4, num)).astype(np.float64)
        reward = saved_array(state, "reward", FLOATS, (num,)).astype(np.float32)
        terminated, truncated = (saved_array(state, name, FLAGS, (num,)).copy() for name in ("terminated", "truncated"))
        philox = {name: saved_array(state, name, "u", (size,)) for name, size in _PHILOX.items()}
        position = saved_count(state, "buffer_pos")
        self.reset()
        generator = env.np_random.bit_generator.state
        generator["state"] = {"counter": philox["counter"], "key": philox["key"]}
        generator["buffer"] = philox["buffer"]
        generator["buffer_pos"] = position
        restore_generator(env.np_random, generator)
        env.state = physics
        env.steps = steps
        env.prev_done = terminated | truncated
        self._last = Step(env.state.T.astype(np.float32), reward, terminated, truncated)
        return self._last

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
