"""Scores that the tuned defaults must reach: environment, seeds, budget and threshold are in the table."""

from pathlib import Path

import pytest

from qfleet import make_plan, train
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
def test_two_learners_learn_however_often_they_change_how_they_agree(tmp_path: Path) -> None:
    schedule = ("300 sync.type=server sync.max_staleness=4", "600 sync.type=local", "900 sync.type=allreduce")
    changes = {"learners.num": 2, "learners.schedule": schedule}
    plan = make_plan("CartPole-v1", overrides={**changes, "seed": 1, "until.steps": 50_000, "runtime.compile": False})
    run = train(plan, out=tmp_path)
    score, events = run.result(), read_rows(run.path / "events.jsonl")
    assert [row["after"] for row in events if row["kind"] == "sync"] == ["server", "local", "allreduce"]
    assert not [row for row in events if row["kind"] == "learner_lost"]
    assert score is not None
    assert score["mean"] >= 475.0
