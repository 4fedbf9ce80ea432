"""Bootstrap intervals over episodes (Efron 1979). Shapes: N episodes, R resamples."""

import numpy as np

from qfleet.data import Array
from qfleet.datasets.estimates.estimate import DataEstimate, refuse, too_few

NUM_RESAMPLES = 1_000


def resample_counts(num: int, seed: int, num_resamples: int = NUM_RESAMPLES) -> Array:  # [R, N]
    """How often each episode is drawn in each resample; every row has the sum N."""
    rng = np.random.Generator(np.random.Philox(seed))
    found: Array = rng.multinomial(num, np.full(num, 1.0 / num), size=num_resamples).astype(np.float32)
    return found


def percentiles(values: Array) -> tuple[float | None, float | None]:  # [R]
    """The 95 % interval; None for both ends where resamples have no number."""
    known = values[np.isfinite(values)]
    if len(known) < len(values) / 2:
        return None, None
    low, high = np.percentile(known, (2.5, 97.5))
    return float(low), float(high)


def ratios(top: Array, bottom: Array) -> Array:
    """top / bottom, NaN where nothing is below."""
    found: Array = np.divide(top, bottom, out=np.full(np.shape(bottom), np.nan), where=np.asarray(bottom) > 0)
    return found


def ratio_estimate(top: Array, bottom: Array, seed: int) -> DataEstimate:  # [N], [N]
    """sum(top) / sum(bottom) over episodes: the mean over steps, if these are sums and numbers of steps."""
    if reason := too_few(len(top)):
        return refuse(reason)
    if bottom.sum() <= 0:
        return refuse("no recorded step counts for it")
    counts = resample_counts(len(top), seed).astype(np.float64)
    low, high = percentiles(ratios(counts @ top, counts @ bottom))
    return DataEstimate(float(top.sum() / bottom.sum()), low, high)
