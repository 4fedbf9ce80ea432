from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.datasets.epochs import EpochOrder, owners_of

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
        owners = owners_of(order, positions, np.arange(len(positions)) % num_learners, (1.0,) * num_learners)
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


def test_the_transitions_of_open_shards_are_mixed_evenly() -> None:
    """Three queues of two shards: any fifty positions have as many from each, of one shard each."""
    order = EpochOrder((100,) * 6, 3, open_shards=3)
    shards, _ = order.locate(np.arange(600))
    for begin in range(0, 300, 50):
        counts = Counter(shards[begin : begin + 50].tolist())
        assert len(counts) == 3
        assert set(counts.values()) <= {16, 17}
    assert not set(shards[:300].tolist()) & set(shards[300:].tolist())


def test_queues_of_other_lengths_end_together() -> None:
    order = EpochOrder((3_000, 1_000), 3, open_shards=2)
    shards, _ = order.locate(np.arange(4_000))
    for begin in range(0, 4_000, 400):
        assert abs(int((shards[begin : begin + 400] == 0).sum()) - 300) <= 2


def test_one_open_shard_is_finished_before_the_next_one_begins() -> None:
    shards, _ = EpochOrder((5, 6, 7), 3).locate(np.arange(18))
    assert (np.diff(shards) != 0).sum() == 2


def test_what_is_opened_next_is_known() -> None:
    order = EpochOrder((5,) * 4, 1, open_shards=2)
    for begin in range(0, 40, 10):
        opened = order.open_at(begin + 3)
        following = [shard for shard, _ in order.next_after(begin + 3)]
        assert set(order.locate(np.arange(begin, begin + 10))[0].tolist()) == set(opened)
        assert set(order.locate(np.arange(begin + 10, begin + 20))[0].tolist()) == set(following)


def test_the_shard_that_is_needed_first_is_the_first() -> None:
    order = EpochOrder((400, 100, 100, 100, 100), 1, open_shards=2)
    assert order.next_after(0)[0][1] == 1  # queue 0 is the large shard


@pytest.mark.parametrize(("num_learners", "open_shards"), [(1, 4), (2, 4), (3, 6), (4, 4)])
def test_each_learner_reads_shards_of_its_own(num_learners: int, open_shards: int) -> None:
    order = EpochOrder((400,) * 24, 0, open_shards)
    read = [set[int]() for _ in range(num_learners)]
    for begin in range(0, len(order), 48):
        positions = np.arange(begin, begin + 48)
        equal = np.arange(48) % num_learners
        owners = owners_of(order, positions, equal, (1.0,) * num_learners)
        assert np.abs(np.bincount(owners) - 48 // num_learners).max() <= 3
        shards, _ = order.locate(positions)
        for rank in range(num_learners):
            read[rank] |= set(shards[owners == rank].tolist())
    assert sum(map(len, read)) == 24
    assert {len(each) for each in read} == {24 // num_learners}


def test_prepared_shards_go_to_the_learner_they_were_prepared_for() -> None:
    """The second learner is half as fast, and has half as much of every batch."""
    groups = (0, 0, 1, 0, 1)
    order = EpochOrder((200, 300, 150, 100, 150), 0, open_shards=4, groups=groups)
    shards, _ = order.locate(np.arange(900))
    for begin in range(0, 900, 90):
        positions = np.arange(begin, begin + 90)
        owners = owners_of(order, positions, np.arange(90) % 2, (1.0, 1.0))
        assert [groups[shard] for shard in shards[positions]] == owners.tolist()
        assert abs(int((owners == 1).sum()) - 30) <= 2


def test_learners_of_other_speeds_have_their_share_of_every_batch() -> None:
    order = EpochOrder((400,) * 4, 0, open_shards=4)
    wanted = np.repeat([0, 1], [42, 22])
    for begin in range(0, 1_600, 64):
        owners = owners_of(order, np.arange(begin, begin + 64), wanted, (1.3125, 0.6875))
        assert np.bincount(owners).tolist() == [42, 22]


def test_no_learner_is_without_a_transition() -> None:
    order = EpochOrder((400,) * 4, 0, open_shards=4)
    for begin in range(0, 1_600, 4):
        owners = owners_of(order, np.arange(begin, begin + 4), np.arange(4), (1.0,) * 4)
        assert sorted(owners.tolist()) == [0, 1, 2, 3]


def test_empty_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one transition"):
        EpochOrder((3, 0), 0)
