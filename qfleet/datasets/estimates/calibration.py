"""Are values as high as the returns that followed? Shapes: N episodes, K groups.

Values are of the policy that is evaluated, returns of the one that was recorded: they may differ for that reason too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qfleet.data import Array
from qfleet.datasets.estimates.estimate import DataEstimate, too_few
from qfleet.datasets.estimates.intervals import percentiles, ratios, resample_counts
from qfleet.datasets.estimates.valued_episode import ValuedEpisode

NUM_GROUPS = 10
UNSEEN = 0.01  # a step of a truncated episode counts if what is after the end weighs no more than this


def counted_steps(episode: ValuedEpisode, gamma: float) -> Array:  # [T] bool
    """The steps whose return is known: all of a terminated episode, those far from the end of another one."""
    if episode.terminated:
        return np.ones(episode.num_steps, np.bool_)
    left = np.arange(episode.num_steps, 0, -1)
    known: Array = gamma**left <= UNSEEN
    return known


def calibration(episodes: Sequence[ValuedEpisode], gamma: float, seed: int) -> dict[str, Any]:
    """The mean value and the mean return in groups of steps of equal size, ordered by value; and the mean gap."""
    value = [each.values[np.arange(each.num_steps), each.action][counted_steps(each, gamma)] for each in episodes]
    found = [each.returns(gamma)[counted_steps(each, gamma)] for each in episodes]
    known = np.flatnonzero([len(each) > 0 for each in value])
    if reason := too_few(len(known), "episodes with steps whose return is known"):
        return {"groups": [], "error": DataEstimate(None, refused=reason).row()}
    values = [value[at] for at in known]
    returns = [found[at] for at in known]
    edges = np.quantile(np.concatenate(values), np.linspace(0.0, 1.0, NUM_GROUPS + 1)[1:-1])
    number = [np.searchsorted(edges, each, side="right") for each in values]
    return group_table(number, values, returns, seed)


def group_table(number: list[Array], values: list[Array], returns: list[Array], seed: int) -> dict[str, Any]:
    """A row per group that has steps, and the gaps weighted by steps."""

    def sums(weights: list[Array]) -> Array:  # [N, K]
        pairs = zip(number, weights, strict=True)
        return np.stack([np.bincount(group, weight, NUM_GROUPS) for group, weight in pairs])

    steps = sums([np.ones(len(each)) for each in number])
    predicted = sums(values)
    observed = sums(returns)
    counts = resample_counts(len(number), seed).astype(np.float64)
    drawn = ratios(counts @ observed, counts @ steps)
    rows = []
    for at in np.flatnonzero(steps.sum(0)).tolist():
        low, high = percentiles(drawn[:, at])
        num = steps[:, at].sum()
        means = {"value": float(predicted[:, at].sum() / num), "return": float(observed[:, at].sum() / num)}
        rows.append({"steps": int(num), **means, "low": low, "high": high})
    gaps = np.abs(counts @ (predicted - observed)).sum(1) / (counts @ steps).sum(1)
    error = np.abs((predicted - observed).sum(0)).sum() / steps.sum()
    bias = float((predicted - observed).sum() / steps.sum())
    return {"groups": rows, "error": DataEstimate(float(error), *percentiles(gaps), support={"bias": bias}).row()}
