"""Ten random kills of processes of a run; `scripts/bench soak` makes two hundred."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.soak import soak
from benchmarks.witness import Witness, untrue
from qfleet.data import Batch


@pytest.mark.slow
@pytest.mark.chaos
def test_a_run_survives_random_kills_with_exact_counts(tmp_path: Path) -> None:
    outcome = soak(10, 1, tmp_path)
    assert outcome.wrong == []
    assert sum(outcome.blows.values()) == 10
    assert outcome.batches >= outcome.updates > 0


def batch(now: tuple[int, int, int], then: tuple[int, int, int], reward: float, discount: float) -> Batch:
    obs, next_obs = np.array([now], np.float32), np.array([then], np.float32)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.int64)
    return Batch(obs, zero, one * reward, one * discount, next_obs, one, zero)


@pytest.mark.parametrize(
    ("now", "then", "reward", "discount", "true"),
    [
        ((9, 0, 0), (9, 0, 3), 1 + 0.9 * 2 + 0.81 * 3, 0.9**3, True),
        ((9, 0, 6), (9, 0, 7), 7, 0.0, True),  # the last step of an episode that ends
        ((9, 1, 2), (9, 1, 3), 3, 0.9, True),  # and of one that is cut off
        ((9, 0, 2), (9, 0, 3), 3, 0.9, True),  # shorter, as before a gap
        ((9, 0, 0), (8, 0, 3), 1 + 0.9 * 2 + 0.81 * 3, 0.9**3, False),  # another process's
        ((9, 0, 6), (9, 1, 0), 7, 0.9, False),  # across an end
        ((9, 0, 0), (9, 0, 3), 6, 0.9**3, False),
        ((9, 0, 6), (9, 0, 7), 7, 0.9, False),
    ],
)
def test_the_witness_finds_false_batches(
    now: tuple[int, int, int], then: tuple[int, int, int], reward: float, discount: float, true: bool
) -> None:
    assert (untrue(batch(now, then, reward, discount), 3, 0.9) == []) is true


def test_the_witness_encodes_process_episode_and_step() -> None:
    world = Witness()
    first, _ = world.reset(seed=0)
    second, reward, *_ = world.step(0)
    assert (second - first).tolist() == [0, 0, 1]
    assert reward == 1
