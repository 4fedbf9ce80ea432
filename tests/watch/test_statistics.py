import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.watch.statistics import summarize


def test_numbers_by_hand() -> None:
    row = summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert row["episodes"] == 5
    assert row["mean"] == 22.0
    assert row["median"] == 3.0
    assert row["iqm"] == 3.0  # one value is left out at each end
    assert row["returns"] == [1.0, 2.0, 3.0, 4.0, 100.0]


@pytest.mark.parametrize(
    ("returns", "iqm"),
    [([7.0], 7.0), ([1.0, 3.0], 2.0), ([1.0, 2.0, 6.0], 3.0), ([9.0, 0.0, 2.0, 4.0], 3.0), (list(range(10)), 4.5)],
)
def test_iqm_by_hand(returns: list[float], iqm: float) -> None:
    assert summarize(returns)["iqm"] == iqm


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=23))
def test_iqm_is_scipys_trimmed_mean(returns: list[float]) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert math.isclose(summarize(returns)["iqm"], stats.trim_mean(returns, 0.25), rel_tol=1e-9, abs_tol=1e-6)


def test_interval_is_repeatable_and_the_seed_matters() -> None:
    returns = np.random.default_rng(1).normal(10, 3, 50).tolist()
    first, again, other = summarize(returns), summarize(returns), summarize(returns, seed=1)
    assert first == again
    assert (first["low"], first["high"]) != (other["low"], other["high"])


def test_interval_agrees_with_the_normal_one() -> None:
    returns = np.random.default_rng(2).normal(10, 3, 400)
    row = summarize(returns.tolist())
    half = 1.96 * returns.std() / math.sqrt(400)
    assert row["low"] == pytest.approx(returns.mean() - half, abs=0.05)
    assert row["high"] == pytest.approx(returns.mean() + half, abs=0.05)


def test_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(3)
    rows = [summarize(rng.normal(0, 1, 60).tolist(), seed=index) for index in range(200)]
    covered = sum(row["low"] <= 0 <= row["high"] for row in rows)
    assert 178 <= covered <= 199


def test_equal_returns_have_no_width() -> None:
    row = summarize([0.1] * 100)
    assert row["low"] == row["high"] == row["mean"]


def test_long_lists_are_drawn_in_blocks() -> None:
    row = summarize([0.0, 1.0] * 5_000)
    assert 0.48 < row["low"] < 0.5 < row["high"] < 0.52


def test_nothing_to_summarise() -> None:
    with pytest.raises(ValueError, match="at least one"):
        summarize([])


def test_it_is_quick() -> None:
    returns = list(map(float, range(100)))
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        summarize(returns)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.02  # 3 ms on two slow cores; the bound leaves room for a busy machine
