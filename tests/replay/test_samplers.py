"""Prioritised draws follow P and carry the right weights; the sum tree adds up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.data import Array
from qfleet.replay import Prioritized, Uniform
from qfleet.replay.tree import BRANCHES, tree_find, tree_levels, update_sums

CHI_SQUARE_19 = 43.82  # 99.9 % quantile for 19 degrees of freedom


def leaves(sampler: Prioritized) -> Array:
    return sampler.leaves


def filled(priority: list[float], **options: float) -> Prioritized:
    sampler = Prioritized(len(priority), **options)  # type: ignore[arg-type]
    sampler.set_live(0, len(priority))
    sampler.update(np.arange(len(priority)), np.array(priority, np.float32))
    return sampler


def test_negative_priorities_are_not_loaded() -> None:
    sampler = filled([1, 2, 3])
    state = sampler.state_dict()
    state["leaves"][1] = -0.5
    with pytest.raises(ValueError, match="negative"):
        sampler.load_state_dict(state)


def test_golden_probabilities() -> None:
    tree = leaves(filled([1, 2, 3, 4], alpha=0.6, eps=1e-12))
    assert tree / tree.sum() == pytest.approx([0.1482, 0.2247, 0.2866, 0.3405], abs=5e-5)


def test_golden_weights() -> None:
    sampler = filled([1, 2, 3, 4], alpha=0.6, beta_start=0.4, eps=1e-12)
    serials, weight = sampler.draw(400, np.random.default_rng(0))
    found = [weight[serials == item] for item in range(4)]
    assert all(np.ptp(same) == 0 for same in found)
    assert [same[0] for same in found] == pytest.approx([1, 0.8467, 0.7682, 0.7170], abs=5e-5)
    assert weight.dtype == np.float32


def test_beta_rises_with_draws_and_stays() -> None:
    sampler = filled([1, 2], beta_start=0.4, beta_end=1.0, beta_updates=3)
    betas = []
    for _ in range(5):
        betas.append(sampler.beta)
        sampler.draw(1, np.random.default_rng(0))
    assert betas == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0])


def test_draws_follow_the_probabilities() -> None:
    rng = np.random.default_rng(7)
    sampler = filled(rng.uniform(0.01, 5.0, 20).tolist(), alpha=0.6)
    counts = np.zeros(20)
    for _ in range(10_000):
        counts += np.bincount(sampler.draw(10, rng)[0], minlength=20)
    share = leaves(sampler)[:20] / sampler.tree[-1]
    assert counts.sum() == 100_000
    assert ((counts - 1e5 * share) ** 2 / (1e5 * share)).sum() < CHI_SQUARE_19


def test_uniform_draws_are_uniform_over_the_live_items() -> None:
    sampler, rng = Uniform(), np.random.default_rng(7)
    sampler.set_live(100, 120)
    serials, weight = sampler.draw(100_000, rng)
    counts = np.bincount(serials - 100, minlength=20)
    assert len(counts) == 20
    assert ((counts - 5_000) ** 2 / 5_000).sum() < CHI_SQUARE_19
    assert (weight == 1).all()


def test_new_items_get_the_largest_priority_ever_seen() -> None:
    sampler = Prioritized(4, alpha=0.5, eps=1e-12)
    sampler.set_live(0, 2)
    assert leaves(sampler)[:2] == pytest.approx([1, 1])  # one, before anything was seen
    sampler.update(np.array([0]), np.array([9.0], np.float32))
    sampler.update(np.array([0]), np.array([0.25], np.float32))  # 9 is no longer in the buffer
    sampler.set_live(0, 3)
    assert leaves(sampler)[:3] == pytest.approx([0.5, 1, 3])
    sampler.set_live(3, 5)
    assert leaves(sampler) == pytest.approx([3, 0, 0, 3])  # removed items can no longer be drawn


@settings(max_examples=60)
@given(st.integers(1, 50), st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1e6)), max_size=60), st.integers(0, 99))
def test_the_root_is_always_the_sum_of_the_leaves(capacity: int, moves: list[tuple[int, float]], seed: int) -> None:
    sampler, rng = Prioritized(capacity), np.random.default_rng(seed)
    for more, priority in moves:
        head = sampler.head + min(more, capacity)
        sampler.set_live(max(sampler.tail, head - capacity), head)
        serials, weight = sampler.draw(5, rng)
        assert ((serials >= sampler.tail) & (serials < head)).all()
        assert weight.max() == 1
        sampler.update(serials, np.full(5, priority, np.float32))
        assert sampler.tree[-1] == pytest.approx(leaves(sampler).sum(), rel=1e-12)
        assert np.count_nonzero(leaves(sampler)) == head - sampler.tail


@pytest.mark.parametrize(("tail", "head"), [(0, 5), (3, 8), (3, 5), (6, 10)])
def test_the_tree_never_finds_an_empty_leaf(tail: int, head: int) -> None:
    sampler = Prioritized(8)
    sampler.set_live(0, 8)
    sampler.set_live(tail, max(8, head))
    if head < 8:
        sampler.leaves[head:] = 0.0
        update_sums(sampler.tree, sampler.levels, 0, 7)
    total = sampler.tree[-1]
    found = np.empty(5, np.int64)
    tree_find(sampler.tree, sampler.levels, total * np.array([0.0, 0.5, 0.999999, 1.0, 1.000001]), found)
    assert set(found.tolist()) <= {serial % 8 for serial in range(tail, head)}


@pytest.mark.parametrize("capacity", [1, 2, 15, 16, 17, 256, 257, 5_000])
def test_positions_fall_into_the_leaf_of_the_cumulative_sum(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    sampler = Prioritized(capacity)
    sampler.set_live(3 * capacity, 3 * capacity + capacity)
    sampler.leaves[:] = rng.random(capacity) * (rng.random(capacity) < 0.7)
    sampler.leaves[rng.integers(capacity)] = 1.0
    update_sums(sampler.tree, sampler.levels, 0, capacity - 1)
    assert len(sampler.tree) == tree_levels(capacity)[-1] <= capacity * BRANCHES / (BRANCHES - 1) + 6 * BRANCHES
    ends = np.cumsum(sampler.leaves)
    positions = rng.random(1_000) * ends[-1]
    clear = np.abs(positions[:, None] - ends).min(1) > 1e-9  # rounding decides only at the very border
    found = np.empty(len(positions), np.int64)
    tree_find(sampler.tree, sampler.levels, positions.copy(), found)
    assert np.array_equal(found[clear], np.searchsorted(ends, positions, "right")[clear])
