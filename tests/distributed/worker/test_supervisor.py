"""Supervision: dead and hung workers are restarted, and quarantined after too many faults; slow ones reported."""

import numpy as np
import pytest

from qfleet.distributed.worker.supervisor import StragglerWatch, Supervisor, stragglers

POLL_SECONDS = 0.5


def make_supervisor(workers: int = 2, **options: float) -> Supervisor:
    """Hung after 10 s, 3 restarts."""
    settings = {"hung_seconds": 10.0, "restarts": 3, "start_seconds": 20.0, **options}
    return Supervisor(workers, rng=np.random.default_rng(0), **settings)  # type: ignore[arg-type]


def watch(supervisor: Supervisor, worker: int, begin: float, end: float, progress: int) -> float | None:
    """Check a worker without progress every half second; returns when it is found hung."""
    now = begin
    while now <= end:
        if (fault := supervisor.check(worker, now, alive=True, progress=progress)) is not None:
            assert fault.kind == "hung"
            return now
        now += POLL_SECONDS
    return None


def test_all_workers_are_due_at_first_and_incarnations_count_from_zero() -> None:
    supervisor = make_supervisor()
    assert supervisor.due(0.0) == [0, 1]
    assert [supervisor.started(worker, 0.0) for worker in supervisor.due(0.0)] == [0, 0]
    assert supervisor.due(100.0) == []
    assert (supervisor.num_running, supervisor.state) == (2, ["running", "running"])


def test_incarnations_continue_after_those_used_before() -> None:
    supervisor = Supervisor(2, hung_seconds=1.0, restarts=1, rng=np.random.default_rng(0), incarnations=[4, -1])
    assert [supervisor.started(worker, 0.0) for worker in (0, 1)] == [5, 0]
    with pytest.raises(ValueError, match="2 workers"):
        Supervisor(2, hung_seconds=1.0, restarts=1, rng=np.random.default_rng(0), incarnations=[4])


def test_a_dead_worker_is_found_at_once_and_due_within_five_seconds() -> None:
    supervisor = make_supervisor()
    supervisor.started(0, 0.0)
    fault = supervisor.check(0, 1.0, alive=False, progress=7)
    assert fault is not None
    assert (fault.kind, fault.worker, fault.incarnation) == ("dead", 0, 0)
    assert fault.delay_seconds is not None
    assert 0.05 <= fault.delay_seconds <= 0.1
    assert supervisor.check(0, 1.1, alive=False, progress=7) is None  # reported once
    assert 0 not in supervisor.due(1.04)
    assert 0 in supervisor.due(1.0 + fault.delay_seconds)
    assert supervisor.started(0, 1.2) == 1


def test_a_worker_that_waits_for_a_place_is_not_hung_and_does_not_count_as_running() -> None:
    supervisor = make_supervisor()
    for worker in supervisor.due(0.0):
        supervisor.started(worker, 0.0)
    for second in range(1, 1_000):
        assert supervisor.check(0, float(second), alive=True, progress=0, pending=True) is None
        assert supervisor.check(1, float(second), alive=True, progress=second) is None
    assert supervisor.num_running == 1
    assert watch(supervisor, 0, 1_000.0, 1_100.0, progress=0) == 1_019.0  # start_seconds after it had a place


def test_a_worker_without_progress_is_hung_after_hung_seconds() -> None:
    supervisor = make_supervisor()
    supervisor.started(0, 0.0)
    assert supervisor.check(0, 1.0, alive=True, progress=5) is None
    found = watch(supervisor, 0, 1.5, 60.0, 5)
    assert found == 11.0


def test_a_worker_that_makes_progress_is_never_hung() -> None:
    supervisor = make_supervisor()
    supervisor.started(0, 0.0)
    faults = (supervisor.check(0, 2.0 * i, alive=True, progress=i // 3) for i in range(200))
    assert not any(faults)


def test_a_start_may_take_start_seconds() -> None:
    supervisor = make_supervisor()
    supervisor.started(0, 100.0, progress=41)  # the counter of the incarnation before
    assert watch(supervisor, 0, 100.0, 200.0, 41) == 120.0


def test_after_its_first_progress_a_worker_has_hung_seconds() -> None:
    supervisor = make_supervisor()
    supervisor.started(0, 100.0, progress=41)
    supervisor.check(0, 101.0, alive=True, progress=42)
    assert watch(supervisor, 0, 101.5, 200.0, 42) == 111.0


def test_a_driver_that_slept_does_not_find_all_workers_hung() -> None:
    supervisor = make_supervisor()
    supervisor.started(0, 0.0)
    supervisor.check(0, 1.0, alive=True, progress=1)
    assert supervisor.check(0, 500.0, alive=True, progress=1) is None
    found = watch(supervisor, 0, 500.5, 600.0, 1)
    assert found is not None
    assert found <= 510.0


def test_delays_double_with_jitter_up_to_the_largest() -> None:
    supervisor = make_supervisor(restarts=20, largest_delay=3.0)
    now = 0.0
    delays = []
    for _ in range(10):
        supervisor.started(0, now)
        fault = supervisor.check(0, now, alive=False, progress=0)
        assert fault is not None
        delays.append(fault.delay_seconds or 0.0)
        now += 10.0
    for number, restart_delay in enumerate(delays):
        longest = min(3.0, 0.1 * 2**number)
        assert 0.5 * longest <= restart_delay <= longest
    assert len(set(delays)) == 10


def test_a_worker_that_fails_too_often_is_quarantined_and_the_others_go_on() -> None:
    supervisor = make_supervisor()
    supervisor.started(1, 0.0)
    faults = fail_often(supervisor, times=4, every=20.0)
    assert [fault is None for fault in faults] == [False, False, False, True]
    assert supervisor.quarantined == {0}
    assert supervisor.due(1e6) == []
    assert (supervisor.num_running, supervisor.state) == (1, ["quarantined", "running"])
    with pytest.raises(ValueError, match="quarantined"):
        supervisor.started(0, 1e6)


def test_faults_older_than_the_window_do_not_count() -> None:
    supervisor = make_supervisor()
    assert None not in fail_often(supervisor, times=20, every=201.0)  # never four within ten minutes
    assert supervisor.quarantined == set()


def test_without_restarts_the_first_fault_quarantines() -> None:
    assert fail_often(make_supervisor(restarts=0), times=1, every=1.0) == [None]


def fail_often(supervisor: Supervisor, times: int, every: float) -> list[float | None]:
    """Let worker 0 die again and again; returns the restart delays."""
    delays = []
    for number in range(times):
        assert 0 in supervisor.due(number * every)
        supervisor.started(0, number * every)
        fault = supervisor.check(0, number * every, alive=False, progress=0)
        assert fault is not None
        delays.append(fault.delay_seconds)
    return delays


def test_many_faults_do_not_overflow() -> None:
    delays = fail_often(make_supervisor(largest_delay=4.0, restarts=5000), times=5000, every=5.0)
    assert max(delay for delay in delays if delay is not None) <= 4.0


def test_a_worker_without_any_progress_is_quarantined_however_long_a_start_may_take() -> None:
    supervisor, now, faults = make_supervisor(1, start_seconds=120.0, restarts=5), 0.0, 0
    while not supervisor.quarantined:
        supervisor.started(0, now)
        hung = watch(supervisor, 0, now, now + 200.0, progress=0)
        assert hung is not None
        now, faults = hung + 10.0, faults + 1
        assert faults <= 6
    assert faults == 6


def straggler_shares(*counts: int) -> dict[int, float]:
    """The workers that are stragglers by these counts, with their shares."""
    found = stragglers({(worker, 0): count for worker, count in enumerate(counts)})
    return {worker: share for (worker, _), share in found.items()}


def test_a_straggler_sends_less_than_a_third_of_the_median_of_the_others() -> None:
    assert straggler_shares(100, 100, 10, 100) == {2: 0.1}
    assert straggler_shares(100, 33) == {1: 0.33}
    assert straggler_shares(100, 34) == {}
    assert straggler_shares(0, 90, 120, 150) == {0: 0.0}
    assert straggler_shares(30, 30, 1000) == {}  # the lower of two middle values counts
    assert straggler_shares(10, 100, 10, 100, 100) == {0: 0.1, 2: 0.1}


def test_a_single_worker_or_few_rollouts_make_no_straggler() -> None:
    assert straggler_shares() == {}
    assert straggler_shares(5) == {}
    assert straggler_shares(50, 50, 50) == {}  # as under back-pressure
    assert straggler_shares(0, 9) == {}
    assert straggler_shares(0, 10) == {0: 0.0}


def check_at(straggler_watch: StragglerWatch, now: float, *counts: int, incarnation: int = 0) -> dict[int, float]:
    """Stragglers found when workers 0, 1, ... have sent these counts; the last is of this incarnation."""
    last = len(counts) - 1
    rollouts = {(worker, incarnation * (worker == last)): count for worker, count in enumerate(counts) if count}
    return {worker: share for (worker, _), share in straggler_watch.check(now, rollouts).items()}


def test_a_straggler_is_reported_once_after_a_whole_window() -> None:
    straggler_watch = StragglerWatch(window_seconds=10.0)
    assert check_at(straggler_watch, 0.0, 7, 9, 1) == {}
    assert check_at(straggler_watch, 9.9, 107, 109, 11) == {}
    assert check_at(straggler_watch, 10.0, 107, 109, 11) == {2: 0.1}
    assert check_at(straggler_watch, 20.0, 207, 209, 21) == {}
    assert check_at(straggler_watch, 30.0, 307, 309, 1, incarnation=1) == {}  # replaced, and just started
    assert check_at(straggler_watch, 40.0, 407, 409, 21, incarnation=1) == {2: 0.2}


def test_a_worker_that_starts_within_a_window_is_no_straggler() -> None:
    straggler_watch = StragglerWatch(window_seconds=10.0)
    check_at(straggler_watch, 0.0, 1, 1, 0)
    assert check_at(straggler_watch, 10.0, 101, 101, 1) == {}
    assert check_at(straggler_watch, 20.0, 201, 201, 101) == {}


def test_the_window_lasts_until_there_are_enough_rollouts_to_compare() -> None:
    straggler_watch = StragglerWatch(window_seconds=10.0)
    check_at(straggler_watch, 0.0, 1, 1, 1)
    assert check_at(straggler_watch, 10.0, 3, 1, 3) == {}  # 2, 0 and 2 rollouts are too few
    assert check_at(straggler_watch, 70.0, 15, 2, 15) == {}
    assert check_at(straggler_watch, 80.0, 17, 3, 17) == {1: 0.125}


def test_counts_of_a_new_incarnation_are_not_compared_with_the_old_ones() -> None:
    straggler_watch = StragglerWatch(window_seconds=10.0)
    check_at(straggler_watch, 0.0, 500, 500)
    straggler_watch.check(10.0, {(0, 1): 1, (1, 1): 1})
    assert straggler_watch.check(20.0, {(0, 1): 101, (1, 1): 11}) == {(1, 1): 0.1}
