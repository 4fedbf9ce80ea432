"""Deep Q-learning on one page: Double DQN learns to balance a pole. Needs torch, numpy and gymnasium.

    python examples/one_file_dqn.py

A network Q(s, a) guesses the discounted sum of rewards to come after action a in state s. Many copies of the world
("lanes") act by the best guess, or now and then at random. What happens is remembered, and the guesses are pulled
towards  reward + discount * Q(next state, best next action).  Shapes: B lanes, N items of a batch, A actions.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

Array = NDArray[Any]
Rng = np.random.Generator
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Settings:
    """Everything there is to choose."""

    lanes: int = 8
    capacity: int = 50_000  # steps that are remembered
    learn_start_steps: int = 1_000
    steps_per_update: int = 2
    batch_size: int = 64
    discount: float = 0.99
    learning_rate: float = 5e-4
    tau: float = 0.02  # how fast the target network follows
    epsilon_end: float = 0.05
    epsilon_steps: int = 5_000


class Replay:
    """Rows of all lanes in a ring. A row: what was seen, what was done, what came of it.

    `discount` is 0 where the world ended for good (the pole fell) and 1 elsewhere, also where only the time was up.
    A `last` row shows the final observation of an episode. It is no step; the row before it reads its value there.
    """

    def __init__(self, capacity: int, lanes: int) -> None:
        rows = 2 * -(-capacity // lanes) + 2  # twice, because with episodes of one step every other row is a last one
        self.obs = np.zeros((rows, lanes, 4), np.float32)
        self.action = np.zeros((rows, lanes), np.int64)
        self.reward = np.zeros((rows, lanes), np.float32)
        self.discount = np.zeros((rows, lanes), np.float32)
        self.last = np.zeros((rows, lanes), np.bool_)
        self.items = np.zeros((capacity + lanes, 2), np.int64)  # (row, lane) of the steps that can be learned from
        self.capacity, self.num_rows, self.num_items = capacity, 0, 0

    def add(self, obs: Array, action: Array, reward: Array, discount: Array, last: Array) -> None:
        """Write a row [B, ...]; the steps of the row before it are now complete, for their next observation is here."""
        row, before = self.num_rows % len(self.obs), (self.num_rows - 1) % len(self.obs)
        self.obs[row], self.action[row], self.reward[row] = obs, action, reward
        self.discount[row], self.last[row] = discount, last
        if self.num_rows > 0:
            for lane in np.flatnonzero(~self.last[before]):
                self.items[self.num_items % len(self.items)] = before, lane
                self.num_items += 1
        self.num_rows += 1

    def sample(self, size: int, rng: Rng) -> Batch:
        """A batch of remembered steps, each as likely as any other."""
        number = rng.integers(max(0, self.num_items - self.capacity), self.num_items, size)
        row, lane = self.items[number % len(self.items)].T
        columns = (self.obs, self.action, self.reward, self.discount)
        now = [torch.from_numpy(column[row, lane]) for column in columns]
        return *now, torch.from_numpy(self.obs[(row + 1) % len(self.obs), lane])


def make_net() -> nn.Sequential:
    """Four numbers in, the value of each of two actions out."""
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def act(net: nn.Module, obs: Array, epsilon: float, rng: Rng) -> Array:
    """The best action in every lane [B], but with probability epsilon a random one."""
    with torch.inference_mode():
        values = net(torch.from_numpy(obs)).numpy()
    explore, draw = rng.random((2, len(obs)))
    random: Array = (draw * values.shape[1]).astype(np.int64)
    return np.where(explore < epsilon, random, values.argmax(1))


def update(net: nn.Module, target: nn.Module, optimizer: Optimizer, batch: Batch, settings: Settings) -> float:
    """One step of learning; returns the loss."""
    obs, action, reward, discount, next_obs = batch
    with torch.no_grad():  # Double DQN: the network chooses the next action, its slow copy says what that is worth
        best = net(next_obs).argmax(1, keepdim=True)
        goal = reward + settings.discount * discount * target(next_obs).gather(1, best).squeeze(1)
    value = net(obs).gather(1, action.unsqueeze(1)).squeeze(1)
    loss = nn.functional.smooth_l1_loss(value, goal)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
            slow.lerp_(fast, settings.tau)
    return loss.item()


def train(
    settings: Settings, envs: CartPoleVectorEnv, net: nn.Module, explore_rng: Rng, sample_rng: Rng
) -> Iterator[tuple[int, list[float]]]:
    """Act and learn for ever; after each step of all lanes: the number of steps so far, and the new losses."""
    target = copy.deepcopy(net).requires_grad_(False)
    optimizer = Adam(net.parameters(), settings.learning_rate, fused=True)
    replay = Replay(settings.capacity, settings.lanes)
    obs, last = envs.reset()[0], np.zeros(settings.lanes, np.bool_)
    steps = updates = 0
    while True:
        # Choose, then learn, then step: where worlds run in threads of their own, they step while the network learns.
        epsilon = 1.0 + min(1.0, steps / settings.epsilon_steps) * (settings.epsilon_end - 1.0)
        action = act(net, obs, epsilon, explore_rng)
        steps += int((~last).sum())
        losses = []
        while updates < (steps - settings.learn_start_steps) // settings.steps_per_update:
            batch = replay.sample(settings.batch_size, sample_rng)
            losses.append(update(net, target, optimizer, batch, settings))
            updates += 1
        # An ended lane shows its final observation now; its next step ignores the action and begins a new episode.
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        replay.add(obs, action, reward, ~terminated, last)
        obs, last = next_obs, terminated | truncated
        yield steps, losses


def evaluate(net: nn.Module, episodes: int, seed: int) -> float:
    """Mean return of so many greedy episodes, side by side."""
    envs, rng = CartPoleVectorEnv(episodes), np.random.default_rng(seed)
    obs, _ = envs.reset(seed=seed)
    returns, alive = np.zeros(episodes), np.ones(episodes, np.bool_)
    while alive.any():
        obs, reward, terminated, truncated, _ = envs.step(act(net, obs, 0.0, rng))
        returns += reward * alive
        alive &= ~(terminated | truncated)
    return float(returns.mean())


def main(seed: int = 1, max_steps: int = 100_000, check_steps: int = 2_000, goal: float = 475.0) -> float:
    """Train until the pole stays up; returns the mean of 20 episodes not seen before."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # so small a network is faster on one core
    settings, net = Settings(), make_net()
    envs = CartPoleVectorEnv(settings.lanes)
    envs.reset(seed=seed)
    explore_rng, sample_rng = (np.random.default_rng((seed, purpose)) for purpose in range(2))
    checked = 0
    for steps, losses in train(settings, envs, net, explore_rng, sample_rng):
        if losses and steps - checked >= check_steps:
            checked, mean = steps, evaluate(net, episodes=20, seed=seed)
            print(f"{steps:7d} steps  loss {losses[-1]:.4f}  mean return of 20 greedy episodes {mean:5.1f}")
            if mean >= goal or steps >= max_steps:
                break
    score = evaluate(net, episodes=20, seed=seed + 1)
    print(f"20 new episodes: {score:.1f}")
    return score


if __name__ == "__main__":
    main()
