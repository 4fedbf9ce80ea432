"""A server's shard: each gradient at most once, none staler than allowed, and synchronous where it should be."""

import numpy as np
import pytest
import torch
from torch import Tensor

from qfleet.sync.gradient_rule import Push, Shard, shard_bounds


def make(workers: int = 2, **how: object) -> tuple[Shard, Tensor]:
    weights = torch.zeros(3).double()
    return Shard(weights, lambda gradient, factor: weights.sub_(gradient * factor), workers, **how), weights  # type: ignore[arg-type]


def push(worker: int, sequence: int, version: int, value: float = 1.0, incarnation: int = 0) -> Push:
    return Push((worker, incarnation, sequence), version, torch.full((3,), value).double())


def test_a_synchronous_step_is_the_mean_of_all_workers() -> None:
    shard, weights = make()
    assert shard.push(push(0, 0, 0, 1.0), 0.0) == "waiting"
    assert weights.tolist() == [0.0] * 3
    assert shard.push(push(1, 0, 0, 3.0), 1.0) == "applied"
    assert weights.tolist() == [-2.0] * 3
    assert shard.version == 1


def test_duplicates_are_refused() -> None:
    shard, weights = make(max_staleness=None)
    assert shard.push(push(0, 0, 0), 0.0) == "applied"
    assert shard.push(push(0, 0, 0), 0.0) == "duplicate"
    assert shard.push(push(0, 0, 1, incarnation=1), 0.0) == "applied"  # a later incarnation starts over
    assert shard.push(push(0, 5, 1, incarnation=0), 0.0) == "duplicate"  # and the old one is refused
    assert weights.tolist() == [-2.0] * 3


@pytest.mark.parametrize("bound", [0, 1, 4, None])
def test_none_is_staler_than_the_bound_under_random_delays(bound: int | None) -> None:
    rng, (shard, _) = np.random.default_rng(0), make(workers=4, max_staleness=bound)
    under_way: list[Push] = []
    sequences = [0] * 4
    for at in range(3_000):
        worker = int(rng.integers(4))
        if all(each.source[0] != worker for each in under_way):
            under_way.append(push(worker, sequences[worker], shard.version))
            sequences[worker] += 1
        if rng.random() < 0.4 and under_way:
            shard.push(under_way.pop(int(rng.integers(len(under_way)))), float(at))
    assert shard.version > 100
    if bound is not None:
        assert max(shard.staleness) <= bound
    else:
        assert max(shard.staleness) > 4
    taken = sum(shard.staleness.values()) + len(shard.waiting)
    assert taken + sum(shard.refused.values()) == sum(sequences) - len(under_way)


def test_spare_workers_are_not_waited_for() -> None:
    shard, weights = make(workers=3, spare=1)
    shard.push(push(0, 0, 0), 0.0)
    assert shard.push(push(2, 0, 0), 0.0) == "applied"
    assert shard.push(push(1, 0, 0), 0.0) == "stale"  # the slowest: its step was made without it
    assert weights.tolist() == [-1.0] * 3


def test_a_removed_worker_is_not_waited_for() -> None:
    shard, _ = make(workers=2)
    shard.push(push(0, 0, 0), 0.0)
    shard.remove_worker(1, 1.0)
    assert shard.version == 1
    shard.add_worker()
    assert shard.push(push(0, 1, 1), 2.0) == "waiting"


def test_a_window_applies_what_arrived() -> None:
    shard, weights = make(workers=4, max_staleness=None, window=3, window_seconds=5.0)
    for worker in (0, 1):
        assert shard.push(push(worker, 0, 0, float(worker)), 0.0) == "waiting"
    assert not shard.step_if_due(4.9)
    assert shard.step_if_due(5.0)
    assert weights.tolist() == [-0.5] * 3
    assert [shard.push(push(worker, 1, 1), 6.0) for worker in range(3)] == ["waiting", "waiting", "applied"]


def test_a_windows_gradients_survive_the_removal_of_a_worker_and_a_flush() -> None:
    shard, weights = make(workers=2, max_staleness=None, window=3)
    assert [shard.push(push(worker, 0, 0, 1.0 + worker), 0.0) for worker in (0, 1)] == ["waiting", "waiting"]
    shard.remove_worker(1, 1.0)  # it was events that its gradient is taken
    assert len(shard.waiting) == 2
    shard.flush()
    assert weights.tolist() == [-1.5] * 3
    assert (shard.version, shard.waiting, shard.since) == (1, [], float("inf"))
    shard.flush()  # there is nothing left
    assert shard.version == 1


def test_a_gradient_that_is_not_finite_does_not_spoil_a_window() -> None:
    shard, weights = make(workers=3, max_staleness=None, window=3, window_seconds=5.0)
    assert shard.push(push(0, 0, 0, 1.0), 0.0) == "waiting"
    assert shard.push(push(1, 0, 0, float("nan")), 1.0) == "skipped"  # only its own worker gets this verdict
    assert shard.push(push(2, 0, 0, 2.0), 2.0) == "waiting"
    assert shard.push(push(0, 1, 0, 3.0), 3.0) == "applied"
    assert weights.tolist() == [-2.0] * 3
    assert (shard.version, shard.refused["skipped"], shard.staleness.total()) == (1, 1, 3)
    assert shard.push(push(1, 1, 1, float("inf")), 4.0) == "skipped"
    assert not shard.step_if_due(100.0)  # no window was opened by it


def test_a_flush_makes_no_synchronous_step_of_some_workers() -> None:
    shard, _ = make(workers=2)
    shard.push(push(1, 0, 0), 5.0)
    shard.flush()
    assert (shard.version, shard.has_waiting(0), shard.has_waiting(1)) == (0, False, True)
    shard.drop(1)
    assert shard.since == float("inf")  # else polling would never rest


def test_a_sum_is_not_divided() -> None:
    shard, weights = make(workers=2, total=True)
    for worker in range(2):
        shard.push(push(worker, 0, 0, 1.0 + 2 * worker), 0.0)
    assert weights.tolist() == [-4.0] * 3


def test_a_window_without_a_number_takes_all_that_come_in_time() -> None:
    shard, weights = make(workers=2, max_staleness=None, window_seconds=5.0)
    assert [shard.push(push(0, sequence, 0), 0.0) for sequence in range(7)] == ["waiting"] * 7
    assert not shard.step_if_due(4.9)
    assert shard.step_if_due(5.0)
    assert weights.tolist() == [-1.0] * 3


def test_a_dropped_gradient_counts_as_stale() -> None:
    shard, weights = make(workers=3, spare=1)
    assert shard.push(push(1, 0, 0), 0.0) == "waiting"
    shard.drop(1)
    assert shard.refused["stale"] == 1
    assert [shard.push(push(worker, 1, 0), 1.0) for worker in (0, 1)] == ["waiting", "applied"]
    assert weights.tolist() == [-1.0] * 3
    assert shard.staleness.total() == 2


def test_a_window_counts_gradients_of_one_worker_too() -> None:
    shard, weights = make(workers=2, max_staleness=None, window=3)
    assert [shard.push(push(0, sequence, 0), 0.0) for sequence in range(3)] == ["waiting", "waiting", "applied"]
    assert weights.tolist() == [-1.0] * 3


def test_slow_down_makes_smaller_steps_of_stale_gradients() -> None:
    shard, weights = make(max_staleness=None, slow_down=True)
    for sequence in range(4):
        shard.push(push(0, sequence, sequence), 0.0)
    before = float(weights[0])
    shard.push(push(1, 0, 0), 0.0)  # four steps old
    assert float(weights[0]) == before - 0.25


@pytest.mark.parametrize(("num", "shards"), [(1_687_206, 2), (1_687_206, 3), (100, 2), (5, 4)])
def test_shard_bounds_cover_all_weights_evenly(num: int, shards: int) -> None:
    bounds = shard_bounds(num, shards)
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == num
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_there_are_never_more_shards_than_numbers() -> None:
    assert shard_bounds(2, 5) == [(0, 1), (1, 2)]
