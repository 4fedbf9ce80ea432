"""One-file loops that do what CleanRL's dqn_atari and pqn_atari_envpool do. Run inside `.venv-peers`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.buffers import ReplayBuffer
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import peer_worlds
from benchmarks.pace import CAPACITY, EPSILON, LEARN_START, Meter

ACTIONS = 6
DISCOUNT = 0.99


class Network(nn.Module):
    """The network of Mnih et al. 2015 as PyTorch lays it out; PQN's has layer normalisation."""

    def __init__(self, *, normalised: bool = False) -> None:
        super().__init__()

        def norm(*shape: int) -> nn.Module:
            return nn.LayerNorm(shape) if normalised else nn.Identity()

        self.layers = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4),
            norm(32, 20, 20),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            norm(64, 9, 9),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            norm(64, 7, 7),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            norm(512),
            nn.ReLU(),
            nn.Linear(512, ACTIONS),
        )

    def forward(self, obs: Tensor) -> Tensor:
        """Values per action."""
        values: Tensor = self.layers(obs / 255.0)
        return values


def values_of(net: nn.Module, obs: Tensor, action: Tensor) -> Tensor:
    """Values of the actions taken."""
    values: Tensor = net(obs).gather(1, action).squeeze(1)
    return values


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, net: nn.Module, clip_norm: float | None = None) -> None:
    """One update."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
    optimizer.step()


# DQN: one environment, a replay by Stable-Baselines3, default Adam


def dqn(meter: Meter) -> None:
    """One step at a time, an update every fourth, a target copy every thousandth."""
    envs = gym.vector.SyncVectorEnv([peer_worlds.pong], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    rng, update = np.random.default_rng(0), 0
    spaces = (envs.single_observation_space, envs.single_action_space)
    memory = ReplayBuffer(CAPACITY, *spaces, "cpu", optimize_memory_usage=True, handle_timeout_termination=False)
    online, target = Network(), Network()
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-4)
    obs, _ = envs.reset(seed=0)
    step = 0
    while not meter(step, update):
        obs = walk(envs, memory, online, rng, obs)
        step += 1
        if step > LEARN_START and step % 4 == 0:
            descend(optimizer, dqn_loss(online, target, memory.sample(32)), online)
            update += 1
        if step % 1_000 == 0:
            target.load_state_dict(online.state_dict())


def walk(envs: Any, memory: Any, net: nn.Module, rng: np.random.Generator, obs: Any) -> Any:
    """One step into the replay; the observation after it."""
    best: Callable[[], Any] = lambda: net(torch.Tensor(obs)).argmax(1).numpy()  # noqa: E731
    action = rng.integers(0, ACTIONS, 1) if rng.random() < EPSILON else best()
    ahead, reward, terminated, truncated, infos = envs.step(action)
    final = ahead.copy()
    for lane in np.flatnonzero(terminated | truncated):
        final[lane] = infos["final_obs"][lane]
    memory.add(obs, final, action, reward, terminated, [{}])
    return ahead


def dqn_loss(online: nn.Module, target: nn.Module, data: Any) -> Tensor:
    """The error of one-step targets: Huber's, as everybody has it here; CleanRL's own is squared."""
    with torch.no_grad():
        best = target(data.next_observations).amax(1)
        goal = data.rewards.flatten() + DISCOUNT * best * (1 - data.dones.flatten())
    return functional.smooth_l1_loss(values_of(online, data.observations, data.actions), goal)


# PQN: 8 native environments, 128 rows, 4 epochs of 4 minibatches, RAdam


LANES, ROWS, EPOCHS, MINIBATCHES, TRACE = 8, 128, 4, 4, 0.65


@dataclass
class Rows:
    """One stretch of fresh experience, time-major."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    ended: Tensor
    value: Tensor


def blank() -> Rows:
    """Room for a stretch, in floats as CleanRL has it."""
    shape = (ROWS, LANES)
    pictures, action = torch.zeros(*shape, 4, 84, 84), torch.zeros(shape, dtype=torch.int64)
    return Rows(pictures, action, torch.zeros(shape), torch.zeros(shape), torch.zeros(shape))


def pqn(meter: Meter) -> None:
    """Act for a stretch, learn from it, forget it."""
    envs, rng, rows = peer_worlds.native_pong(LANES, threads=2), np.random.default_rng(0), blank()
    net = Network(normalised=True)
    optimizer = torch.optim.RAdam(net.parameters(), lr=2.5e-4)
    obs, ended, step, update = torch.Tensor(envs.reset(seed=0)[0]), torch.zeros(LANES), 0, 0
    while not meter(step, update):
        obs, ended = gather(envs, net, rows, obs, ended)
        step += ROWS * LANES
        goal = traces(net, rows, obs, ended)
        for _ in range(EPOCHS):
            for part in np.array_split(rng.permutation(ROWS * LANES), MINIBATCHES):
                pictures, action = rows.obs.flatten(0, 1)[part], rows.action.flatten()[part, None]
                descend(optimizer, functional.mse_loss(values_of(net, pictures, action), goal[part]), net, 10.0)
                update += 1


def gather(envs: Any, net: nn.Module, rows: Rows, obs: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
    """Fill the rows; the observation after them and whether it began an episode."""
    for row in range(ROWS):
        rows.obs[row], rows.ended[row] = obs, ended
        with torch.no_grad():
            rows.value[row], best = net(obs).max(1)
        random = torch.rand(LANES) < EPSILON
        rows.action[row] = torch.where(random, torch.randint(0, ACTIONS, (LANES,)), best)
        pictures, reward, terminated, truncated, _ = envs.step(rows.action[row].numpy())
        rows.reward[row] = torch.as_tensor(reward)
        obs, ended = torch.Tensor(pictures), torch.Tensor(terminated | truncated)
    return obs, ended


@torch.no_grad()
def traces(net: nn.Module, rows: Rows, obs: Tensor, ended: Tensor) -> Tensor:
    """Q(lambda) returns, newest first."""
    goal = torch.zeros_like(rows.reward)
    goal[-1] = rows.reward[-1] + DISCOUNT * net(obs).amax(1) * (1 - ended)
    for row in reversed(range(ROWS - 1)):
        mixed = TRACE * goal[row + 1] + (1 - TRACE) * rows.value[row + 1]
        goal[row] = rows.reward[row] + DISCOUNT * mixed * (1 - rows.ended[row + 1])
    return goal.flatten()


if __name__ == "__main__":
    peer_worlds.run(__doc__, {"pong": dqn, "pqn": pqn})
