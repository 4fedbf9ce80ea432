"""Measuring: the fastest undisturbed round counts, and what another program has disturbed is not kept."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from qfleet.build.machine import examples, measurement
from qfleet.build.machine.examples import EXAMPLES, LearnerContestant, example_plan, ways_of
from qfleet.build.machine.measurement import (
    EXAMPLE_SECONDS,
    MIN_ROUNDS,
    NUM_ROUNDS,
    ProcessClock,
    compile_seconds,
    measure_compiled,
    measure_example,
    measure_for_run,
    measure_layouts,
    measure_machine,
    race,
)
from qfleet.build.machine.table import GRIDS, NEVER_SECONDS, PICTURES, VECTORS, read_table
from qfleet.errors import QfleetError
from qfleet.system.processor import INSTRUCTIONS
from tests.build.machine.parts import GRID_TIMES, PICTURE_TIMES, VECTOR_TIMES, table_of


class FakeClock:
    """Time passes when a contestant says so; waiting is counted beside it."""

    def __init__(self) -> None:
        self.time = 0.0
        self.waiting = 0.0

    def now(self) -> float:
        return self.time

    def waited(self) -> float:
        return self.waiting


class FakeContestant:
    """Its updates take these seconds, each for one round; then the last of them for ever. `waits` likewise."""

    def __init__(
        self, clock: FakeClock, seconds: list[float], waits: list[float] | None = None, hindered: bool = False
    ) -> None:
        self.threads: int | None = 1
        self.clock = clock
        self.seconds = seconds
        self.waits = waits or [0.0]
        self.hindered = hindered
        self.rounds = -1

    def update(self) -> None:
        seconds = self.seconds[min(max(self.rounds, 0), len(self.seconds) - 1)]
        self.clock.time += seconds
        self.clock.waiting += seconds * self.waits[min(max(self.rounds, 0), len(self.waits) - 1)]

    def is_hindered(self) -> bool:
        return self.hindered


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell a made-up contestant that a round begins."""
    whole = measurement.round_seconds

    def counted(contestant: Any, clock: Any) -> float | None:
        contestant.rounds += 1
        return whole(contestant, clock)

    monkeypatch.setattr(measurement, "round_seconds", counted)


@pytest.mark.usefixtures("rounds")
def test_the_fastest_round_counts() -> None:
    clock = FakeClock()
    slow = FakeContestant(clock, [0.5, 0.4, 0.3, 0.4])
    quick = FakeContestant(clock, [0.2, 0.1, 0.2])
    found = race({"slow": slow, "quick": quick}, clock)
    assert found == {"slow": pytest.approx(0.3), "quick": pytest.approx(0.1)}


@pytest.mark.usefixtures("rounds")
def test_disturbed_rounds_do_not_count() -> None:
    clock = FakeClock()
    # Its fastest round was one in which it had to wait: what it says is not to be trusted.
    contestant = FakeContestant(clock, [0.01, 0.03, 0.02, 0.03], [0.1, 0.0, 0.04, 0.06])
    assert race({"one": contestant}, clock) == {"one": pytest.approx(0.02)}


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize(("waits", "kept"), [([0.0] * MIN_ROUNDS, True), ([0.0] * (MIN_ROUNDS - 1), False)])
def test_too_few_undisturbed_rounds_are_none(waits: list[float], kept: bool) -> None:
    clock = FakeClock()
    whole = FakeContestant(clock, [0.01])
    disturbed = FakeContestant(clock, [0.01], [*waits, 0.5])
    assert (race({"whole": whole, "disturbed": disturbed}, clock) is not None) is kept


@pytest.mark.usefixtures("rounds")
def test_a_second_thread_that_pauses_is_a_disturbance() -> None:
    clock = FakeClock()
    assert race({"one": FakeContestant(clock, [0.01], hindered=True)}, clock) is None


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize(("seconds", "num"), [(0.01, NUM_ROUNDS), (EXAMPLE_SECONDS, MIN_ROUNDS)])
def test_a_slow_machine_makes_fewer_rounds(seconds: float, num: int) -> None:
    contestant = FakeContestant(FakeClock(), [seconds])
    race({"one": contestant}, contestant.clock)
    assert contestant.rounds + 1 == num


def test_time_that_a_thread_waits_for_a_core_is_seen() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("the system does not bind threads to cores")
    clock = ProcessClock()
    before = clock.waited()
    pid = os.fork()
    if pid == 0:
        while True:
            pass
    cores = os.sched_getaffinity(0)
    try:
        one = {min(cores)}
        os.sched_setaffinity(pid, one)
        os.sched_setaffinity(0, one)
        begin = clock.now()
        while clock.now() - begin < 0.3:
            pass
        assert clock.waited() - before > 0.05
    finally:
        os.sched_setaffinity(0, cores)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


# --- what is measured ---


@pytest.mark.parametrize(
    ("name", "cores", "native", "expected"),
    [
        (PICTURES, 1, False, ["float32 1 thread"]),
        (PICTURES, 4, False, ["float32 1 thread", "float32 tasks", "float32 operations"]),
        (PICTURES, 2, True, sorted(PICTURE_TIMES)),
        (GRIDS, 2, True, ["float32 1 thread", "float32 tasks"]),
        (VECTORS, 2, True, ["float32 1 thread"]),
    ],
)
def test_ways_are_those_that_a_run_may_choose(
    name: str, cores: int, native: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 would take seconds where it is not native, for nothing."""
    monkeypatch.setattr(examples, "multiplies_bfloat16", lambda: native)
    assert sorted(ways_of(name, cores)) == sorted(expected)


def test_every_way_of_every_example_makes_updates() -> None:
    for name, example in EXAMPLES.items():
        for settings in ways_of(name, 2).values():
            contestant = LearnerContestant(example_plan(example, **settings), example.spec)
            contestant.update()
            assert contestant.learner.updates == 1
            assert (contestant.learner.gradients.tasks is not None) is (
                settings["threads"] == 2 and settings["parallel"] == "tasks"
            )
            contestant.close()


def test_examples_are_measured_or_refused() -> None:
    """Other programs may run beside the tests."""
    found = measure_example(VECTORS, ProcessClock())
    assert found is None or list(found) == ["float32 1 thread"]
    layouts = measure_layouts(ProcessClock())
    assert layouts is None or list(layouts) == ["channels last", "contiguous"]


# --- for a run ---


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {PICTURES: PICTURE_TIMES, GRIDS: GRID_TIMES, VECTORS: VECTOR_TIMES}
    monkeypatch.setattr(measurement, "measure_example", lambda name, clock: times[name])
    monkeypatch.setattr(measurement, "measure_layouts", lambda clock: {"channels last": 1.0, "contiguous": 2.0})


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("updates", "answer", "limits"),
    [
        (500_000, [10.0, 1e-3], []),  # 500 s of updates, of which measuring may have 10
        (1_250_000, [10.0, 1e-3], [25]),
        (10_000_000, [10.0, 1e-3], [30]),
        (10_000_000, None, [30]),
    ],
)
def test_a_compiler_has_a_limit_and_is_not_started_where_that_is_too_short(
    updates: int, answer: list[float] | None, limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    told: list[str] = []

    def child_main(work: Any, args: Any, limit: float) -> list[float] | None:
        seen.append(round(limit))
        return answer

    monkeypatch.setattr(measurement, "call_isolated", child_main)
    found = measure_for_run(table_of(), VECTORS, updates, told.append)
    assert seen == limits
    assert all("at most" in text for text in told[:1])
    assert ("compiling" in found.seconds(VECTORS)) is bool(limits and answer)
    # An answer is kept; that there was none in time is not, for the machine may have been busy.
    assert any(text.startswith("not measured: the compiler") for text in told) is (answer is None)


@pytest.mark.usefixtures("quick")
def test_pictures_are_never_compiled_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "call_isolated", None)
    assert measure_for_run(table_of(), PICTURES, 100_000_000, print).seconds(PICTURES) == PICTURE_TIMES


def test_what_was_disturbed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "measure_example", lambda name, clock: None)
    monkeypatch.setattr(measurement, "call_isolated", lambda work, args, limit: [])
    told: list[str] = []
    before = table_of(read_table().kind, grids=GRID_TIMES)
    found = measure_for_run(before, VECTORS, 100, told.append)
    assert found.examples == before.examples
    assert told[1].startswith("not measured: another program used the processor")
    assert measure_for_run(table_of(before.kind), PICTURES, 100, told.append).examples == {}


def test_a_missing_compiler_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no compiler")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    monkeypatch.setattr("qfleet.learn.compiled_update.compile_with_inductor", fails)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert compile_seconds(VECTORS, str(tmp_path)) == [NEVER_SECONDS, NEVER_SECONDS]
    monkeypatch.setattr(measurement, "call_isolated", lambda work, args, limit: [NEVER_SECONDS, NEVER_SECONDS])
    assert measure_compiled(VECTORS, 1.0) == {"compiling": NEVER_SECONDS, "compiled": NEVER_SECONDS}


@pytest.mark.filterwarnings("ignore:.*going on step by step:RuntimeWarning")
def test_a_compiler_is_never_tried_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C here would reach the compiler, which takes it for an error of its own, and no limit could end it."""

    def compiler(*_: Any) -> Any:
        raise QfleetError("compiled here")

    monkeypatch.setattr("qfleet.learn.compiled_update.compile_with_inductor", compiler)
    monkeypatch.setattr(measurement, "call_isolated", lambda work, args, limit: None)
    assert measure_compiled(VECTORS, 1.0) == {}


@pytest.mark.usefixtures("quick")
def test_the_set_up_measures_what_is_missing_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "call_isolated", None)  # the set-up compiles nothing
    measurement.main()
    table = read_table()
    assert list(table.examples) == [PICTURES, GRIDS, VECTORS, "layout"]
    monkeypatch.setattr(measurement, "measure_example", None)
    monkeypatch.setattr(measurement, "measure_layouts", None)
    measurement.main()
    assert read_table() == table


@pytest.mark.usefixtures("quick")
def test_the_doctor_measures_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "call_isolated", lambda work, args, limit: [3.0, 1e-4])
    table = measure_machine(table_of(), lambda text: None)
    assert list(table.examples) == [PICTURES, GRIDS, VECTORS, "layout"]
    assert table.seconds(GRIDS) == {**GRID_TIMES, "compiling": 3.0, "compiled": 1e-4}
    assert "compiling" not in table.seconds(PICTURES)


def test_names_of_instructions_are_those_of_linux() -> None:
    assert {"avx512_bf16", "amx_bf16", "bf16"} <= INSTRUCTIONS
