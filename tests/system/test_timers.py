import time

import pytest

from qfleet.system import timers
from qfleet.system.timers import STAGES, Compilers, Stopwatch


class Clock:
    """Nanoseconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


def test_laps_of_a_stage_add_up_and_the_rest_is_in_the_wall_alone() -> None:
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


def test_what_is_compiled_is_a_stage_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    compilers = Compilers(clock)
    monkeypatch.setattr(timers, "COMPILERS", compilers)
    with compilers:
        clock.now += 100  # before the run
    watch = Stopwatch(clock)
    with watch.insert:
        clock.now += 3
        with compilers, compilers:  # what a loop calls is compiled within
            clock.now += 50
    with watch.insert:
        clock.now += 3
    read = watch.read()
    assert (read["insert"], read["compile"], read["wall"]) == (6, 50, 56)


def test_numba_tells_when_it_compiles() -> None:
    import numba

    import qfleet.replay.kernels  # noqa: F401  which listens

    watch = Stopwatch()
    assert numba.njit(lambda number: number + 1)(1) == 2
    assert 0 < watch.read()["compile"] <= watch.read()["wall"]


def test_a_lap_that_raises_counts_too() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def fail() -> None:
        with watch.sample:
            clock.now += 5
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert watch.read()["sample"] == 5


def test_a_lap_costs_next_to_nothing() -> None:
    lap, num, best = Stopwatch().update, 20_000, float("inf")
    for _ in range(10):
        begin = time.process_time()
        for _ in range(num):
            with lap:
                pass
        best = min(best, (time.process_time() - begin) / num)
    assert best < 2e-6  # 0.3 on an idle machine; whoever shares the core makes it slower
