from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.datasets.epochs import EpochOrder, learner_positions

COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=6).map(tuple)


def used(order: EpochOrder, positions: np.ndarray) -> Counter[tuple[int, int]]:
    shards, rows = order.locate(positions)
    return Counter(zip(shards.tolist(), rows.tolist(), strict=True))


@settings(deadline=None)
@given(COUNTS, st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 9))
def test_every_transition_is_used_once_per_epoch_by_one_learner(
    counts: tuple[int, ...], seed: int, num_learners: int, batch: int
) -> None:
    order = EpochOrder(counts, seed)
    everything = Counter({(shard, row): 1 for shard, count in enumerate(counts) for row in range(count)})
    found: Counter[tuple[int, int]] = Counter()
    for begin in range(0, len(order), batch):
        end = min(begin + batch, len(order))
        for rank in range(num_learners):
            found += used(order, learner_positions(begin, end, rank, num_learners))
    assert found == everything
    assert used(order, np.arange(len(order), 2 * len(order))) == everything


@settings(deadline=None)
@given(COUNTS, st.data())
def test_the_position_is_the_whole_state(counts: tuple[int, ...], data: st.DataObject) -> None:
    """Another object that begins at any position, with another number of learners, goes on without a gap."""
    begin = data.draw(st.integers(0, 2 * sum(counts)))
    num = data.draw(st.integers(1, 20))
    whole = EpochOrder(counts, 7).locate(np.arange(begin + num))
    rest = EpochOrder(counts, 7).locate(np.arange(begin, begin + num))
    for all_of_it, part in zip(whole, rest, strict=True):
        np.testing.assert_array_equal(all_of_it[begin:], part)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = EpochOrder((50, 60, 70), 0)
    first, second = (order.locate(np.arange(180) + epoch * 180) for epoch in (0, 1))
    assert (first[1] != second[1]).any()
    assert (EpochOrder((50, 60, 70), 1).locate(np.arange(180))[1] != first[1]).any()
    assert not (np.diff(first[1]) == 1).all()


def test_a_shard_is_finished_before_the_next_one_begins() -> None:
    shards, _ = EpochOrder((5, 6, 7), 3).locate(np.arange(18))
    assert (np.diff(shards) != 0).sum() == 2


def test_empty_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one transition"):
        EpochOrder((3, 0), 0)
