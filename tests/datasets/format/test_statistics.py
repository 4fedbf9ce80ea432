import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.datasets.format.statistics import Moments, merge_moments, merge_statistics, moments_of, statistics_of
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
    assert found == Moments([2, 0], [2.0, 0.0], [2.0, 0.0], [1.0, 0.0], [3.0, 0.0], 2)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Moments) == found


def test_actions_returns_and_lengths_are_counted() -> None:
    episodes = [make_episode(0, 3), make_episode(1, 4)]
    found = merge_statistics(statistics_of(episode, 2) for episode in episodes)
    assert found is not None
    assert sum(found.actions) == 7
    assert found.lengths.mean == [3.5]
    assert found.returns.min == [1.0 + 2.0 + 3.0]
    assert merge_statistics([]) is None
