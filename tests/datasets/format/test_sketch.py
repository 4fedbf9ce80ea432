import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.datasets.format.sketch import (
    LAST_BUCKET,
    RELATIVE_ERROR,
    Sketch,
    bucket_numbers,
    bucket_value,
    merge_sketches,
    sketch_of,
    sketch_of_counts,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(st.floats(2.0**-32, 3.4e38))
def test_a_bucket_is_near_its_values(value: float) -> None:
    number = int(bucket_numbers(np.array([value]))[0])
    fraction, exponent = math.frexp(value)  # value = fraction * 2**exponent, fraction from 0.5 to 1
    assert number - 1 == (exponent - 1 + 32) * 64 + math.floor((2 * fraction - 1) * 64)
    assert 0 <= value - bucket_value(number) < RELATIVE_ERROR * value
    assert bucket_numbers(np.array([-value]))[0] == -number


def test_whole_numbers_below_128_are_exact() -> None:
    assert [bucket_value(int(each)) for each in bucket_numbers(np.arange(-127.0, 128))] == list(range(-127, 128))


def test_known_buckets() -> None:
    values = np.array([0.0, -0.0, 2.0**-33, 2.0**-32, 1.0, 1.0 + 1 / 64, 63.0, 500.0, -1.0, 1e300, -1e300])
    expected = [0, 0, 0, 1, 2049, 2050, 32 * 64 + 5 * 64 + 62 + 1, 32 * 64 + 8 * 64 + 62, -2049]
    assert bucket_numbers(values).tolist() == [*expected, LAST_BUCKET, -LAST_BUCKET]


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0, 1))
def test_quantiles_are_those_of_the_values(values: list[float], share: float) -> None:
    exact = float(np.quantile(values, share, method="lower"))
    (found,) = sketch_of(np.array(values)).quantiles([share])
    assert abs(found - exact) <= max(RELATIVE_ERROR * abs(exact), 2.0**-32)


@settings(deadline=None)
@given(st.lists(st.lists(NUMBERS, max_size=20), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_sketches_merge_exactly_in_any_order(parts: list[list[float]], random: object) -> None:
    whole = sketch_of(np.array([value for part in parts for value in part]))
    sketches = [sketch_of(np.array(part)) for part in parts]
    random.shuffle(sketches)  # type: ignore[attr-defined]
    merged = sketches[0]
    for each in sketches[1:]:
        merged = merge_sketches(merged, each)
    assert merged == whole
    assert merged.problem(sum(map(len, parts))) is None


def test_many_values_and_counted_values_have_the_same_sketch() -> None:
    values = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.float64)
    counts = np.bincount(values.astype(int), minlength=256)
    assert sketch_of(values) == sketch_of_counts(np.arange(256.0), counts)
    assert sketch_of(values[:100]) == sketch_of_counts(np.arange(256.0), np.bincount(values[:100].astype(int)))


@pytest.mark.parametrize(
    ("sketch", "problem"),
    [
        (Sketch([1, 2], [1]), "2 buckets and 1 counts"),
        (Sketch([2, 1], [1, 1]), "rising order"),
        (Sketch([1, 1], [1, 1]), "rising order"),
        (Sketch([1, 2], [1, 2]), "counts 3 values, and there are 2"),
    ],
)
def test_what_is_no_sketch_is_refused(sketch: Sketch, problem: str) -> None:
    assert problem in (sketch.problem(2) or "")
