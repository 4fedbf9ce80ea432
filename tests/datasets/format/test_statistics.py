import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.datasets.format.statistics import (
    PAIRS_FROM,
    Moments,
    byte_counts,
    merge_moments,
    merge_statistics,
    moments_of,
    statistics_of,
    statistics_of_episodes,
)
from tests.support.recorded import make_episode


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.integers(0, 40))
def test_merged_moments_are_those_of_the_whole(values: list[float], cut: int) -> None:
    array = np.array(values)
    merged = merge_moments(moments_of(array[:cut]), moments_of(array[cut:]))
    whole = moments_of(array)
    assert merged.count == whole.count == [len(values)]
    np.testing.assert_allclose(merged.mean, [array.mean()], atol=1e-9)
    np.testing.assert_allclose(merged.m2, [((array - array.mean()) ** 2).sum()], atol=1e-5)
    assert (merged.min, merged.max) == ([array.min()], [array.max()])


def test_numbers_that_are_not_finite_are_counted_apart() -> None:
    found = moments_of(np.array([[1.0, np.nan], [3.0, np.inf]]))
    assert (found.count, found.mean, found.m2) == ([2, 0], [2.0, 0.0], [2.0, 0.0])
    assert (found.min, found.max, found.num_not_finite) == ([1.0, 0.0], [3.0, 0.0], 2)
    assert [sum(each.counts) for each in found.sketch] == [2, 0]
    assert msgspec.json.decode(msgspec.json.encode(found), type=Moments) == found


@pytest.mark.parametrize("shape", [(3,), (40,), (5_000,)])
@pytest.mark.parametrize("kind", ["uint8", "bool", "float32"])
def test_bytes_have_the_moments_of_the_same_numbers(shape: tuple[int, ...], kind: str) -> None:
    values = np.random.default_rng(0).integers(0, 2 if kind == "bool" else 256, (200, *shape)).astype(kind)
    found = moments_of(values)
    numbers = values.astype(np.float64).reshape(-1, 1) if shape[0] > 4_096 else values.astype(np.float64)
    np.testing.assert_allclose(found.mean, numbers.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.m2, ((numbers - numbers.mean(0)) ** 2).sum(0), rtol=1e-9)
    assert (found.min, found.max) == (numbers.min(0).tolist(), numbers.max(0).tolist())
    assert found.count == [len(numbers)] * numbers.shape[1]
    assert [sum(each.counts) for each in found.sketch] == ([200] * 3 if shape == (3,) else [values.size])


def test_moments_that_no_double_holds_are_the_largest_double() -> None:
    found = merge_moments(moments_of(np.array([1e308, 1.5e308])), moments_of(np.array([-1e308])))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Moments) == found
    assert (found.min, found.max) == ([-1e308], [1.5e308])


def test_statistics_without_sketches_are_read_and_stay_without() -> None:
    old = moments_of(np.arange(4.0))
    old.sketch = []
    assert msgspec.json.decode(b'{"count":[1],"mean":[1],"m2":[0],"min":[1],"max":[1]}', type=Moments).sketch == []
    merged = merge_moments(old, moments_of(np.arange(3.0)))
    assert (merged.count, merged.sketch, merged.quantiles([0.5])) == ([7], [], None)


def test_statistics_of_episodes_are_those_of_each_merged() -> None:
    episodes = [make_episode(number, number + 1) for number in range(6)]
    together = statistics_of_episodes(episodes, 2)
    merged = merge_statistics(statistics_of(each, 2) for each in episodes)
    assert merged is not None
    assert merged.actions == together.actions
    for one, other in ((merged.reward, together.reward), (merged.observations["obs"], together.observations["obs"])):
        assert (one.count, one.min, one.max, one.sketch) == (other.count, other.min, other.max, other.sketch)
        np.testing.assert_allclose(one.m2, other.m2, rtol=1e-9)


def test_actions_returns_and_lengths_are_counted() -> None:
    episodes = [make_episode(0, 3), make_episode(1, 4)]
    found = merge_statistics(statistics_of(episode, 2) for episode in episodes)
    assert found is not None
    assert sum(found.actions) == 7
    assert found.lengths.mean == [3.5]
    assert found.returns.min == [1.0 + 2.0 + 3.0]
    assert merge_statistics([]) is None


def test_bytes_are_counted_in_pairs() -> None:
    values = np.random.default_rng(1).integers(0, 256, PAIRS_FROM + 3, np.uint8)
    for part in (values, values[1:], values[::2], values[:5]):
        assert (byte_counts(part) == np.bincount(part, minlength=256)).all()
