from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.datasets.epochs import EpochOrder, owners_by_shard

COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=9).map(tuple)


def used(order: EpochOrder, positions: np.ndarray) -> Counter[tuple[int, int]]:
    shards, rows = order.locate(positions)
    return Counter(zip(shards.tolist(), rows.tolist(), strict=True))


@settings(deadline=None)
@given(COUNTS, st.integers(0, 2**31), st.integers(1, 5), st.data())
def test_every_transition_is_used_once_per_epoch_by_one_learner(
    counts: tuple[int, ...], seed: int, num_open: int, data: st.DataObject
) -> None:
    """The number of learners changes from batch to batch."""
    order = EpochOrder(counts, seed, num_open)
    everything = Counter({(shard, row): 1 for shard, count in enumerate(counts) for row in range(count)})
    found: Counter[tuple[int, int]] = Counter()
    begin = 0
    while begin < len(order):
        positions = np.arange(begin, min(begin + data.draw(st.integers(1, 19)), len(order)))
        begin += len(positions)
        num_learners = data.draw(st.integers(1, 4))
        owners = owners_by_shard(np.arange(len(positions)) % num_learners, order.locate(positions)[0])
        for rank in range(num_learners):
            found += used(order, positions[owners == rank])
    assert found == everything
    assert used(order, np.arange(len(order), 2 * len(order))) == everything


@settings(deadline=None)
@given(COUNTS, st.integers(1, 4), st.data())
def test_the_position_is_the_whole_state(counts: tuple[int, ...], num_open: int, data: st.DataObject) -> None:
    """Another object that begins at any position goes on without a gap."""
    begin = data.draw(st.integers(0, 2 * sum(counts)))
    num = data.draw(st.integers(1, 20))
    whole = EpochOrder(counts, 7, num_open).locate(np.arange(begin + num))
    rest = EpochOrder(counts, 7, num_open).locate(np.arange(begin, begin + num))
    for all_of_it, part in zip(whole, rest, strict=True):
        np.testing.assert_array_equal(all_of_it[begin:], part)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = EpochOrder((50, 60, 70), 0, 2)
    first, second = (order.locate(np.arange(180) + epoch * 180) for epoch in (0, 1))
    assert (first[1] != second[1]).any()
    assert (EpochOrder((50, 60, 70), 1, 2).locate(np.arange(180))[1] != first[1]).any()
    assert not (np.diff(first[1]) == 1).all()


def test_the_transitions_of_open_shards_are_mixed_and_no_others() -> None:
    order = EpochOrder((100,) * 6, 3, open_shards=3)
    shards, _ = order.locate(np.arange(600))
    halves = [set(shards[:300].tolist()), set(shards[300:].tolist())]
    assert [len(half) for half in halves] == [3, 3]
    assert not halves[0] & halves[1]
    for begin in range(0, 600, 50):  # 50 of 100, 100 and 100: each shard has about 17 of them
        assert min(Counter(shards[begin : begin + 50].tolist()).values()) >= 5
        assert len(set(shards[begin : begin + 50].tolist())) == 3


def test_groups_of_shards_are_of_nearly_equal_size() -> None:
    assert [len(group) for group in EpochOrder((1,) * 9, 0, open_shards=4).groups(0)] == [3, 3, 3]


def test_one_open_shard_is_finished_before_the_next_one_begins() -> None:
    shards, _ = EpochOrder((5, 6, 7), 3).locate(np.arange(18))
    assert (np.diff(shards) != 0).sum() == 2


def test_what_is_opened_next_is_known() -> None:
    order = EpochOrder((5,) * 4, 1, open_shards=2)
    for begin in range(0, 40, 10):
        opened, following = order.shards_after(begin + 3)
        assert set(order.locate(np.arange(begin, begin + 10))[0].tolist()) == set(opened)
        assert set(order.locate(np.arange(begin + 10, begin + 20))[0].tolist()) == set(following)


def test_a_learner_reads_few_shards() -> None:
    """Of four open shards each of two learners reads half, and at most one more that both share."""
    order = EpochOrder((400,) * 4, 0, open_shards=4)
    for begin in range(0, 1600, 64):
        shards = order.locate(np.arange(begin, begin + 64))[0]
        owners = owners_by_shard(np.arange(64) % 2, shards)
        assert np.bincount(owners).tolist() == [32, 32]
        assert sum(len(set(shards[owners == rank].tolist())) for rank in range(2)) <= 5


def test_empty_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one transition"):
        EpochOrder((3, 0), 0)
