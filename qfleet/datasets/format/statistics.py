"""Statistics that can be merged: of two parts they give those of the whole. N rows, E elements of each."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from qfleet.data import Array
from qfleet.datasets.format.episode import RecordedEpisode
from qfleet.datasets.format.sketch import Sketch, merge_sketches, sketch_of, sketch_of_counts

MAX_ELEMENTS = 4_096  # a larger observation has one mean for all its elements
MAX_SKETCHES = 32  # an observation of more elements has one sketch for all of them
MAX_ACTIONS = 100_000  # with more joint actions they are not counted
LARGEST = float(np.finfo(np.float64).max)
PAIRS_FROM = 1 << 17  # bytes: fewer are counted one by one
_CHUNK_VALUES = 1 << 19  # that are worked on at a time

Numbers = Annotated[list[float], Meta(max_length=MAX_ELEMENTS)]
Count = Annotated[int, Meta(ge=0, le=2**53)]


class Moments(msgspec.Struct, forbid_unknown_fields=True):
    """Count, mean, sum of squared deviations (M2), smallest and largest value, of each element (Chan et al. 1979).

    Values that are not finite are left out and counted by themselves. `sketch` holds the quantiles of each element, or
    of all together; it is empty in data sets that were made before there were sketches.
    """

    count: Annotated[list[Count], Meta(max_length=MAX_ELEMENTS)]
    mean: Numbers
    m2: Numbers
    min: Numbers
    max: Numbers
    num_not_finite: Count = 0
    sketch: Annotated[list[Sketch], Meta(max_length=MAX_SKETCHES)] = []

    def quantiles(self, shares: Sequence[float], element: int = 0) -> list[float] | None:
        """Quantiles of one element, or of all together; None if they are not known."""
        if not self.sketch:
            return None
        low = min(self.min) if len(self.sketch) == 1 else self.min[element]
        high = max(self.max) if len(self.sketch) == 1 else self.max[element]
        return [min(max(each, low), high) for each in self.sketch[element].quantiles(shares)]


def moments_of(values: Array) -> Moments:  # [N, ...]
    """The moments of N values, element by element; of large ones, of all elements together."""
    flat = values.reshape(len(values), num_elements(values.shape[1:]))
    whole: Moments | None = None
    of_chunk = _moments_of_bytes if values.dtype in (np.uint8, np.bool_) else _moments_of_numbers
    for chunk in _chunks(flat):
        part = of_chunk(chunk)
        whole = part if whole is None else merge_moments(whole, part)
    return whole or of_chunk(flat)


def num_elements(shape: tuple[int, ...]) -> int:
    """How many numbers an observation of this shape has."""
    return math.prod(shape)


def _chunks(flat: Array) -> Iterator[Array]:
    rows = max(1, _CHUNK_VALUES // max(1, flat.shape[1]))
    return (flat[begin : begin + rows] for begin in range(0, len(flat), rows))


def _moments_of_numbers(flat: Array) -> Moments:  # [N, E]
    numbers = flat.astype(np.float64)
    if flat.shape[1] > MAX_ELEMENTS:
        numbers = numbers.reshape(-1, 1)
    columns = np.ascontiguousarray(numbers.T)  # sums along memory are several times faster
    finite = np.isfinite(columns)
    not_finite = int(finite.size - np.count_nonzero(finite))
    safe_numbers = np.where(finite, columns, 0.0) if not_finite else columns
    count = finite.sum(1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = safe_numbers.sum(1) / np.maximum(count, 1)
        squares = (safe_numbers - mean[:, None]) ** 2
        m2 = np.where(finite, squares, 0.0).sum(1) if not_finite else squares.sum(1)
    low = np.where(finite, columns, np.inf) if not_finite else columns
    high = np.where(finite, columns, -np.inf) if not_finite else columns
    lowest = np.where(count > 0, low.min(1, initial=np.inf), 0.0)
    highest = np.where(count > 0, high.max(1, initial=-np.inf), 0.0)
    sketches = _sketches(columns, finite)
    return Moments(count.tolist(), _kept(mean), _kept(m2), lowest.tolist(), highest.tolist(), not_finite, sketches)


def _sketches(columns: Array, finite: Array) -> list[Sketch]:  # [E, N]
    if len(columns) > MAX_SKETCHES:
        return [sketch_of(columns[finite])]
    return [sketch_of(column[there]) for column, there in zip(columns, finite, strict=True)]


def _moments_of_bytes(flat: Array) -> Moments:  # [N, E]
    """The same of small whole numbers, by way of how many there are of each."""
    numbers = flat.view(np.uint8)
    columns = [numbers.reshape(-1)] if numbers.shape[1] > MAX_SKETCHES else list(numbers.T)
    counts = [byte_counts(column) for column in columns]
    values = np.arange(256.0)
    sketches = [sketch_of_counts(values, each) for each in counts]
    if len(columns) == numbers.shape[1] or numbers.shape[1] > MAX_ELEMENTS:
        return _moments_of_counts(counts, sketches)
    num = len(numbers)
    total = numbers.sum(0, dtype=np.int64)
    squares = np.square(numbers, dtype=np.uint16).sum(0, dtype=np.int64)
    if not num:
        zeros = [0.0] * numbers.shape[1]
        return Moments([0] * numbers.shape[1], zeros, zeros, zeros, zeros, 0, sketches)
    m2 = np.maximum(squares - total * (total / num), 0.0)
    low, high = (each.astype(np.float64).tolist() for each in (numbers.min(0), numbers.max(0)))
    return Moments([num] * len(total), (total / num).tolist(), m2.tolist(), low, high, 0, sketches)


def byte_counts(values: Array) -> Array:  # [K] uint8 -> [256]
    """How many there are of each value."""
    if len(values) < PAIRS_FROM or not values.flags.c_contiguous:
        return np.bincount(values, minlength=256)
    # In pairs: counting takes its time per number, not per byte.
    num = len(values) // 2 * 2
    pairs = np.bincount(values[:num].view(np.uint16), minlength=1 << 16).reshape(256, 256)
    counts: Array = pairs.sum(0) + pairs.sum(1)
    counts += np.bincount(values[num:], minlength=256)
    return counts


def _moments_of_counts(counts: list[Array], sketches: list[Sketch]) -> Moments:  # each [256]
    found = Moments([], [], [], [], [], 0, sketches)
    values = np.arange(256.0)
    for each in counts:
        there = np.flatnonzero(each)
        num = int(each.sum())
        mean = float(each @ values) / max(1, num)
        found.count.append(num)
        found.mean.append(mean)
        found.m2.append(float(each @ (values - mean) ** 2))
        found.min.append(float(there[0]) if num else 0.0)
        found.max.append(float(there[-1]) if num else 0.0)
    return found


def merge_moments(first: Moments, second: Moments) -> Moments:
    """The moments of both together."""
    (n_a, mean_a, m2_a), (n_b, mean_b, m2_b) = (
        (np.asarray(m.count, np.float64), np.asarray(m.mean), np.asarray(m.m2)) for m in (first, second)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        safe = np.maximum(n_a + n_b, 1)
        delta = mean_b - mean_a
        mean = np.where(n_a == 0, mean_b, np.where(n_b == 0, mean_a, mean_a + delta * n_b / safe))
        m2 = m2_a + m2_b + delta**2 * n_a * n_b / safe
    low = np.where(n_a == 0, second.min, np.where(n_b == 0, first.min, np.minimum(first.min, second.min)))
    high = np.where(n_a == 0, second.max, np.where(n_b == 0, first.max, np.maximum(first.max, second.max)))
    counts = [a + b for a, b in zip(first.count, second.count, strict=True)]
    not_finite = first.num_not_finite + second.num_not_finite
    known = len(first.sketch) == len(second.sketch)
    sketches = [merge_sketches(*pair) for pair in zip(first.sketch, second.sketch, strict=True)] if known else []
    return Moments(counts, _kept(mean), _kept(m2), low.tolist(), high.tolist(), not_finite, sketches)


def _kept(values: Array) -> list[float]:
    """As JSON can have them: what is too large for a double is the largest one."""
    kept: list[float] = np.nan_to_num(values, nan=LARGEST, posinf=LARGEST, neginf=-LARGEST).tolist()
    return kept


class Statistics(msgspec.Struct, forbid_unknown_fields=True):
    """Statistics of some episodes: observations by column, rewards, returns, lengths, and counts of actions."""

    observations: dict[str, Moments]
    reward: Moments
    returns: Moments
    lengths: Moments
    actions: Annotated[list[Count], Meta(max_length=MAX_ACTIONS)] = []


def statistics_of(episode: RecordedEpisode, num_actions: int) -> Statistics:
    """The statistics of one episode; final observations count too."""
    return statistics_of_episodes([episode], num_actions)


def statistics_of_episodes(episodes: Sequence[RecordedEpisode], num_actions: int) -> Statistics:
    """The statistics of one episode or more, which have the same columns. Memory: a copy of their arrays."""

    def joined(part: Callable[[RecordedEpisode], Array]) -> Array:
        return part(episodes[0]) if len(episodes) == 1 else np.concatenate([part(each) for each in episodes])

    counted = num_actions <= MAX_ACTIONS
    observations = {
        name: moments_of(joined(lambda each, name=name: each.observations[name]))  # type: ignore[misc]
        for name in episodes[0].observations
    }
    return Statistics(
        observations,
        moments_of(joined(lambda each: each.reward)),
        moments_of(np.array([each.undiscounted_return for each in episodes])),
        moments_of(np.array([each.num_steps for each in episodes])),
        np.bincount(joined(lambda each: each.action), minlength=num_actions).tolist() if counted else [],
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
    episodes, steps = counts
    named = {"rewards": (found.reward, 1, steps), "returns": (found.returns, 1, episodes)}
    named["lengths"] = (found.lengths, 1, episodes)
    for name, shape in shapes.items():
        named[name] = (found.observations[name], num_elements(shape), episodes + steps)
    for name, (moments, size, rows) in named.items():
        if problem := _moments_problem(moments, size, rows):
            return f"{name}: {problem}"
    if found.actions and sum(found.actions) != steps:
        return f"it counts {sum(found.actions):,} actions, and the manifest has {steps:,} steps"
    return None


def _moments_problem(moments: Moments, size: int, rows: int) -> str | None:
    """Why these cannot be the moments of this number of rows and elements."""
    elements = size if size <= MAX_ELEMENTS else 1
    lists = (moments.count, moments.mean, moments.m2, moments.min, moments.max)
    if {len(each) for each in lists} != {elements}:
        return f"it should have {elements:,} elements"
    if sum(moments.count) + moments.num_not_finite != rows * size:
        return f"it counts {sum(moments.count):,} values, and the manifest has {rows * size:,}"
    if any(low > high for low, high in zip(moments.min, moments.max, strict=True)) or min(moments.m2) < 0:
        return "a smallest value is above the largest, or a deviation below 0"
    if not moments.sketch:
        return None
    counts = moments.count if size <= MAX_SKETCHES else [sum(moments.count)]
    if len(moments.sketch) != len(counts):
        return f"it has {len(moments.sketch):,} sketches, and should have {len(counts):,}"
    found = (sketch.problem(count) for sketch, count in zip(moments.sketch, counts, strict=True))
    return next(filter(None, found), None)
