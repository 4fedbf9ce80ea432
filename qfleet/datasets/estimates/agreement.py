"""Does a policy do what was recorded? Shapes: N episodes, A actions, R resamples."""

from collections.abc import Sequence

import numpy as np

from qfleet.data import Array
from qfleet.datasets.estimates.estimate import DataEstimate, refuse, too_few
from qfleet.datasets.estimates.intervals import percentiles, ratio_estimate, ratios, resample_counts
from qfleet.datasets.estimates.valued_episode import ValuedEpisode

MAX_CLASSES = 1_000  # of actions: more are not counted one by one


def agreement(episodes: Sequence[ValuedEpisode], seed: int) -> dict[str, DataEstimate]:
    """Accuracy of the greedy action against the recorded one, and macro precision and recall over actions."""
    num_actions = episodes[0].values.shape[1]
    pairs = [(each.values[:-1].argmax(1), each.action) for each in episodes]
    right = np.array([float((greedy == recorded).sum()) for greedy, recorded in pairs])
    steps = np.array([float(len(recorded)) for _, recorded in pairs])
    found = {"accuracy": ratio_estimate(right, steps, seed)}
    if num_actions > MAX_CLASSES or len(episodes) == 0:
        reason = f"there are {num_actions:,} actions, more than {MAX_CLASSES:,}"
        return {**found, "precision": refuse(reason), "recall": refuse(reason)}
    hits = np.stack([np.bincount(recorded[greedy == recorded], minlength=num_actions) for greedy, recorded in pairs])
    chosen = np.stack([np.bincount(greedy, minlength=num_actions) for greedy, _ in pairs])
    there = np.stack([np.bincount(recorded, minlength=num_actions) for _, recorded in pairs])
    found["precision"] = macro_estimate(hits, chosen, chosen + there, seed)
    found["recall"] = macro_estimate(hits, there, chosen + there, seed)
    return found


def macro_estimate(hits: Array, bottom: Array, seen: Array, seed: int) -> DataEstimate:  # [N, A] each
    """The mean over actions of hits / bottom."""
    if reason := too_few(len(hits)):
        return refuse(reason)
    counts = resample_counts(len(hits), seed).astype(np.float64)
    low, high = percentiles(macro_mean(counts @ hits, counts @ bottom, counts @ seen))
    value = macro_mean(hits.sum(0)[None], bottom.sum(0)[None], seen.sum(0)[None])
    return DataEstimate(float(value[0]), low, high, support={"actions": float((seen.sum(0) > 0).sum())})


def macro_mean(hits: Array, bottom: Array, seen: Array) -> Array:  # [R, A] -> [R]
    """The mean over the actions that were recorded or chosen at all; without anything below, an action counts as 0."""
    each = np.nan_to_num(ratios(hits.astype(np.float64), bottom.astype(np.float64)))
    means: Array = ratios((each * (seen > 0)).sum(1), (seen > 0).sum(1))
    return means
