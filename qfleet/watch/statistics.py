"""Statistics of scores with confidence intervals, over the episodes of one run and over several runs.

Those over several runs follow Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical
Precipice" (arXiv 2108.13264). Shapes: R runs (seeds), K tasks (environments); `...` stands for resamples.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from qfleet.data.types import Array

NUM_RESAMPLES = 2000
# The default of the reference library of Agarwal et al. for aggregate scores.
NUM_GROUP_RESAMPLES = 50_000
# Resamples are drawn in blocks of about this many numbers, to limit memory.
BLOCK = 1_000_000

Statistic = Callable[..., Array]  # one or more [..., R, K] -> [...]


# --- the episodes of one run ---


def interquartile_mean(returns: Array) -> float:
    """Mean of the middle half: a quarter of the values, rounded down, is left out at each end."""
    cut = len(returns) // 4
    return float(np.sort(returns)[cut : len(returns) - cut].mean())


def mean_interval(returns: Array, seed: int) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean (Efron 1979); the same seed gives the same interval."""
    num = len(returns)
    rng = np.random.Generator(np.random.Philox(seed))
    block = max(1, BLOCK // num)
    means = np.empty(NUM_RESAMPLES)
    for begin in range(0, NUM_RESAMPLES, block):
        end = min(begin + block, NUM_RESAMPLES)
        means[begin:end] = returns[rng.integers(0, num, size=(end - begin, num))].mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def summarize(returns: Sequence[float], *, seed: int = 0) -> dict[str, Any]:
    """The fields of an evaluation row: episodes, mean, median, iqm, low, high (95 % of the mean), returns."""
    values = np.asarray(returns, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"returns must be a list of at least one number, got shape {values.shape}")
    low, high = mean_interval(values, seed)
    return {
        "episodes": len(values),
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "iqm": interquartile_mean(values),
        "low": low,
        "high": high,
        "returns": values.tolist(),
    }


# --- several runs: each statistic takes [..., R, K] and returns [...] ---


def mean(scores: Array) -> Array:
    """Mean over tasks of the mean over runs."""
    return np.asarray(scores.mean(axis=-2).mean(axis=-1))


def median(scores: Array) -> Array:
    """Median over tasks of the mean over runs (with one task: its mean)."""
    return np.asarray(np.median(scores.mean(axis=-2), axis=-1))


def median_run(scores: Array) -> Array:
    """Median over runs and tasks together: with one task, the median of its seeds."""
    return np.asarray(np.median(scores, axis=(-2, -1)))


def iqm(scores: Array) -> Array:
    """Interquartile mean: mean of the middle half of all runs of all tasks (section 4.3 of the paper)."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    return np.asarray(flat[..., cut : flat.shape[-1] - cut].mean(axis=-1))


def optimality_gap(scores: Array, threshold: float = 1.0) -> Array:
    """Mean distance of runs below the threshold; scores above it count as the threshold (section 4.3)."""
    return np.asarray(threshold - np.minimum(scores, threshold).mean(axis=(-2, -1)))


def probability_of_improvement(ours: Array, theirs: Array) -> Array:
    """P(a run of ours beats a run of theirs), averaged over tasks; a tie counts half (Mann and Whitney's U / mn)."""
    # [..., Ra, 1, K], [..., 1, Rb, K]
    a = ours[..., :, None, :]
    b = theirs[..., None, :, :]
    wins = (a > b) + 0.5 * (a == b)
    return np.asarray(wins.mean(axis=(-3, -2)).mean(axis=-1))


class Estimate(NamedTuple):
    """A statistic with its 95 % interval, which is None if there is only one run to resample."""

    value: float
    low: float | None
    high: float | None


def stratified_bootstrap(
    statistic: Statistic, *scores: Array, resamples: int = NUM_GROUP_RESAMPLES, seed: int = 0, size: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of a statistic of one or more [R, K]: runs are redrawn within each task, tasks are kept."""
    rng = np.random.Generator(np.random.Philox(seed))
    block = max(1, BLOCK // _numbers(scores))
    values = np.empty(resamples)
    for begin in range(0, resamples, block):
        end = min(begin + block, resamples)
        values[begin:end] = statistic(*(_redrawn(each, end - begin, rng) for each in scores))
    low, high = np.percentile(values, (50 * (1 - size), 50 * (1 + size)))
    return float(low), float(high)


def estimate(statistic: Statistic, *scores: Array, **options: Any) -> Estimate:
    """The statistic with its interval; no interval with one run per task, which shows no variation."""
    value = float(statistic(*scores))
    if any(len(each) < 2 for each in scores):
        return Estimate(value, None, None)
    return Estimate(value, *stratified_bootstrap(statistic, *scores, **options))


def _redrawn(scores: Array, num: int, rng: np.random.Generator) -> Array:
    """`num` resamples [num, R, K]: runs are drawn with replacement within each task."""
    runs, tasks = scores.shape
    drawn: Array = scores[rng.integers(0, runs, size=(num, runs, tasks)), np.arange(tasks)]
    return drawn


def _numbers(scores: Sequence[Array]) -> int:
    """The most numbers that one resample holds at once; two sides are compared run by run."""
    return int(np.prod([len(each) for each in scores]) * scores[0].shape[1])
