"""Killed in mid-epoch: each transition is used exactly once per epoch, and one learner ends with the same bits."""

from pathlib import Path

import pytest

from benchmarks.epochs_soak import soak

pytestmark = pytest.mark.chaos


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_learners", "kills"),
    [(1, 2), (2, 3), *(pytest.param(num, 25, marks=[pytest.mark.slow, pytest.mark.soak]) for num in (1, 2, 3, 4))],
)
def test_each_transition_is_used_once_per_epoch(tmp_path: Path, num_learners: int, kills: int) -> None:
    outcome = soak(tmp_path, num_learners, kills, epochs=8 if kills < 10 else 40)
    assert outcome.differences == 0
    assert outcome.unequal == 0
    assert sum(outcome.kills.values()) >= kills
    assert outcome.transitions >= 8 * 800
