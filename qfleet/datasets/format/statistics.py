"""Statistics that can be merged: of two parts they give those of the whole."""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from qfleet.data import Array
from qfleet.datasets.format.episode import RecordedEpisode

MAX_ELEMENTS = 4_096  # a larger observation has one mean for all its elements
MAX_ACTIONS = 100_000  # with more joint actions they are not counted

Numbers = Annotated[list[float], Meta(max_length=MAX_ELEMENTS)]
Count = Annotated[int, Meta(ge=0)]


class Moments(msgspec.Struct, forbid_unknown_fields=True):
    """Count, mean, sum of squared deviations (M2), smallest and largest value, of each element (Chan et al. 1979).

    Values that are not finite are left out and counted by themselves.
    """

    count: Annotated[list[Count], Meta(max_length=MAX_ELEMENTS)]
    mean: Numbers
    m2: Numbers
    min: Numbers
    max: Numbers
    num_not_finite: Count = 0


def moments_of(values: Array) -> Moments:  # [N, ...]
    """The moments of N values, element by element; of large ones, of all elements together."""
    if values.dtype in (np.bool_, np.uint8) and len(values):
        return _byte_moments(values.view(np.uint8))
    flat = values.reshape(len(values), math.prod(values.shape[1:])).astype(np.float64)
    if flat.shape[1] > MAX_ELEMENTS:
        flat = flat.reshape(-1, 1)
    finite = np.isfinite(flat)
    count = finite.sum(0)
    safe = np.maximum(count, 1)
    mean = np.where(finite, flat, 0.0).sum(0) / safe
    m2 = np.where(finite, (flat - mean) ** 2, 0.0).sum(0)
    low = np.where(count > 0, np.where(finite, flat, np.inf).min(0, initial=np.inf), 0.0)
    high = np.where(count > 0, np.where(finite, flat, -np.inf).max(0, initial=-np.inf), 0.0)
    return Moments(count.tolist(), mean.tolist(), m2.tolist(), low.tolist(), high.tolist(), int((~finite).sum()))


def _byte_moments(values: Array) -> Moments:  # [N, ...]
    """The moments of bytes, by sums of whole numbers."""
    num_elements = math.prod(values.shape[1:])
    if num_elements > MAX_ELEMENTS:
        counts = np.bincount(values.reshape(-1), minlength=256)
        numbers = np.flatnonzero(counts)
        total = np.array([counts @ np.arange(256)])
        squares = np.array([counts @ np.arange(256) ** 2])
        low = numbers[:1]
        high = numbers[-1:]
        num = values.size
    else:
        flat = values.reshape(len(values), num_elements)
        total = np.add.reduce(flat, 0, np.uint64)
        low = flat.min(0)
        high = flat.max(0)
        # The squares of zeros and ones are themselves.
        squares = total if high.max(initial=0) < 2 else np.add.reduce(flat.astype(np.uint16) ** 2, 0, np.uint64)
        num = len(flat)
    mean = total / num
    m2 = (num * squares.astype(object) - total.astype(object) ** 2) / num
    ends = [each.astype(np.float64).tolist() for each in (low, high)]
    return Moments([num] * len(mean), mean.tolist(), [float(each) for each in m2], ends[0], ends[1])


def merge_moments(first: Moments, second: Moments) -> Moments:
    """The moments of both together."""
    (n_a, mean_a, m2_a), (n_b, mean_b, m2_b) = (map(np.asarray, (m.count, m.mean, m.m2)) for m in (first, second))
    total = n_a + n_b
    safe = np.maximum(total, 1)
    delta = mean_b - mean_a
    mean = np.where(n_a == 0, mean_b, np.where(n_b == 0, mean_a, mean_a + delta * n_b / safe))
    m2 = m2_a + m2_b + delta**2 * n_a * n_b / safe
    low = np.where(n_a == 0, second.min, np.where(n_b == 0, first.min, np.minimum(first.min, second.min)))
    high = np.where(n_a == 0, second.max, np.where(n_b == 0, first.max, np.maximum(first.max, second.max)))
    not_finite = first.num_not_finite + second.num_not_finite
    return Moments(total.tolist(), mean.tolist(), m2.tolist(), low.tolist(), high.tolist(), not_finite)


class Statistics(msgspec.Struct, forbid_unknown_fields=True):
    """Statistics of some episodes: observations by column, rewards, returns, lengths, and counts of actions."""

    observations: dict[str, Moments]
    reward: Moments
    returns: Moments
    lengths: Moments
    actions: Annotated[list[Count], Meta(max_length=MAX_ACTIONS)] = []


def statistics_of(episode: RecordedEpisode, num_actions: int) -> Statistics:
    """The statistics of one episode; final observations count too."""
    counted = num_actions <= MAX_ACTIONS
    return Statistics(
        {name: moments_of(array) for name, array in episode.observations.items()},
        moments_of(episode.reward),
        moments_of(np.array([episode.undiscounted_return])),
        moments_of(np.array([episode.num_steps])),
        np.bincount(episode.action, minlength=num_actions).tolist() if counted else [],
    )


def merge_statistics(parts: Iterable[Statistics]) -> Statistics | None:
    """The statistics of all parts together, merged from left to right; None without parts."""
    whole: Statistics | None = None
    for part in parts:
        whole = part if whole is None else _merge(whole, part)
    return whole


def _merge(first: Statistics, second: Statistics) -> Statistics:
    pairs = {name: (moments, second.observations[name]) for name, moments in first.observations.items()}
    return Statistics(
        {name: merge_moments(*pair) for name, pair in pairs.items()},
        merge_moments(first.reward, second.reward),
        merge_moments(first.returns, second.returns),
        merge_moments(first.lengths, second.lengths),
        [a + b for a, b in zip(first.actions, second.actions, strict=True)],
    )


def statistics_problem(
    found: Statistics, shapes: Mapping[str, tuple[int, ...]], num_actions: int, counts: tuple[int, int]
) -> str | None:
    """Why these cannot be the statistics of a split with these counts and observations; None if they can."""
    if found.observations.keys() != shapes.keys():
        return "its columns of observations are not those of the manifest"
    if len(found.actions) != (num_actions if num_actions <= MAX_ACTIONS else 0):
        return f"it counts {len(found.actions):,} actions, and there are {num_actions:,}"
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    expected = {name: size if size <= MAX_ELEMENTS else 1 for name, size in sizes.items()}
    named = {**found.observations, "rewards": found.reward, "returns": found.returns, "lengths": found.lengths}
    for name, moments in named.items():
        lists = (moments.count, moments.mean, moments.m2, moments.min, moments.max)
        if {len(each) for each in lists} != {expected.get(name, 1)}:
            return f"{name} should have {expected.get(name, 1):,} elements"
    if (found.returns.count[0], found.reward.count[0]) != counts or sum(found.actions) not in (0, counts[1]):
        return f"the manifest has {counts[0]:,} episodes and {counts[1]:,} steps"
    return None
