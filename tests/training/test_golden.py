"""The numbers of one small run. They move only when learning changes, and then the commit says so."""

from pathlib import Path

import pytest

from qfleet import make_plan, train

SETTINGS = {
    "seed": 5,
    "until.steps": 600,
    "algo.learn_start_steps": 100,
    "replay.samples_per_insert": 64.0,
    "log.every_steps": 100,
    "eval.episodes": 0,
    "eval.test_episodes": 0,
    "until.score": None,
}
LOSSES = {
    "uniform": [4.4857, 2.541292, 0.761125, 0.834322, 1.05113, 1.184027],
    "prioritized": [4.491205, 1.590502, 0.50267, 0.552535, 0.593738, 0.634132],
}


@pytest.mark.parametrize("sampler", LOSSES)
def test_the_first_losses_are_what_they_were(sampler: str, tmp_path: Path) -> None:
    plan = make_plan("CartPole-v1", overrides={**SETTINGS, "replay.sampler.type": sampler})
    run = train(plan, out=tmp_path)
    losses = [row["loss"] for row in run.metrics if row["kind"] == "progress" and row["loss"] is not None]
    # Other processors round differently, and 125 updates let that grow a little.
    assert losses == pytest.approx(LOSSES[sampler], rel=1e-3)
