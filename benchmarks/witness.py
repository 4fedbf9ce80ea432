"""A world that can tell whether what was learned from ever happened: every observation says whose step it is."""

import os
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from qfleet.data import Array, Batch

LENGTHS = (7, 3, 12, 1, 5)  # of episodes, in turn; every other one is cut off instead of ending


class Witness(gym.Env[Array, Any]):
    """Shows (who, episode, step): `who` is drawn anew by every copy in every process, below 2**24 to be exact."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, 2.0**24, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.who = int.from_bytes(os.urandom(3), "little")
        self.episode, self.at = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """The next episode."""
        super().reset(seed=seed)
        self.episode, self.at = self.episode + 1, 0
        return self._shown(), {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Count one on; the reward names the step."""
        self.at += 1
        over = self.at >= LENGTHS[self.episode % len(LENGTHS)]
        ends = over and self.episode % 2 == 0
        return self._shown(), float(self.at), ends, over and not ends, {}

    def _shown(self) -> Array:
        return np.array([self.who, self.episode, self.at], np.float32)


def untrue(batch: Batch, n: int, gamma: float) -> list[str]:
    """What in this batch of n-step transitions cannot have happened."""
    found = []
    rows = zip(batch.obs, batch.next_obs, batch.reward, batch.discount, strict=True)
    for (who, episode, step), (next_who, next_episode, next_step), reward, discount in rows:
        length, ahead = LENGTHS[int(episode) % len(LENGTHS)], int(next_step - step)
        ended = int(next_step) == length and int(episode) % 2 == 0
        expected = sum(gamma**k * (step + 1 + k) for k in range(ahead))
        wrong = (
            (who, episode) != (next_who, next_episode)
            or not 1 <= ahead <= n
            or abs(reward - expected) > 1e-3
            or abs(discount - (0.0 if ended else gamma**ahead)) > 1e-5
        )
        if wrong:
            found.append(f"{who:.0f}:{episode:.0f}:{step:.0f} -> {next_who:.0f}:{next_episode:.0f}:{next_step:.0f}")
    return found
