"""An environment whose every step sleeps 5 ms, as slow simulators do; as a command, how fast one of them is alone."""

import argparse
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from benchmarks.pace import Meter

STEP_SECONDS = 0.005
EPISODE_STEPS = 200

Obs = NDArray[np.float32]


class Slow(gym.Env[Obs, Any]):
    """A random walk on a line that pays for being near its middle."""

    observation_space = spaces.Box(-10.0, 10.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        """Begin in the middle; only steps are slow."""
        super().reset(seed=seed)
        self.place, self.time = 0.0, 0
        return self.look(), {}

    def step(self, action: Any) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        """Sleep, then move."""
        time.sleep(STEP_SECONDS)
        self.time += 1
        self.place = float(np.clip(self.place + (0.1 if action else -0.1), -10.0, 10.0))
        return self.look(), 1.0 - abs(self.place), False, self.time >= EPISODE_STEPS, {}

    def look(self) -> Obs:
        """Where it is, and some noise."""
        return np.array([self.place, *self.np_random.uniform(-1, 1, 3)], np.float32)


gym.register("Slow-v0", "benchmarks.slow_env:Slow")


def alone(seconds: float) -> None:
    """Step one of them as fast as it goes."""
    env, meter, steps = Slow(), Meter(seconds, warm_updates=0), 0
    env.reset(seed=0)
    while not meter(steps, 0):
        if env.step(steps % 2)[3]:
            env.reset()
        steps += 1


def main() -> None:
    """Read the arguments and step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    alone(parser.parse_args().seconds)


if __name__ == "__main__":
    main()
