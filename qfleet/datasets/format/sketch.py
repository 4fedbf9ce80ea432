"""A sketch of quantiles: how many values fell into each of many buckets, whose width grows with the value.

It is DDSketch (Masson, Rim and Lee 2019, arXiv 1908.10693) with buckets that are linear between powers of two. Sketches
merge exactly, in any order: their counts are added. A bucket is read off the bits of a double, without a logarithm, so
every machine finds the same one. K values.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from qfleet.data import Array

PER_OCTAVE = 64  # buckets between a power of two and the next
RELATIVE_ERROR = 1 / PER_OCTAVE  # of a quantile whose size is between the next two
SMALLEST_EXPONENT = -32  # what is closer to 0 than 2**-32 counts as 0
LARGEST_EXPONENT = 127  # what is farther than 2**128 is in the last bucket: the largest float32 is below that
LAST_BUCKET = (LARGEST_EXPONENT - SMALLEST_EXPONENT + 1) * PER_OCTAVE
MAX_BUCKETS = 2 * LAST_BUCKET + 1

_FRACTION_BITS = 52 - 6  # of the 52 bits of a double's fraction, those that are not in the bucket's number
_FIRST_KEY = (1023 + SMALLEST_EXPONENT) * PER_OCTAVE - 1
_FEW = 4_096  # values: fewer are sorted, more are counted in all buckets

Bucket = Annotated[int, Meta(ge=-LAST_BUCKET, le=LAST_BUCKET)]
BucketCount = Annotated[int, Meta(ge=1, le=2**53)]


class Sketch(msgspec.Struct, forbid_unknown_fields=True):
    """The buckets that hold values, in rising order, and how many each holds.

    Bucket 0 holds what is about 0. Bucket k > 0 holds values from 2**e * (1 + m / 64) to the next bucket, where
    k - 1 = (e + 32) * 64 + m; bucket -k holds the same values below 0.
    """

    buckets: Annotated[list[Bucket], Meta(max_length=MAX_BUCKETS)]
    counts: Annotated[list[BucketCount], Meta(max_length=MAX_BUCKETS)]

    def problem(self, count: int) -> str | None:
        """Why this cannot be a sketch of this number of values; None if it can."""
        if len(self.buckets) != len(self.counts):
            return f"a sketch has {len(self.buckets):,} buckets and {len(self.counts):,} counts"
        if (np.diff(self.buckets) <= 0).any():
            return "the buckets of a sketch are not in rising order"
        if sum(self.counts) != count:
            return f"a sketch counts {sum(self.counts):,} values, and there are {count:,}"
        return None

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """The value below which each share of the values is, at most 1/64 too close to 0; 0 of no values."""
        ends = np.cumsum(self.counts)
        if not len(ends):
            return [0.0 for _ in shares]
        ranks = [share * (int(ends[-1]) - 1) for share in shares]
        return [bucket_value(self.buckets[int(np.searchsorted(ends, rank, side="right"))]) for rank in ranks]


def bucket_value(bucket: int) -> float:
    """The value of a bucket that is next to 0, so that whole numbers below 128 are exact."""
    if bucket == 0:
        return 0.0
    octave, part = divmod(abs(bucket) - 1, PER_OCTAVE)
    size = 2.0 ** (octave + SMALLEST_EXPONENT) * (1.0 + part / PER_OCTAVE)
    return size if bucket > 0 else -size


def bucket_numbers(values: Array) -> Array:  # [K] finite numbers
    """The bucket of each value."""
    bits = np.abs(values, dtype=np.float64).view(np.int64)
    numbers: Array = np.clip((bits >> _FRACTION_BITS) - _FIRST_KEY, 0, LAST_BUCKET)
    return np.asarray(np.where(values < 0, -numbers, numbers))


def sketch_of(values: Array) -> Sketch:  # [K] finite numbers
    """The sketch of some values."""
    return _counted(bucket_numbers(values))


def sketch_of_counts(values: Array, counts: Array) -> Sketch:  # [K], [K]
    """The sketch of values that there are several of each."""
    there = counts > 0
    return _summed(bucket_numbers(values[there]), counts[there])


def _counted(numbers: Array) -> Sketch:
    if len(numbers) < _FEW:
        buckets, counts = np.unique(numbers, return_counts=True)
        return Sketch(buckets.tolist(), counts.tolist())
    found = np.bincount(numbers + LAST_BUCKET, minlength=MAX_BUCKETS)
    there = np.flatnonzero(found)
    return Sketch((there - LAST_BUCKET).tolist(), found[there].tolist())


def _summed(numbers: Array, counts: Array) -> Sketch:
    buckets, places = np.unique(numbers, return_inverse=True)
    summed = np.zeros(len(buckets), np.int64)
    np.add.at(summed, places, counts)
    return Sketch(buckets.tolist(), summed.tolist())


def merge_sketches(first: Sketch, second: Sketch) -> Sketch:
    """The sketch of the values of both."""
    numbers = np.array([*first.buckets, *second.buckets], np.int64)
    return _summed(numbers, np.array([*first.counts, *second.counts], np.int64))
