"""Worlds whose true values are known, learned through the real actor, replay and learner."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from qfleet.act import Actor, Policy
from qfleet.act.explore import EpsilonGreedyExplorer
from qfleet.data import Array
from qfleet.envs.episodes import TRAIN
from qfleet.envs.sync_vector import SyncVectorEnv
from qfleet.learn import Learner, make_learner
from qfleet.nets import make_net
from qfleet.plan.schema import (
    Algo,
    BufferReplay,
    CopyTarget,
    DoubleRule,
    Env,
    MaxRule,
    MlpTorso,
    Net,
    Plan,
    PrioritizedSampler,
    Sgd,
    UniformSampler,
)
from qfleet.qlearn import Scalar
from qfleet.replay import make_replay
from qfleet.testing.toys import Constant

GAMMA = 0.9
Rule = MaxRule | DoubleRule
Sampler = UniformSampler | PrioritizedSampler


def make_plan(rule: Rule, sampler: Sampler, n_step: int = 1, learning_rate: float = 0.2) -> Plan:
    """A linear network, so that the values are a table and only the targets decide them."""
    return Plan(
        env=Env(id="none", num=4),
        algo=Algo(
            rule=rule, n_step=n_step, discount=GAMMA, batch_size=256, target=CopyTarget(every_updates=1), loss="mse"
        ),
        optim=Sgd(learning_rate=learning_rate, clip_norm=None),
        net=Net(torso=MlpTorso(sizes=())),
        replay=BufferReplay(capacity=4_000, sampler=sampler),
    )


def learn(plan: Plan, make: Callable[[], gym.Env[Any, Any]], rows: int, updates: int) -> Learner:
    """Act at random, fill the replay, and learn from it."""
    world = SyncVectorEnv(make, plan.env.num, seed=1, stream=TRAIN)
    net = make_net(plan.net, world.spec, normalize="off", seed=1)
    learner = make_learner(plan, world.spec, net, torch.device("cpu"))
    policy = Policy(learner.net, Scalar(), world.spec.actions)
    actor = Actor(world, policy, EpsilonGreedyExplorer(lambda step: 1.0, world.spec.actions), np.random.default_rng(1))
    replay = make_replay(plan, world.spec, world.num, np.random.default_rng(2))
    actor.start()
    for _ in range(rows):
        actor.send()
        replay.add(actor.receive()[0])
    for _ in range(updates):
        batch = replay.sample(plan.algo.batch_size)
        assert batch is not None
        replay.update(batch.ids, learner.update(batch).priority)
    return learner


def values(learner: Learner, obs: Array) -> Array:
    with torch.no_grad():
        out: Array = learner.net(torch.from_numpy(obs)).numpy()
    return out


class DeadAtTheLimit(Constant):
    """The wrong way: the time limit counts as termination."""

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, truncated, False, info


@pytest.mark.parametrize("sampler", [UniformSampler(), PrioritizedSampler()], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("rule", [MaxRule(), DoubleRule()], ids=["max", "double"])
def test_a_time_limit_does_not_lower_the_values(rule: Rule, n_step: int, sampler: Sampler) -> None:
    learner = learn(make_plan(rule, sampler, n_step), Constant, rows=60, updates=400)
    assert values(learner, np.ones((1, 1), np.float32)) == pytest.approx(np.full((1, 2), 10.0), abs=0.05)


def test_a_time_limit_treated_as_termination_does() -> None:
    # Both actions do the same, and one step in ten ends the episode: Q = 1 + 0.9 * 0.9 Q, so 5.26.
    learner = learn(make_plan(MaxRule(), UniformSampler(), learning_rate=0.03), DeadAtTheLimit, rows=440, updates=1_000)
    wrong = values(learner, np.ones((1, 1), np.float32))
    assert wrong == pytest.approx(np.full((1, 2), 5.26), abs=0.15)


class Chain(gym.Env[Array, Any]):
    """Five states in a row: action 1 goes right, action 0 left; right of the last is the goal, worth 1. 12 steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (5,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.at = self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.steps = int(self.np_random.integers(5)), 0
        return self.show(), {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.at = max(0, self.at + (1 if action == 1 else -1))
        goal = self.at == 5
        return self.show(), float(goal), goal, not goal and self.steps >= 12, {}

    def show(self) -> Array:
        row: Array = np.eye(6, 5, dtype=np.float32)[self.at]
        return row


def true_values() -> Array:
    """Value iteration on the chain."""
    best = np.zeros(6)
    for _ in range(500):
        best = np.array([*(max(q) for q in ((GAMMA * best[max(0, s - 1)], right(best, s)) for s in range(5))), 0.0])
    return np.array([[GAMMA * best[max(0, s - 1)], right(best, s)] for s in range(5)])


def right(best: Array, state: int) -> float:
    return 1.0 if state == 4 else float(GAMMA * best[state + 1])


@pytest.mark.parametrize("sampler", [UniformSampler(), PrioritizedSampler()], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("rule", [MaxRule(), DoubleRule()], ids=["max", "double"])
def test_the_chains_values_are_found(rule: Rule, sampler: Sampler) -> None:
    truth = true_values()
    assert truth[:, 1] == pytest.approx([GAMMA**4, GAMMA**3, GAMMA**2, GAMMA, 1.0])
    learner = learn(make_plan(rule, sampler, learning_rate=0.5), Chain, rows=400, updates=1_500)
    assert values(learner, np.eye(5, dtype=np.float32)) == pytest.approx(truth, abs=0.05)
