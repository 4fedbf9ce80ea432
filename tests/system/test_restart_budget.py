"""How often, and how soon, something that failed is tried again; on a clock that is only a number."""

from hypothesis import given
from hypothesis import strategies as st

from qfleet.system.restart_budget import RestartBudget


def test_the_fault_after_the_limit_is_the_last() -> None:
    budget = RestartBudget(2, 600.0)
    assert [budget.charge(now) for now in (0.0, 1.0, 2.0)] == [True, True, False]
    assert budget.spent


def test_faults_are_forgotten_after_the_window_but_a_verdict_is_not() -> None:
    budget = RestartBudget(1, 10.0)
    assert [budget.charge(now) for now in (0.0, 10.0, 20.0)] == [True, True, True]
    assert not budget.charge(29.9)
    assert not budget.charge(1_000.0)


def test_no_rebuilds_means_none() -> None:
    assert not RestartBudget(0).charge(5.0)


def test_waits_double_in_a_row_of_faults_and_begin_anew_after_it() -> None:
    budget = RestartBudget(100, first_delay=0.1, largest_delay=1.0)
    waits = []
    for _ in range(6):
        budget.charge(50.0)
        waits.append(round(budget.ready_at - 50.0, 6))
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    budget.settle()
    budget.charge(60.0)
    assert round(budget.ready_at - 60.0, 6) == 0.1


@given(st.lists(st.floats(0.0, 50.0), max_size=60), st.integers(0, 6))
def test_never_more_than_the_limit_in_any_window(pauses: list[float], limit: int) -> None:
    budget, now, allowed = RestartBudget(limit, 100.0), 0.0, []
    for pause in pauses:
        now += pause
        if not budget.charge(now):
            break
        allowed.append(now)
        assert now < budget.ready_at <= now + 10.0
    assert all(sum(start <= each < start + 100.0 for each in allowed) <= limit for start in allowed)


def test_a_long_row_of_faults_does_not_overflow() -> None:
    budget = RestartBudget(10**6)
    for _ in range(3_000):
        budget.charge(0.0)
    assert budget.ready_at == 10.0
