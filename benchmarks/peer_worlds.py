"""What peers play and how their contests begin, from parts that their own environment has."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from benchmarks.pace import PONG, Meter, say

Contest = Callable[[Meter], None]


def run(description: str | None, contests: dict[str, Contest]) -> None:
    """Read which contest, for how long and on how many torch threads; hold it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("contest", choices=sorted(contests))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, help="of torch; its own choice if not given")
    given = parser.parse_args()
    torch = importlib.import_module("torch")
    if given.threads:
        torch.set_num_threads(given.threads)
    say({"kind": "settings", "threads": torch.get_num_threads(), "precision": "float32"})
    contests[given.contest](Meter(given.seconds))


def register_atari() -> None:
    """Make ALE's ids known to Gymnasium."""
    gym.register_envs(importlib.import_module("ale_py"))


def pong() -> gym.Env[Any, Any]:
    """Pong by Gymnasium's own wrappers: 84x84 grey, every fourth frame, stacks of four, clipped rewards."""
    register_atari()
    env: gym.Env[Any, Any] = gym.wrappers.AtariPreprocessing(gym.make(PONG), screen_size=84)
    env = gym.wrappers.TransformReward(env, lambda reward: float(np.sign(float(reward))))
    return gym.wrappers.FrameStackObservation(env, 4, padding_type="zero")


def native_pong(num: int, threads: int) -> Any:
    """Pong by ALE's own threads, which is what became of EnvPool's Atari."""
    vector = importlib.import_module("ale_py.vector_env").AtariVectorEnv
    return vector("pong", num, num_threads=threads, repeat_action_probability=0.0, reward_clipping=True)


class MinAtar(gym.Env[Any, Any]):
    """One MinAtar game; planes [C, 10, 10] of 0 and 1."""

    def __init__(self, game: str) -> None:
        self.game = importlib.import_module("minatar").Environment(game)
        height, width, channels = self.game.state_shape()
        self.action_space = spaces.Discrete(self.game.num_actions())
        self.observation_space = spaces.Box(0, 1, (channels, height, width), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game."""
        super().reset(seed=seed)
        self.game.seed(seed)
        self.game.reset()
        return self.planes(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Play one frame."""
        reward, over = self.game.act(action)
        return self.planes(), float(reward), bool(over), False, {}

    def planes(self) -> Any:
        """The grid, channels first."""
        return np.ascontiguousarray(self.game.state().transpose(2, 0, 1)).astype(np.uint8)
