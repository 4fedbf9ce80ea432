"""Tasks: made once, by whoever begins first; a thread without a core of its own pauses, and comes back."""

import threading
import time

import pytest

from qfleet.system.parallel_tasks import (
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    WINDOW_SECONDS,
    Contention,
    Task,
    TaskThread,
)


def test_a_task_that_nobody_begins_is_made_by_the_caller() -> None:
    makers: list[str] = []
    task = Task(lambda: makers.append(threading.current_thread().name))
    assert task.result() is None
    assert makers == [threading.current_thread().name]
    assert not task.run()
    assert len(makers) == 1


def test_the_thread_works_beside_the_caller() -> None:
    tasks = TaskThread()
    meet = threading.Barrier(2, timeout=10.0)  # both sides must be under way at the same time
    task = tasks.submit(meet.wait)
    meet.wait()
    assert task.result() in (0, 1)
    tasks.close()


def test_every_task_is_made_exactly_once() -> None:
    tasks = TaskThread()
    made: list[int] = []
    for _ in range(50):
        submitted = [tasks.submit(lambda at=at: made.append(at)) for at in range(10)]  # type: ignore[misc]
        for task in reversed(submitted):
            task.run()
        for task in submitted:
            task.result()
    assert sorted(made) == sorted(list(range(10)) * 50)
    tasks.close()


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    tasks = TaskThread()

    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    for task in (tasks.submit(fail), Task(fail)):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            task.result()
    assert tasks.submit(lambda: 7).result() == 7  # the thread goes on
    tasks.close()


def test_the_thread_is_prepared_first_and_ends() -> None:
    names: list[str] = []
    tasks = TaskThread(lambda: names.append(threading.current_thread().name))
    task = tasks.submit(lambda: time.sleep(0.01))
    while not task.begun.locked():
        time.sleep(0.001)
    task.result()
    thread = tasks.thread
    assert thread is not None
    tasks.close()
    thread.join(timeout=10.0)
    assert not thread.is_alive()
    assert names == ["qfleet-tasks"]


def test_with_a_core_of_its_own_it_never_pauses() -> None:
    contention = Contention()
    for number in range(1_000):
        contention.add(0.01, 0.0095, number * 0.01)
        assert not contention.is_paused(number * 0.01)


def test_without_processor_time_it_pauses_ever_longer_and_comes_back() -> None:
    contention = Contention()
    now = 0.0
    pauses = []
    for _ in range(6):
        contention.add(WINDOW_SECONDS, 0.5 * WINDOW_SECONDS, now)
        assert contention.is_paused(now)
        pauses.append(contention.paused_until - now)
        now = contention.paused_until
        assert not contention.is_paused(now)
    assert pauses[0] == FIRST_PAUSE_SECONDS
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_SECONDS
    contention.add(WINDOW_SECONDS, WINDOW_SECONDS, now)  # the core is free again
    assert not contention.is_paused(now)
    assert contention.pause_seconds == FIRST_PAUSE_SECONDS


def test_while_it_pauses_the_caller_makes_every_task() -> None:
    tasks = TaskThread(contention=Contention(paused_until=float("inf")))
    assert tasks.submit(threading.current_thread).result() is threading.current_thread()
    assert tasks.thread is None
