"""Scores that the tuned defaults must reach: environment, seeds, budget and threshold are in the table."""

from pathlib import Path

import pytest

from qfleet import make_plan, train

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
