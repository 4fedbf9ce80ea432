"""How often and how soon a failing component is restarted, on a simulated clock."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qfleet.system.restart_budget import RestartBudget


def test_the_fault_beyond_the_limit_exhausts_the_budget() -> None:
    budget = RestartBudget(2, 600.0)
    assert [budget.charge(now) for now in (0.0, 1.0, 2.0)] == [True, True, False]
    assert budget.exhausted


def test_faults_expire_after_the_window_but_exhaustion_does_not() -> None:
    budget = RestartBudget(1, 10.0)
    assert [budget.charge(now) for now in (0.0, 10.0, 20.0)] == [True, True, True]
    assert not budget.charge(29.9)
    assert not budget.charge(1_000.0)


def test_a_limit_of_zero_allows_no_restart() -> None:
    assert not RestartBudget(0).charge(5.0)


def test_delays_double_with_consecutive_faults_until_reset() -> None:
    budget = RestartBudget(100, first_delay=0.1, largest_delay=1.0)
    waits = []
    for _ in range(6):
        budget.charge(50.0)
        waits.append(round(budget.retry_at - 50.0, 6))
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    budget.reset_backoff()
    budget.charge(60.0)
    assert round(budget.retry_at - 60.0, 6) == 0.1


@given(st.lists(st.floats(0.0, 50.0), max_size=60), st.integers(0, 6))
def test_restarts_never_exceed_the_limit_in_any_window(pauses: list[float], limit: int) -> None:
    budget = RestartBudget(limit, 100.0)
    now = 0.0
    allowed = []
    for pause in pauses:
        now += pause
        if not budget.charge(now):
            break
        allowed.append(now)
        assert now < budget.retry_at <= now + 10.0
    assert all(sum(start <= each < start + 100.0 for each in allowed) <= limit for start in allowed)


def test_many_consecutive_faults_do_not_overflow() -> None:
    budget = RestartBudget(10**6)
    for _ in range(3_000):
        budget.charge(0.0)
    assert budget.retry_at == 10.0


def test_jitter_shortens_the_delays_but_not_to_less_than_half() -> None:
    rng = np.random.default_rng(1)
    draws = np.random.default_rng(1).random(3)
    budget = RestartBudget(2, first_delay=1.0, rng=rng)
    delays = []
    for _ in range(2):
        budget.charge(0.0)
        delays.append(budget.delay_seconds)
    assert delays == [0.5 + 0.5 * draws[0], 1.0 + draws[1]]
    assert not budget.charge(0.0)
    assert rng.random() == draws[2]  # an exhausted budget has no next start


def test_a_fault_that_has_expired_does_not_double_the_delay() -> None:
    budget = RestartBudget(100, 10.0, first_delay=1.0)
    delays = []
    for now in (0.0, 1.0, 2.0, 11.5, 100.0):
        budget.charge(now)
        delays.append(budget.delay_seconds)
    assert delays == [1.0, 2.0, 4.0, 2.0, 1.0]
