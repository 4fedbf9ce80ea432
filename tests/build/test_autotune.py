"""Choices by measurement: what the plan says goes first, what is known is not measured again, short runs never are."""

import multiprocessing
import os
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from qfleet import train
from qfleet.build import autotune, resolve
from qfleet.build.autotune import MeasurementCache, measured_choices, shape_name
from qfleet.build.isolated_call import call_isolated
from qfleet.build.resolve import with_runtime
from qfleet.data import Spec
from qfleet.plan import read_plan
from qfleet.plan.schema import (
    Algo,
    BufferReplay,
    Env,
    GruMemory,
    InlineRuntime,
    MinatarTorso,
    MlpTorso,
    NatureTorso,
    Net,
    Plan,
    Rmsprop,
    SequencesView,
    Until,
)
from qfleet.plan.sync_schema import Learners
from qfleet.watch import make_watcher, read_json
from tests.support.runs import checkpoints, hashes, small

VECTOR = Spec((4,), "float32", (2,))
GRID = Spec((4, 10, 10), "uint8", (3,))
LONG, SHORT = Until(steps=1_000_000), Until(steps=10_000)
CORES = len(os.sched_getaffinity(0))


def plan_of(net: Net | None = None, until: Until = LONG, **runtime: Any) -> Plan:
    net = net or Net(torso=MlpTorso(sizes=(8, 8)))
    algo, replay = Algo(batch_size=8), BufferReplay(samples_per_insert=2.0)  # an update every four steps
    return Plan(env=Env(id="none"), net=net, algo=algo, replay=replay, until=until, runtime=InlineRuntime(**runtime))


@pytest.fixture
def cache(tmp_path: Path) -> MeasurementCache:
    return MeasurementCache(tmp_path / "cache" / "measured.json")


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> float:
        raise AssertionError("measured")

    monkeypatch.setattr(autotune, "fastest_update_seconds", never)


def name_of(plan: Plan, spec: Spec, **runtime: Any) -> str:
    return shape_name(with_runtime(plan, **runtime), spec)


def test_cached_numbers_are_read_and_damage_is_tolerated(cache: MeasurementCache) -> None:
    assert cache.read() == {}
    assert cache.get("one", lambda: 1.5) == 1.5
    assert cache.get("one", lambda: 9.9) == 1.5
    cache.put("two", 2.5)
    assert MeasurementCache(cache.path).read() == {"one": 1.5, "two": 2.5}
    for text in ("{", "[1]", '{"one": "x", "two": -1, "three": 3}'):
        cache.path.write_text(text)
        assert cache.read() == ({"three": 3.0} if "three" in text else {})
        assert cache.get("one", lambda: 4.5) == 4.5


def test_a_cache_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert MeasurementCache(tmp_path / "file" / "measured.json").get("one", lambda: 1.5) == 1.5


@pytest.mark.usefixtures("no_clock")
def test_settings_of_the_plan_are_not_measured(cache: MeasurementCache) -> None:
    plan = plan_of(Net(torso=NatureTorso()), threads=3, precision="float32", compile=False)
    choices = measured_choices(plan, VECTOR, 7, cache)
    assert (choices.threads, choices.precision, choices.compile, choices.notes) == (3, "float32", False, ())
    assert measured_choices(plan_of(threads=1, compile=True), VECTOR, 1, cache).compile
    assert not cache.path.exists()


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("net", [Net(torso=NatureTorso()), Net(torso=MlpTorso()), Net(torso=MinatarTorso())])
def test_short_runs_take_the_usual_choice(net: Net, cache: MeasurementCache) -> None:
    choices = measured_choices(plan_of(net, SHORT), GRID, 2, cache)
    assert (choices.threads, choices.precision, choices.compile) == (2, "float32", False)
    assert not cache.path.exists()


@pytest.mark.usefixtures("no_clock")
@pytest.mark.skipif(CORES < 2, reason="one core: nothing to choose")
@pytest.mark.parametrize(("alone", "all_cores"), [(0.1, 0.2), (0.2, 0.1)])
def test_threads_are_those_that_were_quicker(alone: float, all_cores: float, cache: MeasurementCache) -> None:
    plan = plan_of(Net(torso=MinatarTorso()), compile=False, precision="float32")
    cache.put(f"{name_of(plan, GRID, threads=1)} float32", alone)
    cache.put(f"{name_of(plan, GRID, threads=CORES)} float32", all_cores)
    assert measured_choices(plan, GRID, 5, cache).threads == (1 if alone < all_cores else CORES)


def test_several_learners_share_the_cores(cache: MeasurementCache) -> None:
    plan = plan_of(Net(torso=MinatarTorso()), compile=False, precision="float32")
    plan = msgspec.structs.replace(plan, learners=Learners(num=2))
    assert measured_choices(plan, GRID, 5, cache).threads == max(1, CORES // 2)


def test_what_was_measured_is_kept(cache: MeasurementCache, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    plan = plan_of(Net(torso=MinatarTorso(channels=2, width=4)), compile=False, precision="float32")
    first = measured_choices(plan, GRID, 1, cache)
    assert torch.get_num_threads() == before
    assert len(cache.read()) == (0 if CORES == 1 else 2)
    monkeypatch.setattr(autotune, "fastest_update_seconds", None)
    assert measured_choices(plan, GRID, 1, cache) == first


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(
    ("compiled", "cost", "expected"), [(1e-4, 10.0, True), (1e-4, 300.0, False), (2e-3, 1.0, False)]
)
def test_compiled_if_it_saves_more_than_it_costs(
    compiled: float, cost: float, expected: bool, cache: MeasurementCache
) -> None:
    plan = plan_of(threads=1)  # about 250,000 updates
    name = name_of(plan, VECTOR, precision="float32")
    cache.put(f"{name_of(plan, VECTOR, compile=False)} float32", 1e-3)
    cache.put(f"{name} compile", cost)
    cache.put(f"{name} compiled", compiled)
    assert measured_choices(plan, VECTOR, 1, cache).compile == expected


@pytest.mark.usefixtures("no_clock")
def test_nothing_is_compiled_to_find_out_when_little_can_be_saved(cache: MeasurementCache) -> None:
    plan = plan_of(threads=1)
    cache.put(f"{name_of(plan, VECTOR)} float32", 1e-4)  # 25 s in all: less than a compiler may take
    assert not measured_choices(plan, VECTOR, 1, cache).compile


def test_a_missing_compiler_is_tried_once(cache: MeasurementCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        calls.append(1)
        raise OSError("no compiler")

    calls: list[int] = []
    monkeypatch.setattr("qfleet.learn.compiled_update.compile_with_inductor", fails)
    monkeypatch.setattr(autotune, "call_isolated", lambda work, args, limit: work(*args))
    plan = plan_of(threads=1)
    cache.put(f"{name_of(plan, VECTOR)} float32", 1e-2)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert not measured_choices(plan, VECTOR, 1, cache).compile
    assert len(calls) == 1


def test_a_setting_without_effect_is_noted(cache: MeasurementCache) -> None:
    plan = msgspec.structs.replace(plan_of(threads=1, compile=True), optim=Rmsprop())
    choices = measured_choices(plan, VECTOR, 1, cache)
    assert not choices.compile
    assert choices.notes == ("runtime.compile=true has no effect: optim.type=rmsprop is not adam",)


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(("half", "expected"), [(0.01, "bfloat16"), (0.095, "float32"), (1.0, "float32")])
def test_half_precision_must_be_clearly_quicker(
    half: float, expected: str, cache: MeasurementCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "has_bfloat16", lambda _: True)
    plan = plan_of(Net(torso=NatureTorso()), threads=1, compile=False)
    cache.put(f"{name_of(plan, GRID)} float32", 0.1)
    cache.put(f"{name_of(plan, GRID)} bfloat16", half)
    assert measured_choices(plan, GRID, 1, cache).precision == expected


def half_is_quick(plan: Plan, cache: MeasurementCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "has_bfloat16", lambda _: True)
    cache.put(f"{name_of(plan, GRID)} float32", 1e-3)
    cache.put(f"{name_of(plan, GRID)} bfloat16", 1e-4)


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("torso", [NatureTorso(), MinatarTorso()])
def test_compiling_comes_before_half_precision(
    torso: NatureTorso | MinatarTorso, cache: MeasurementCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(Net(torso=torso), threads=1, compile=True)
    half_is_quick(plan, cache, monkeypatch)
    choices = measured_choices(plan, GRID, 1, cache)
    assert (choices.precision, choices.compile, choices.notes) == ("float32", True, ())
    both = measured_choices(with_runtime(plan, precision="bfloat16"), GRID, 1, cache)
    assert (both.precision, both.compile, len(both.notes)) == ("bfloat16", False, 1)
    other = msgspec.structs.replace(plan, optim=Rmsprop())  # cannot be compiled: its precision is still open
    half_is_quick(other, cache, monkeypatch)
    assert measured_choices(other, GRID, 1, cache).precision == "bfloat16"


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(("cost", "expected"), [(10.0, ("float32", True)), (300.0, ("bfloat16", False))])
def test_half_precision_is_for_what_is_not_worth_compiling(
    cost: float, expected: tuple[str, bool], cache: MeasurementCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(Net(torso=MinatarTorso()), threads=1)  # about 250,000 updates
    half_is_quick(plan, cache, monkeypatch)
    cache.put(f"{name_of(plan, GRID)} compile", cost)
    cache.put(f"{name_of(plan, GRID)} compiled", 5e-4)
    choices = measured_choices(plan, GRID, 1, cache)
    assert (choices.precision, choices.compile) == expected


def test_sequences_stay_in_full_precision(cache: MeasurementCache) -> None:
    plan = plan_of(Net(torso=MlpTorso(), memory=GruMemory()), threads=1, precision="bfloat16")
    choices = measured_choices(msgspec.structs.replace(plan, algo=Algo(view=SequencesView())), VECTOR, 1, cache)
    assert choices.precision == "float32"
    assert choices.notes == ("runtime.precision=bfloat16 has no effect: sequences are computed in float32",)


@pytest.mark.usefixtures("no_clock")
def test_networks_with_memory_are_not_tried_out(cache: MeasurementCache) -> None:
    choices = measured_choices(plan_of(Net(torso=MinatarTorso(), memory=GruMemory())), GRID, 3, cache)
    assert (choices.threads, choices.precision, choices.compile) == (3, "float32", False)


def test_another_shape_or_machine_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()
    names = {name_of(plan, VECTOR), name_of(plan, GRID), name_of(plan, VECTOR, threads=9)}
    names.add(name_of(msgspec.structs.replace(plan, algo=Algo(batch_size=9)), VECTOR))
    monkeypatch.setattr(autotune, "processor", lambda: "another")
    names.add(name_of(plan, VECTOR))
    assert len(names) == 5


# What a clock decides is said, and never takes long


@pytest.mark.usefixtures("no_clock")
def test_what_a_measurement_decided_is_named_although_it_was_made_before(
    cache: MeasurementCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(Net(torso=MinatarTorso()), threads=1)
    half_is_quick(plan, cache, monkeypatch)
    cache.put(f"{name_of(plan, GRID)} compile", 300.0)
    cache.put(f"{name_of(plan, GRID)} compiled", 5e-4)
    assert measured_choices(plan, GRID, 1, cache).timed == ("compile", "precision")
    assert measured_choices(with_runtime(plan, compile=False), GRID, 1, cache).timed == ("precision",)
    whole = with_runtime(plan, compile=False, precision="float32")
    assert measured_choices(whole, GRID, 1, cache).timed == ()
    assert measured_choices(msgspec.structs.replace(plan, until=SHORT), GRID, 1, cache).timed == ()


@pytest.mark.usefixtures("no_clock")
@pytest.mark.skipif(CORES < 2, reason="one core: nothing to choose")
def test_threads_that_a_measurement_chose_are_named(cache: MeasurementCache) -> None:
    plan = plan_of(Net(torso=MinatarTorso()), compile=False, precision="float32")
    for threads in (1, CORES):
        cache.put(f"{name_of(plan, GRID, threads=threads)} float32", float(threads))
    assert measured_choices(plan, GRID, 5, cache).timed == ("threads",)


def test_the_reason_says_what_was_chosen_and_how_to_repeat_it() -> None:
    chosen = {"threads": 2, "precision": "bfloat16", "compile": False}
    (reason,) = autotune.timed_reason(("compile", "precision"), chosen)
    assert "chose runtime.compile=false, runtime.precision=bfloat16;" in reason
    assert "--plan" in reason
    assert autotune.timed_reason((), chosen) == []


class SlowLearner:
    """Every update takes a second of a made-up clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def update(self, batch: Any) -> None:
        self.now += 1.0


@pytest.mark.parametrize(("limit", "updates"), [(0.1, 1), (2.5, 3), (1e9, autotune.ROUNDS)])
def test_slow_updates_are_measured_as_long_as_the_limit_allows(limit: float, updates: int) -> None:
    learner = SlowLearner()
    assert autotune.fastest_update_seconds(learner, None, learner.clock, limit) == 1.0  # type: ignore[arg-type]
    assert learner.now == updates


def test_measuring_takes_two_hundredths_of_the_run_and_half_a_minute_at_most(cache: MeasurementCache) -> None:
    trial = autotune.Trial(cache, 100_000, time.monotonic, lambda text: None)
    assert trial.limit_seconds(1e-3) == pytest.approx(2.0)
    assert trial.limit_seconds(1.0) == 30.0


@pytest.mark.parametrize(
    ("seconds", "answers", "limits", "whole"),
    [
        (2e-3, [10.0, 1e-3], [], False),  # 250,000 updates: 500 s, of which measuring may have 10
        (5e-3, [10.0, 1e-3], [25.0], True),
        (5e-2, [10.0, 1e-3], [30.0], True),
        (5e-2, None, [30.0], False),
    ],
)
def test_a_compiler_has_a_limit_and_is_not_started_where_that_is_too_short(
    seconds: float,
    answers: list[float] | None,
    limits: list[float],
    whole: bool,
    cache: MeasurementCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def child_main(work: Any, args: Any, limit: float) -> list[float] | None:
        seen.append(round(limit))
        return answers

    seen: list[float] = []
    told: list[str] = []
    monkeypatch.setattr(autotune, "call_isolated", child_main)
    plan = plan_of(threads=1)
    cache.put(f"{name_of(plan, VECTOR)} float32", seconds)
    choices = measured_choices(plan, VECTOR, 1, cache, show=told.append)
    assert (choices.compile, seen) == (whole, limits)
    assert ["at most" in text for text in told] == [True] * len(limits)
    if limits and not whole:
        assert choices.notes == ("update: not compiled, the compiler was not done within 30 s",)
    assert measured_choices(plan, VECTOR, 1, cache).compile == whole
    # An answer is remembered; that there was none in time is not, for the machine may have been busy.
    assert seen == (limits if answers else 2 * limits)


def test_an_isolated_call_returns_or_is_ended_at_its_limit() -> None:
    assert call_isolated(list, ((1.5, 2.5),), 30.0) == [1.5, 2.5]
    begin = time.monotonic()
    assert call_isolated(time.sleep, (60.0,), 0.2) is None
    assert time.monotonic() - begin < 20.0
    assert not [child for child in multiprocessing.active_children() if child.name == "qfleet-measure"]


def test_a_run_reports_what_was_measured_and_its_plan_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(resolve, "MIN_UPDATES", 10)
    plan = small({"runtime.compile": None, "until.steps": 150})
    first = train(plan, out=tmp_path, watcher=make_watcher("plain"))
    said = capsys.readouterr().out.splitlines()
    (reason,) = first.status["not_exact"]
    assert "runtime.compile=false" in reason
    assert said[0].startswith("measuring how long an update takes")
    assert said.index(f"warning: not exact: {reason}") < min(at for at, line in enumerate(said) if "done" in line)
    assert read_json(first.path / "provenance.json")["not_exact"] == [reason]
    assert reason in (first.path / "card.md").read_text()
    again = train(read_plan(first.path / "run.toml"), out=tmp_path)
    assert (again.status["exact"], again.status["not_exact"]) == (True, [])
    assert weights_hash(first.path) == weights_hash(again.path)


def weights_hash(run: Path) -> str:
    """Of what a run has learned."""
    return hashes(checkpoints(run)[-1])["model.safetensors"]


@pytest.mark.filterwarnings("ignore:.*going on step by step:RuntimeWarning")
def test_a_compiler_is_never_tried_in_this_process(cache: MeasurementCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C here would reach the compiler, which takes it for an error of its own, and no limit could end it."""
    tried: list[int] = []

    def compiler(*_: Any) -> Any:
        tried.append(os.getpid())
        raise OSError("no compiler")

    monkeypatch.setattr("qfleet.learn.compiled_update.compile_with_inductor", compiler)
    monkeypatch.setattr(autotune, "call_isolated", lambda work, args, limit: None)
    plan = plan_of(threads=1)
    cache.put(f"{name_of(plan, VECTOR)} float32", 1e-2)
    measured_choices(plan, VECTOR, 1, cache)
    assert tried == []
