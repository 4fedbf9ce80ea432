"""Stable-Baselines3's DQN against the clock: Pong, CartPole and MinAtar. Runs inside `.venv-peers`."""

from typing import Any

import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import ConvertCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecFrameStack
from torch import Tensor, nn

from benchmarks import peer_worlds
from benchmarks.pace import CAPACITY, EPSILON, LEARN_START, PONG, Meter

MANY_STEPS = 100_000_000
FIXED: dict[str, Any] = {"exploration_initial_eps": EPSILON, "exploration_final_eps": EPSILON, "device": "cpu"}


class Grid(BaseFeaturesExtractor):  # type: ignore[misc]
    """The network of Young and Tian 2019: one 3x3 convolution and 128 units."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, 128)
        self.convolution = nn.Conv2d(observation_space.shape[0], 16, 3)
        self.dense = nn.Linear(16 * 8 * 8, 128)

    def forward(self, obs: Tensor) -> Tensor:
        """Features of a batch of grids."""
        return torch.relu(self.dense(torch.relu(self.convolution(obs)).flatten(1)))


def learn(model: DQN, meter: Meter) -> None:
    """Train until the meter has seen enough."""
    model.learn(MANY_STEPS, ConvertCallback(lambda seen, _: not meter(seen["self"].num_timesteps, model._n_updates)))


def pong(meter: Meter, num: int) -> None:
    """Its own Atari wrappers; with several environments as many updates follow as their steps call for."""
    peer_worlds.register_atari()
    lanes = VecFrameStack(make_atari_env(PONG, n_envs=num, seed=0), n_stack=4)
    pacing = {"train_freq": 4, "gradient_steps": 1} if num == 1 else {"train_freq": 1, "gradient_steps": num // 4}
    store = {"buffer_size": CAPACITY, "learning_starts": LEARN_START, "target_update_interval": 1_000}
    learn(DQN("CnnPolicy", lanes, learning_rate=1e-4, batch_size=32, **store, **pacing, **FIXED), meter)


def cartpole(meter: Meter) -> None:
    """MLP 120-84, batch 128, 8 environments, one update per 4 steps."""
    lanes = make_vec_env("CartPole-v1", n_envs=8, seed=0)
    pacing = {"train_freq": 1, "gradient_steps": 2, "learning_starts": LEARN_START, "buffer_size": 50_000}
    kwargs = {"policy_kwargs": {"net_arch": [120, 84]}}
    learn(DQN("MlpPolicy", lanes, learning_rate=1e-3, batch_size=128, **pacing, **kwargs, **FIXED), meter)


def minatar(meter: Meter) -> None:
    """MinAtar Breakout, batch 32, 8 environments, one update per 4 steps."""
    lanes = make_vec_env(lambda: peer_worlds.MinAtar("breakout"), n_envs=8, seed=0)
    pacing = {"train_freq": 1, "gradient_steps": 2, "learning_starts": LEARN_START, "buffer_size": 100_000}
    net = {"features_extractor_class": Grid, "net_arch": [], "normalize_images": False}
    learn(DQN("CnnPolicy", lanes, learning_rate=2.5e-4, batch_size=32, policy_kwargs=net, **pacing, **FIXED), meter)


CONTESTS: dict[str, peer_worlds.Contest] = {
    "pong1": lambda meter: pong(meter, 1),
    "pong8": lambda meter: pong(meter, 8),
    "cartpole": cartpole,
    "minatar": minatar,
}

if __name__ == "__main__":
    peer_worlds.run(__doc__, CONTESTS)
