"""Learning from small data sets of CartPole-v1: seeds, budgets and thresholds are in each test.

A fixed controller was recorded, which balances for 500 steps, or one that acts at random most of the time.
"""

from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from qfleet import make_plan, train
from qfleet.data import Spec
from qfleet.datasets.format import Description, RecordedEpisode, open_dataset, spec_columns, write_dataset
from qfleet.datasets.format.columns import WHOLE
from qfleet.datasets.storage import open_place

ENV = "CartPole-v1"
SPEC = Spec((4,), "float32", (2,))
CONTROLLER = np.array([0.0, 0.2, 1.0, 1.0])  # push towards where the weighted sum of the observation is positive
TARGETS = {"algo.n_step": 3, "algo.target.type": "copy", "algo.target.every_updates": 500}


def play(env: gym.Env, number: int, epsilon: float) -> RecordedEpisode:  # type: ignore[type-arg]
    """An episode of the controller, at random with probability epsilon."""
    rng = np.random.default_rng([7, number])
    rows = [env.reset(seed=int(rng.integers(2**31)))[0]]
    actions = []
    ended = cut = False
    while not (ended or cut):
        chosen = int(rows[-1] @ CONTROLLER > 0) if rng.random() >= epsilon else int(rng.integers(2))
        obs, _, ended, cut, _ = env.step(chosen)
        rows.append(obs)
        actions.append(chosen)
    num = len(actions)
    obs = {WHOLE: np.stack(rows).astype(np.float32)}
    return RecordedEpisode(f"e{number}", obs, np.array(actions), np.ones(num), terminated=ended, truncated=not ended)


def record(url: Path, epsilons: tuple[float, ...], steps: int) -> float:
    """A data set whose episodes have these epsilons in turn; returns the mean return."""

    def episodes() -> Iterator[RecordedEpisode]:
        left = steps
        number = 0
        env = gym.make(ENV)
        while left > 0:
            found = play(env, number, epsilons[number % len(epsilons)])
            left -= found.num_steps
            number += 1
            yield found

    write_dataset(open_place(str(url)), Description(ENV, SPEC, spec_columns(SPEC), None), episodes(), {})
    return float(np.mean([row.undiscounted_return for row in open_dataset(str(url)).index]))


def learn(url: Path, seed: int, updates: int, **settings: object) -> float:
    """The mean of 100 test episodes of the last checkpoint: it is the only one that was evaluated."""
    steps = 64 * updates
    shared = {"replay.type": "dataset", "replay.split": "all", "replay.path": str(url), "seed": seed}
    shared |= {"algo.batch_size": 64, "optim.learning_rate": 5e-4, "until.steps": steps, "until.score": None}
    quiet = {"eval.every_steps": steps, "eval.episodes": 2, "runtime.threads": 1, "runtime.compile": False}
    score = train(make_plan(ENV, overrides={**shared, **quiet, **settings}), out=url.parent / "runs").result()
    assert score is not None
    assert score["episodes"] == 100
    assert score["checkpoint"] == score["last_eval"]["env_steps"]
    return float(score["mean"])


@pytest.mark.learning
@pytest.mark.timeout(300)
def test_cql_is_better_than_the_mixed_policies_that_were_recorded(tmp_path: Path) -> None:
    """Seeds 1 and 2, 20,000 recorded steps, 1,500 updates: at least twice the recorded mean return."""
    recorded = record(tmp_path / "mixed", (0.6, 1.0), 20_000)
    assert recorded < 150
    for seed in (1, 2):
        assert learn(tmp_path / "mixed", seed, 1_500, **TARGETS, **{"algo.offline.type": "cql"}) >= 2 * recorded


@pytest.mark.learning
@pytest.mark.timeout(300)
def test_plain_dqn_fails_on_narrow_data_that_cloning_and_cql_learn_from(tmp_path: Path) -> None:
    """Seed 1, 20,000 steps of one greedy policy, 1,500 updates: cloning and CQL reach 400, DQN stays below 200."""
    assert record(tmp_path / "expert", (0.0,), 20_000) >= 490
    assert learn(tmp_path / "expert", 1, 1_500, **{"algo.offline.type": "bc"}) >= 400
    assert learn(tmp_path / "expert", 1, 1_500, **TARGETS, **{"algo.offline.type": "cql"}) >= 400
    assert learn(tmp_path / "expert", 1, 1_500, **TARGETS) < 200
