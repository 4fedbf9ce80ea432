"""CartPole whose velocities cannot be seen: a network without memory cannot tell which way the pole falls.

scripts/qfleet train examples/hidden_cartpole.py:HiddenCartPole --preset r2d2-small
"""

from typing import Any

import gymnasium as gym
import numpy as np


class HiddenCartPole(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole-v1 that shows the cart's position and the pole's angle only."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(gym.make("CartPole-v1", render_mode=render_mode))
        seen: Any = self.env.observation_space
        self.observation_space = gym.spaces.Box(seen.low[::2], seen.high[::2], dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        """Position and angle."""
        return observation[::2]
