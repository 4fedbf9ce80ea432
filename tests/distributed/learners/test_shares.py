"""Shares of a batch, and the weight of their gradients."""

import numpy as np
import pytest

from qfleet.data import Array, Batch
from qfleet.distributed.learners.shares import (
    LearnerSpeeds,
    assign_items,
    join_priorities,
    pieces_in_range,
    share_of_batch,
    share_of_replay,
    totals_of,
)
from qfleet.learn.batch_split import select_items
from qfleet.replay import Prioritized, SamplerTotals, Uniform


def random_batch(num: int) -> Batch:
    ones = np.ones(num, np.float32)
    return Batch(
        np.zeros((num, 4), np.float32),
        np.zeros(num, np.int64),
        ones,
        ones,
        np.zeros((num, 4), np.float32),
        ones,
        np.arange(num),
    )


def test_shares_add_up_to_the_batch() -> None:
    batch, owners = random_batch(10), assign_items(10, (1.0,) * 3)
    parts = [select_items(batch, owners == rank) for rank in range(3)]
    assert sorted(np.concatenate([part.ids for part in parts]).tolist()) == list(range(10))
    assert [len(part.ids) for part in parts] == [4, 3, 3]
    assert sum(share_of_batch(owners, rank, 3) for rank in range(3)) == pytest.approx(3.0)
    assert share_of_batch(assign_items(9, (1.0,) * 3), 1, 3) == 1.0


@pytest.mark.parametrize(("items", "shares"), [(2, (100.0, 1.0)), (5, (1000.0, 1.0, 1.0)), (3, (1.0, 1.0, 500.0))])
def test_the_slowest_learner_gets_an_item_too(items: int, shares: tuple[float, ...]) -> None:
    assert set(assign_items(items, shares).tolist()) == set(range(len(shares)))


def test_shares_follow_speeds() -> None:
    speeds = LearnerSpeeds(2, balance=True)
    named: list[tuple[int, float]] = []
    for _ in range(200):
        owners = assign_items(32, speeds.shares)
        for rank, speed in enumerate((1_000.0, 500.0)):
            items = int((owners == rank).sum())
            speeds.note(rank, items, items / speed)
        named += speeds.rebalance()
    owners = assign_items(30, speeds.shares)
    assert [int((owners == rank).sum()) for rank in range(2)] == [20, 10]  # half as fast: half as many
    assert [share_of_batch(owners, rank, 2) for rank in range(2)] == pytest.approx([4 / 3, 2 / 3])
    assert set(owners[:6].tolist()) == {0, 1}  # both from the beginning on
    assert named == [(1, pytest.approx(0.5))]  # once, and beside the fastest


def test_a_slow_learner_is_reported_once_and_shares_stay_equal_without_balance() -> None:
    speeds, fixed = LearnerSpeeds(3, balance=True), LearnerSpeeds(3, balance=False)
    named: list[list[tuple[int, float]]] = [[], []]
    for _ in range(300):
        for each, slow in zip((speeds, fixed), named, strict=True):
            for rank, speed in enumerate((1_000.0, 900.0, 100.0)):
                each.note(rank, 10, 10 / speed)
            slow += each.rebalance()
    assert named == [[(2, pytest.approx(0.1))]] * 2  # whether shares follow or not
    assert fixed.shares == (1.0,) * 3
    assert set(assign_items(4, speeds.shares).tolist()) == {0, 1, 2}  # every learner gets an item


def test_priorities_find_their_batch_and_others_stay_late() -> None:
    ids, owners = np.arange(4), np.array([0, 1, 0, 1])
    late = [(np.array([7, 8]), np.array([1.0, 1.0])), (np.array([1, 3]), np.array([5.0, 6.0]))]
    found = join_priorities(ids, owners, np.array([2.0, 3.0]), late)
    assert found.tolist() == [2.0, 5.0, 3.0, 6.0]
    assert [known[0].tolist() for known in late] == [[7, 8]]
    assert np.isnan(join_priorities(ids, owners, np.array([2.0, 3.0]), [])).tolist() == [False, True, False, True]


def test_pieces_of_a_range_name_their_tensors() -> None:
    assert pieces_in_range([3, 4, 2], 0, 5) == [(0, 3), (1, 2)]
    assert pieces_in_range([3, 4, 2], 5, 9) == [(1, 2), (2, 2)]
    assert pieces_in_range([3, 4, 2], 0, 9) == [(0, 3), (1, 4), (2, 2)]


# Actor-learners


def drawn_from(priorities: Array, seed: int, beta: float) -> tuple[Prioritized, Array, Array]:
    """A sampler with these priorities that has drawn once: which items, by what weights."""
    sampler = Prioritized(len(priorities), alpha=1.0, beta_start=beta, beta_end=beta, eps=0.0)
    sampler.set_live(0, len(priorities))
    sampler.update(np.arange(len(priorities)), priorities.astype(np.float32))
    return sampler, *sampler.draw(64, np.random.default_rng(seed))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_actor_learners_count_as_if_their_items_were_in_one_replay(beta: float) -> None:
    rng = np.random.default_rng(3)
    parts = [rng.uniform(0.1, scale, num) for scale, num in ((1.0, 300), (20.0, 80), (5.0, 500))]
    whole = np.concatenate(parts)
    samplers = [drawn_from(part, seed, beta) for seed, part in enumerate(parts)]
    stocks = [sampler.totals() for sampler, _, _ in samplers]
    totals = totals_of(stocks)
    assert totals.items == 880
    assert totals.mass == pytest.approx(whole.sum(), rel=1e-6)
    found = []
    for part, stock, (_, serials, weight) in zip(parts, stocks, samplers, strict=True):
        # The importance weights before they were divided by the largest, and the weight of the mean gradient.
        raw = (len(part) * part / part.sum()) ** -beta
        assert weight == pytest.approx(raw[serials] / stock.top, rel=1e-4)
        found.append(part / part.sum() * raw / stock.top * share_of_replay(totals, stock) / len(parts))
    expected = whole / whole.sum() * (len(whole) * whole / whole.sum()) ** -beta
    assert np.concatenate(found) == pytest.approx(expected / totals.top, rel=1e-5)
    assert (
        max(share_of_replay(totals, stock) / (len(parts) * stock.mass / totals.mass) for stock in stocks) <= 1.0 + 1e-9
    )


def test_without_priorities_an_actor_learner_counts_by_its_items() -> None:
    first, second = Uniform(), Uniform()
    first.set_live(0, 100)
    second.set_live(50, 350)
    totals = totals_of([first.totals(), second.totals()])
    assert [share_of_replay(totals, sampler.totals()) for sampler in (first, second)] == pytest.approx([0.5, 1.5])


def test_a_single_actor_learner_counts_fully() -> None:
    sampler, _, _ = drawn_from(np.random.default_rng(0).uniform(0.1, 9.0, 50), 1, 0.6)
    assert share_of_replay(totals_of([sampler.totals()]), sampler.totals()) == 1.0
    assert SamplerTotals(0, 0.0) == Uniform().totals()
