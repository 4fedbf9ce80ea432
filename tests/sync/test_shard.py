"""A server's shard: each gradient at most once, none staler than allowed, and synchronous where it should be."""

import numpy as np
import pytest
import torch
from torch import Tensor

from qfleet.sync.shard import Push, Shard, cuts_of


def make(workers: int = 2, **how: object) -> tuple[Shard, Tensor]:
    weights = torch.zeros(3).double()
    return Shard(weights, lambda gradient, factor: weights.sub_(gradient * factor), workers, **how), weights  # type: ignore[arg-type]


def push(worker: int, sequence: int, version: int, value: float = 1.0, incarnation: int = 0) -> Push:
    return Push((worker, incarnation, sequence), version, torch.full((3,), value).double())


def test_synchronous_is_the_mean_of_everybodys() -> None:
    shard, weights = make()
    assert shard.push(push(0, 0, 0, 1.0), 0.0) == "waiting"
    assert weights.tolist() == [0.0] * 3
    assert shard.push(push(1, 0, 0, 3.0), 1.0) == "applied"
    assert weights.tolist() == [-2.0] * 3
    assert shard.version == 1


def test_what_comes_twice_is_taken_once() -> None:
    shard, weights = make(max_staleness=None)
    assert shard.push(push(0, 0, 0), 0.0) == "applied"
    assert shard.push(push(0, 0, 0), 0.0) == "duplicate"
    assert shard.push(push(0, 0, 1, incarnation=1), 0.0) == "applied"  # a later life counts anew
    assert shard.push(push(0, 5, 1, incarnation=0), 0.0) == "duplicate"  # and the old one is not heard any more
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


def test_who_is_gone_is_not_waited_for() -> None:
    shard, _ = make(workers=2)
    shard.push(push(0, 0, 0), 0.0)
    shard.leave(1, 1.0)
    assert shard.version == 1
    shard.enlist()
    assert shard.push(push(0, 1, 1), 2.0) == "waiting"


def test_a_window_applies_what_arrived() -> None:
    shard, weights = make(workers=4, max_staleness=None, window=3, window_seconds=5.0)
    for worker in (0, 1):
        assert shard.push(push(worker, 0, 0, float(worker)), 0.0) == "waiting"
    assert not shard.tend(4.9)
    assert shard.tend(5.0)
    assert weights.tolist() == [-0.5] * 3
    assert [shard.push(push(worker, 1, 1), 6.0) for worker in range(3)] == ["waiting", "waiting", "applied"]


def test_nothing_that_a_window_took_in_is_lost_when_somebody_leaves_or_all_come_to_rest() -> None:
    shard, weights = make(workers=2, max_staleness=None, window=3)
    assert [shard.push(push(worker, 0, 0, 1.0 + worker), 0.0) for worker in (0, 1)] == ["waiting", "waiting"]
    shard.leave(1, 1.0)  # it was told that its gradient is taken
    assert len(shard.waiting) == 2
    shard.settle()
    assert weights.tolist() == [-1.5] * 3
    assert (shard.version, shard.waiting, shard.since) == (1, [], float("inf"))
    shard.settle()  # there is nothing left
    assert shard.version == 1


def test_a_gradient_that_is_not_finite_takes_no_others_along() -> None:
    shard, weights = make(workers=3, max_staleness=None, window=3, window_seconds=5.0)
    assert shard.push(push(0, 0, 0, 1.0), 0.0) == "waiting"
    assert shard.push(push(1, 0, 0, float("nan")), 1.0) == "skipped"  # only its owner hears of it
    assert shard.push(push(2, 0, 0, 2.0), 2.0) == "waiting"
    assert shard.push(push(0, 1, 0, 3.0), 3.0) == "applied"
    assert weights.tolist() == [-2.0] * 3
    assert (shard.version, shard.refused["skipped"], shard.staleness.total()) == (1, 1, 3)
    assert shard.push(push(1, 1, 1, float("inf")), 4.0) == "skipped"
    assert not shard.tend(100.0)  # no window was opened by it


def test_what_waits_for_everybody_is_no_step_of_some() -> None:
    shard, _ = make(workers=2)
    shard.push(push(1, 0, 0), 5.0)
    shard.settle()
    assert (shard.version, shard.holds(0), shard.holds(1)) == (0, False, True)
    shard.excuse(1)
    assert shard.since == float("inf")  # else whoever looks at the clock would look for ever


def test_a_sum_is_not_divided() -> None:
    shard, weights = make(workers=2, total=True)
    for worker in range(2):
        shard.push(push(worker, 0, 0, 1.0 + 2 * worker), 0.0)
    assert weights.tolist() == [-4.0] * 3


def test_a_window_of_seconds_alone_takes_whatever_comes_in_time() -> None:
    shard, weights = make(workers=2, max_staleness=None, window_seconds=5.0)
    assert [shard.push(push(0, sequence, 0), 0.0) for sequence in range(7)] == ["waiting"] * 7
    assert not shard.tend(4.9)
    assert shard.tend(5.0)
    assert weights.tolist() == [-1.0] * 3


def test_one_that_has_waited_for_long_is_excused() -> None:
    shard, weights = make(workers=3, spare=1)
    assert shard.push(push(1, 0, 0), 0.0) == "waiting"
    shard.excuse(1)
    assert shard.refused["stale"] == 1
    assert [shard.push(push(worker, 1, 0), 1.0) for worker in (0, 1)] == ["waiting", "applied"]
    assert weights.tolist() == [-1.0] * 3
    assert shard.staleness.total() == 2


def test_a_window_counts_gradients_whoever_they_are_of() -> None:
    shard, weights = make(workers=2, max_staleness=None, window=3)
    assert [shard.push(push(0, sequence, 0), 0.0) for sequence in range(3)] == ["waiting", "waiting", "applied"]
    assert weights.tolist() == [-1.0] * 3


def test_stale_gradients_make_smaller_steps_if_asked() -> None:
    shard, weights = make(max_staleness=None, slow_down=True)
    for sequence in range(4):
        shard.push(push(0, sequence, sequence), 0.0)
    before = float(weights[0])
    shard.push(push(1, 0, 0), 0.0)  # four steps old
    assert float(weights[0]) == before - 0.25


@pytest.mark.parametrize(("num", "shards"), [(1_687_206, 2), (1_687_206, 3), (100, 2), (5, 4)])
def test_cuts_cover_everything_once_and_evenly(num: int, shards: int) -> None:
    cuts = cuts_of(num, shards)
    assert [begin for begin, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == num
    sizes = [end - begin for begin, end in cuts]
    assert max(sizes) - min(sizes) <= 1


def test_there_are_never_more_shards_than_numbers() -> None:
    assert cuts_of(2, 5) == [(0, 1), (1, 2)]
