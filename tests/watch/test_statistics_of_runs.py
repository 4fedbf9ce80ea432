"""Statistics of runs side by side, by hand and against the library of Agarwal et al. 2021."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from qfleet.data.types import Array
from qfleet.watch.statistics import (
    estimate,
    iqm,
    mean,
    median,
    median_run,
    optimality_gap,
    probability_of_improvement,
    stratified_bootstrap,
)

SCORES = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 60.0]])  # [runs, tasks]
REFERENCE_RESAMPLES = 2_000

# Values on a coarse grid, so that ties and equal columns are common.
coarse = arrays(
    np.float64,
    array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=7),
    elements=st.integers(-20, 20).map(lambda number: number / 4),
)
pairs = st.integers(1, 4).flatmap(
    lambda tasks: st.tuples(
        *(
            arrays(np.float64, st.tuples(st.integers(1, 7), st.just(tasks)), elements=st.integers(-6, 6).map(float))
            for _ in range(2)
        )
    )
)


def test_by_hand() -> None:
    assert mean(SCORES) == (2 + 30) / 2
    assert median(SCORES) == (2 + 30) / 2
    assert median_run(SCORES) == (3 + 10) / 2
    assert iqm(SCORES) == (2 + 3 + 10 + 20) / 4  # one of six is left out at each end
    assert optimality_gap(SCORES, 10.0) == 10 - (1 + 2 + 3 + 10 + 10 + 10) / 6


def test_improvement_by_hand() -> None:
    ours, theirs = np.array([[1.0], [2.0], [3.0]]), np.array([[2.0], [0.0]])
    assert probability_of_improvement(ours, theirs) == (1 + 1.5 + 2) / 6  # the tie 2 = 2 counts half
    assert probability_of_improvement(theirs, ours) == pytest.approx(1 - 4.5 / 6)
    assert probability_of_improvement(ours, ours) == 0.5


def test_every_statistic_takes_many_resamples_at_once() -> None:
    many = np.random.default_rng(0).normal(size=(11, 5, 3))
    for statistic in (mean, median, median_run, iqm, optimality_gap):
        assert statistic(many) == pytest.approx([float(statistic(each)) for each in many])
    both = probability_of_improvement(many, many[::-1])
    assert both == pytest.approx(
        [float(probability_of_improvement(a, b)) for a, b in zip(many, many[::-1], strict=True)]
    )


@given(coarse)
def test_point_estimates_are_rliables(scores: Array) -> None:
    metrics = pytest.importorskip("rliable.metrics")
    for ours, theirs in (
        (mean(scores), metrics.aggregate_mean(scores)),
        (median(scores), metrics.aggregate_median(scores)),
        (iqm(scores), metrics.aggregate_iqm(scores)),
        (optimality_gap(scores, 1.5), metrics.aggregate_optimality_gap(scores, 1.5)),
    ):
        assert math.isclose(float(ours), float(theirs), rel_tol=1e-9, abs_tol=1e-9)


@given(pairs)
def test_probabilities_of_improvement_are_rliables(sides: tuple[Array, Array]) -> None:
    metrics = pytest.importorskip("rliable.metrics")
    ours, theirs = probability_of_improvement(*sides), metrics.probability_of_improvement(*sides)
    assert math.isclose(float(ours), float(theirs), rel_tol=1e-9, abs_tol=1e-9)


def monte_carlo(values: Array, resamples: int, quantile: float) -> float:
    """Standard error of an interval's end when it is read off so many resamples: sqrt(q (1 - q) / n) / density.

    The density of the resampled statistic at its quantile is read off a large sample, between the neighbouring
    quantiles q - 1 % and q + 1 %. The reference library draws from NumPy's global generator, which a test cannot tie to
    ours, so the two ends are independent estimates of one number.
    """
    low, high = np.quantile(values, (quantile - 0.01, quantile + 0.01))
    return math.sqrt(quantile * (1 - quantile) / resamples) * float(high - low) / 0.02


def resampled(statistic: Any, scores: tuple[Array, ...]) -> Array:
    """Resamples of a statistic drawn in the plainest way, one run at a time; also checks ours independently."""
    rng = np.random.default_rng(17)
    values = []
    for _ in range(20_000):
        drawn = [
            np.stack([each[rng.integers(0, len(each), len(each)), task] for task in range(each.shape[1])], axis=1)
            for each in scores
        ]
        values.append(float(statistic(*drawn)))
    return np.array(values)


@pytest.mark.parametrize("name", ["mean", "median", "iqm", "optimality_gap", "probability_of_improvement"])
def test_interval_ends_are_rliables_within_monte_carlo_error(name: str) -> None:
    library = pytest.importorskip("rliable.library")
    metrics = pytest.importorskip("rliable.metrics")
    rng = np.random.default_rng(5)
    a, b = rng.normal(0.8, 0.4, size=(10, 4)), rng.normal(0.5, 0.4, size=(8, 4))
    scores = (a, b) if name == "probability_of_improvement" else (a,)
    ours = {
        "mean": mean,
        "median": median,
        "iqm": iqm,
        "optimality_gap": optimality_gap,
        "probability_of_improvement": probability_of_improvement,
    }[name]
    theirs = getattr(metrics, name if len(scores) == 2 else f"aggregate_{name}")
    np.random.seed(11)  # the generator that the library draws from
    _, intervals = library.get_interval_estimates(
        {"a": list(scores) if len(scores) == 2 else a},
        lambda *each: np.array([theirs(*each)]),
        reps=REFERENCE_RESAMPLES,
    )
    found = stratified_bootstrap(ours, *scores)
    plain = resampled(ours, scores)
    for end, quantile, reference in zip(found, (0.025, 0.975), intervals["a"][:, 0], strict=True):
        error = math.hypot(monte_carlo(plain, REFERENCE_RESAMPLES, quantile), monte_carlo(plain, 50_000, quantile))
        assert abs(end - reference) < 4 * error, (end, reference, error)  # ten such ends: once in about 1,600 draws
        assert abs(end - np.quantile(plain, quantile)) < 4 * math.sqrt(2) * monte_carlo(plain, 20_000, quantile)


def test_tasks_are_kept_and_runs_are_redrawn_within_them() -> None:
    far_apart = np.array([[0.0, 100.0], [0.0, 100.0], [0.0, 100.0]])
    assert stratified_bootstrap(mean, far_apart) == (50.0, 50.0)  # drawing over tasks as well would spread
    # Runs of two tasks are redrawn apart: had whole rows been drawn, their sum would always be 1.
    mirrored = np.array([[0.0, 1.0], [1.0, 0.0]])
    low, high = stratified_bootstrap(mean, mirrored)
    assert low < 0.5 < high


def test_the_seed_decides_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(3).normal(size=(5, 2))
    first = stratified_bootstrap(iqm, scores, resamples=999)
    assert stratified_bootstrap(iqm, scores, resamples=999) == first
    assert stratified_bootstrap(iqm, scores, resamples=999, seed=1) != first
    monkeypatch.setattr("qfleet.watch.statistics.BLOCK", 1000)
    assert stratified_bootstrap(iqm, scores, resamples=999) == pytest.approx(first, abs=1e-12)


def test_one_run_has_no_interval() -> None:
    alone = np.array([[3.0, 5.0]])
    assert estimate(mean, alone) == (4.0, None, None)
    assert estimate(probability_of_improvement, alone, SCORES).low is None
    assert estimate(mean, SCORES).low is not None


def test_more_certainty_is_a_wider_interval() -> None:
    scores = np.random.default_rng(4).normal(size=(6, 1))
    half, most = (stratified_bootstrap(mean, scores, size=size) for size in (0.5, 0.95))
    assert most[0] < half[0] < half[1] < most[1]
