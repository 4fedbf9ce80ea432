"""Supervision: who is dead or hung is noticed, replaced, and given up when it fails too often; who is slow is named."""

import numpy as np
import pytest

from qfleet.distributed.worker.supervisor import StragglerWatch, Supervisor, stragglers

POLL_SECONDS = 0.5


def supervisor(workers: int = 2, **options: float) -> Supervisor:
    """Hung after 10 s, 3 restarts."""
    settings = {"hung_seconds": 10.0, "restarts": 3, "start_seconds": 20.0, **options}
    return Supervisor(workers, rng=np.random.default_rng(0), **settings)  # type: ignore[arg-type]


def watch(made: Supervisor, worker: int, begin: float, end: float, progress: int) -> float | None:
    """Look every half second at one that stands still; when is it called hung?"""
    now = begin
    while now <= end:
        if (fault := made.see(worker, now, alive=True, progress=progress)) is not None:
            assert fault.kind == "hung"
            return now
        now += POLL_SECONDS
    return None


def test_everyone_is_due_at_first_and_incarnations_count_from_zero() -> None:
    made = supervisor()
    assert made.due(0.0) == [0, 1]
    assert [made.started(worker, 0.0) for worker in made.due(0.0)] == [0, 0]
    assert made.due(100.0) == []
    assert (made.working, made.state) == (2, ["running", "running"])


def test_incarnations_go_on_from_those_used_before() -> None:
    made = Supervisor(2, hung_seconds=1.0, restarts=1, rng=np.random.default_rng(0), incarnations=[4, -1])
    assert [made.started(worker, 0.0) for worker in (0, 1)] == [5, 0]
    assert made.incarnation(0) == 5
    with pytest.raises(ValueError, match="2 workers"):
        Supervisor(2, hung_seconds=1.0, restarts=1, rng=np.random.default_rng(0), incarnations=[4])


def test_a_dead_one_is_seen_at_once_and_due_within_five_seconds() -> None:
    made = supervisor()
    made.started(0, 0.0)
    fault = made.see(0, 1.0, alive=False, progress=7)
    assert fault is not None
    assert (fault.kind, fault.worker, fault.incarnation) == ("dead", 0, 0)
    assert fault.delay_seconds is not None
    assert 0.05 <= fault.delay_seconds <= 0.1
    assert made.see(0, 1.1, alive=False, progress=7) is None  # told once
    assert 0 not in made.due(1.04)
    assert 0 in made.due(1.0 + fault.delay_seconds)
    assert made.started(0, 1.2) == 1


def test_one_that_stands_still_is_hung_after_its_time_and_not_before() -> None:
    made = supervisor()
    made.started(0, 0.0)
    assert made.see(0, 1.0, alive=True, progress=5) is None
    found = watch(made, 0, 1.5, 60.0, 5)
    assert found == 11.0


def test_one_that_moves_is_not_hung_however_long_it_runs() -> None:
    made = supervisor()
    made.started(0, 0.0)
    looks = (made.see(0, 2.0 * i, alive=True, progress=i // 3) for i in range(200))
    assert not any(looks)


def test_a_start_has_more_time_but_not_for_ever() -> None:
    made = supervisor()
    made.started(0, 100.0, progress=41)  # where the counter was left by the one before
    assert watch(made, 0, 100.0, 200.0, 41) == 120.0


def test_after_its_first_move_a_start_has_no_more_time_than_others() -> None:
    made = supervisor()
    made.started(0, 100.0, progress=41)
    made.see(0, 101.0, alive=True, progress=42)
    assert watch(made, 0, 101.5, 200.0, 42) == 111.0


def test_a_driver_that_slept_does_not_find_everyone_hung() -> None:
    made = supervisor()
    made.started(0, 0.0)
    made.see(0, 1.0, alive=True, progress=1)
    assert made.see(0, 500.0, alive=True, progress=1) is None
    found = watch(made, 0, 500.5, 600.0, 1)
    assert found is not None
    assert found <= 510.0


def test_delays_double_with_jitter_up_to_the_largest() -> None:
    made = supervisor(restarts=20, largest_delay=3.0)
    now = 0.0
    delays = []
    for _ in range(10):
        made.started(0, now)
        fault = made.see(0, now, alive=False, progress=0)
        assert fault is not None
        delays.append(fault.delay_seconds or 0.0)
        now += 10.0
    for number, delay in enumerate(delays):
        longest = min(3.0, 0.1 * 2**number)
        assert 0.5 * longest <= delay <= longest
    assert len(set(delays)) == 10


def test_who_fails_too_often_is_quarantined_and_the_others_go_on() -> None:
    made = supervisor()
    made.started(1, 0.0)
    faults = fail_often(made, times=4, every=20.0)
    assert [fault is None for fault in faults] == [False, False, False, True]
    assert made.quarantined == {0}
    assert made.due(1e6) == []
    assert (made.working, made.state) == (1, ["quarantined", "running"])
    with pytest.raises(ValueError, match="quarantined"):
        made.started(0, 1e6)


def test_old_faults_are_forgiven() -> None:
    made = supervisor()
    assert None not in fail_often(made, times=20, every=201.0)  # never four within ten minutes
    assert made.quarantined == set()


def test_without_a_budget_the_first_fault_is_the_last() -> None:
    assert fail_often(supervisor(restarts=0), times=1, every=1.0) == [None]


def fail_often(made: Supervisor, times: int, every: float) -> list[float | None]:
    """Let worker 0 die again and again; the delays."""
    delays = []
    for number in range(times):
        assert 0 in made.due(number * every)
        made.started(0, number * every)
        fault = made.see(0, number * every, alive=False, progress=0)
        assert fault is not None
        delays.append(fault.delay_seconds)
    return delays


def test_many_faults_do_not_overflow() -> None:
    assert supervisor(largest_delay=4.0).delay(5000) <= 4.0


def test_one_that_never_moves_is_given_up_however_long_a_start_may_take() -> None:
    made, now, faults = supervisor(1, start_seconds=120.0, restarts=5), 0.0, 0
    while not made.quarantined:
        made.started(0, now)
        hung = watch(made, 0, now, now + 200.0, progress=0)
        assert hung is not None
        now, faults = hung + 10.0, faults + 1
        assert faults <= 6
    assert faults == 6


def named(*counts: int) -> dict[int, float]:
    """The workers that are stragglers by these counts, with their shares."""
    found = stragglers({(worker, 0): count for worker, count in enumerate(counts)})
    return {worker: share for (worker, _), share in found.items()}


def test_a_straggler_brings_less_than_a_third_of_the_median_of_the_others() -> None:
    assert named(100, 100, 10, 100) == {2: 0.1}
    assert named(100, 33) == {1: 0.33}
    assert named(100, 34) == {}
    assert named(0, 90, 120, 150) == {0: 0.0}
    assert named(30, 30, 1000) == {}  # one that is fast makes nobody slow: of two in the middle the lower one counts
    assert named(10, 100, 10, 100, 100) == {0: 0.1, 2: 0.1}


def test_nobody_is_slow_alone_or_by_a_handful_of_rollouts() -> None:
    assert named() == {}
    assert named(5) == {}
    assert named(50, 50, 50) == {}  # under back-pressure all are heard in turn
    assert named(0, 9) == {}
    assert named(0, 10) == {0: 0.0}


def looks(pace: StragglerWatch, now: float, *counts: int, incarnation: int = 0) -> dict[int, float]:
    """What a look shows when workers 0, 1, ... have brought in so much; the last is of this incarnation."""
    last = len(counts) - 1
    brought = {(worker, incarnation * (worker == last)): count for worker, count in enumerate(counts) if count}
    return {worker: share for (worker, _), share in pace.see(now, brought).items()}


def test_a_slow_worker_is_named_once_after_a_whole_window() -> None:
    pace = StragglerWatch(window_seconds=10.0)
    assert looks(pace, 0.0, 7, 9, 1) == {}
    assert looks(pace, 9.9, 107, 109, 11) == {}
    assert looks(pace, 10.0, 107, 109, 11) == {2: 0.1}
    assert looks(pace, 20.0, 207, 209, 21) == {}
    assert looks(pace, 30.0, 307, 309, 1, incarnation=1) == {}  # another one in its place; it has only begun
    assert looks(pace, 40.0, 407, 409, 21, incarnation=1) == {2: 0.2}


def test_one_that_starts_in_the_middle_of_a_window_is_not_slow() -> None:
    pace = StragglerWatch(window_seconds=10.0)
    looks(pace, 0.0, 1, 1, 0)
    assert looks(pace, 10.0, 101, 101, 1) == {}
    assert looks(pace, 20.0, 201, 201, 101) == {}


def test_where_all_are_slow_the_window_lasts_until_there_is_something_to_compare() -> None:
    pace = StragglerWatch(window_seconds=10.0)
    looks(pace, 0.0, 1, 1, 1)
    assert looks(pace, 10.0, 3, 1, 3) == {}  # 2, 0 and 2 rollouts are chance
    assert looks(pace, 70.0, 15, 2, 15) == {}
    assert looks(pace, 80.0, 17, 3, 17) == {1: 0.125}


def test_counts_that_begin_again_are_not_compared_with_those_before() -> None:
    pace = StragglerWatch(window_seconds=10.0)
    looks(pace, 0.0, 500, 500)
    pace.see(10.0, {(0, 1): 1, (1, 1): 1})
    assert pace.see(20.0, {(0, 1): 101, (1, 1): 11}) == {(1, 1): 0.1}
