"""Scores that the tuned defaults must reach: environment, seeds, budget and threshold are in the table."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import msgspec
import numpy as np
import pytest

from qfleet import make_plan, train
from qfleet.act import num_eval_lanes
from qfleet.data import World
from qfleet.envs import make_world
from qfleet.training.evaluator import Evaluator
from qfleet.watch import read_rows

BARS = {
    # environment: (seeds, steps at most, mean of 100 greedy test episodes at least)
    "CartPole-v1": ((1, 2), 50_000, 475.0),
    "Acrobot-v1": ((1,), 60_000, -90.0),
}


@pytest.mark.learning
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("env_id", "seed"), [(env_id, seed) for env_id, bar in BARS.items() for seed in bar[0]])
def test_the_defaults_learn(env_id: str, seed: int, tmp_path: Path) -> None:
    _, steps, bar = BARS[env_id]
    run = train(make_plan(env_id, overrides={"seed": seed, "until.steps": steps}), out=tmp_path)
    score = run.result()
    assert score is not None
    assert score["episodes"] == 100
    assert score["mean"] >= bar


@pytest.mark.learning
@pytest.mark.timeout(600)
def test_two_learners_learn_while_their_sync_is_switched(tmp_path: Path) -> None:
    schedule = ("300 sync.type=server sync.max_staleness=4", "600 sync.type=local", "900 sync.type=allreduce")
    changes = {"learners.num": 2, "learners.schedule": schedule}
    plan = make_plan("CartPole-v1", overrides={**changes, "seed": 1, "until.steps": 50_000, "runtime.compile": False})
    run = train(plan, out=tmp_path)
    score, events = run.result(), read_rows(run.path / "events.jsonl")
    assert [row["after"] for row in events if row["kind"] == "sync"] == ["server", "local", "allreduce"]
    assert not [row for row in events if row["kind"] == "learner_lost"]
    assert score is not None
    assert score["mean"] >= 475.0


BREAKS = 0.005  # of all steps


class Brittle(gym.Wrapper[Any, Any, Any, Any]):
    """Raises in one step of two hundred, by the seed of the episode."""

    def reset(self, **options: Any) -> Any:
        """Begin an episode, with the luck that its seed stands for."""
        self.luck = np.random.default_rng(options.get("seed"))
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        """A step, or none."""
        if self.luck.random() < BREAKS:
            raise ZeroDivisionError("the pole broke")
        return super().step(action)


def make_brittle() -> gym.Env[Any, Any]:
    return Brittle(gym.make("CartPole-v1"))


def sound_world(evaluator: Evaluator, stream: int, episodes: int) -> World:
    """Worlds that do not break: hardly any of their episodes would come to an end."""
    env = msgspec.structs.replace(evaluator.plan.env, workers=0)
    return make_world(env, seed=evaluator.plan.seed, stream=stream, num=num_eval_lanes(episodes))


@pytest.mark.learning
@pytest.mark.timeout(600)
def test_training_in_failing_environments_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CartPole-v1 that raises with probability 0.005 per step; seed 1, 50,000 steps at most, a mean of 475 at least."""
    monkeypatch.setattr(Evaluator, "world", sound_world)
    (seed, *_), steps, bar = BARS["CartPole-v1"]
    changes = {"seed": seed, "until.steps": steps, "env.workers": 2, "env.rebuilds": steps}
    run = train(make_plan("CartPole-v1", overrides=changes), out=tmp_path, env=make_brittle)
    faults = [row for row in read_rows(run.path / "events.jsonl") if row["kind"] == "env_fault"]
    assert {row["fault"] for row in faults} == {"raised"}
    assert len(faults) >= 0.5 * BREAKS * run.status["env_steps"]
    assert not any(row["quarantined"] for row in faults)
    score = run.result()
    assert score is not None
    assert score["episodes"] == 100
    assert score["mean"] >= bar
