import time

import pytest

from qfleet.system import timers
from qfleet.system.timers import STAGES, CompileTimer, Stopwatch


class Clock:
    """A clock in nanoseconds that the test advances."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


def test_laps_add_up_and_other_time_counts_in_wall_only() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for _ in range(3):
        with watch.update:
            clock.now += 7
        clock.now += 1
        with watch.env:
            clock.now += 2
    read = watch.read()
    assert (read["update"], read["env"], read["wall"]) == (21, 6, 30)
    assert set(read) == {*STAGES, "wall"}
    assert sum(read[stage] for stage in STAGES if stage not in ("update", "env")) == 0


def test_compile_time_is_a_stage_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    compile_timer = CompileTimer(clock)
    monkeypatch.setattr(timers, "COMPILE_TIMER", compile_timer)
    with compile_timer:
        clock.now += 100  # before the run
    watch = Stopwatch(clock)
    with watch.insert:
        clock.now += 3
        with compile_timer, compile_timer:  # a nested compilation
            clock.now += 50
    with watch.insert:
        clock.now += 3
    read = watch.read()
    assert (read["insert"], read["compile"], read["wall"]) == (6, 50, 56)


def test_numba_compile_time_is_measured() -> None:
    import numba

    import qfleet.replay.kernels  # noqa: F401  which registers the listener

    watch = Stopwatch()
    assert numba.njit(lambda number: number + 1)(1) == 2
    assert 0 < watch.read()["compile"] <= watch.read()["wall"]


def test_a_lap_that_raises_is_counted() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def fail() -> None:
        with watch.sample:
            clock.now += 5
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert watch.read()["sample"] == 5


def test_a_lap_takes_less_than_two_microseconds() -> None:
    lap = Stopwatch().update
    num = 20_000
    best = float("inf")
    for _ in range(10):
        begin = time.process_time()
        for _ in range(num):
            with lap:
                pass
        best = min(best, (time.process_time() - begin) / num)
    assert best < 2e-6  # 0.3 on an idle machine; other processes on the core make it slower
