"""What a list of episode returns says: the middle, and how sure we are of the mean."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qfleet.data.types import Array

NUM_RESAMPLES = 2000
# Resamples are drawn in blocks of about this many numbers, so that long lists do not need gigabytes.
BLOCK = 1_000_000


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
