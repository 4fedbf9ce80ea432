"""Open settings: the plan goes first, then the kind of processor and what was measured; a run says if that did."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from qfleet import train
from qfleet.build.machine import choices, measurement, table
from qfleet.build.machine.choices import choose_machine_settings, example_of, is_worth_measuring, measured_reason
from qfleet.build.machine.table import MachineTable, this_machine, write_table
from qfleet.data import Spec
from qfleet.plan import read_plan
from qfleet.plan.schema import (
    Algo,
    GruMemory,
    ImpalaTorso,
    MlpTorso,
    NatureTorso,
    Net,
    Plan,
    Rmsprop,
    SequencesView,
)
from qfleet.plan.sync_schema import Learners
from qfleet.watch import make_watcher, read_json
from tests.build.machine.parts import (
    GRID,
    GRID_TIMES,
    LONG,
    MINATAR,
    MLP,
    NATURE,
    PICTURE,
    PICTURE_TIMES,
    SHORT,
    VECTOR,
    VECTOR_TIMES,
    choose,
    plan_of,
    replaced,
    resolved,
    table_of,
)
from tests.support.runs import PONG, checkpoints, hashes, resumed, small

FLOAT32_PICTURES = {way: seconds for way, seconds in PICTURE_TIMES.items() if way.startswith("float32")}


@pytest.fixture(autouse=True)
def a_quiet_machine_with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cores(2, monkeypatch)
    monkeypatch.setattr(choices, "multiplies_bfloat16", lambda: True)


def set_cores(num: int, monkeypatch: pytest.MonkeyPatch, share: int | None = None) -> None:
    monkeypatch.setattr(choices, "machine_cores", lambda: num)
    for name in ("qfleet.build.machine.choices.usable_cores", "qfleet.build.threads.usable_cores"):
        monkeypatch.setattr(name, lambda: share or num)


def with_(times: dict[str, float], **changes: float) -> dict[str, float]:
    """The times with some changed; names are written with _ for a space."""
    return {**times, **{name.replace("_", " "): seconds for name, seconds in changes.items()}}


# --- precision ---


@pytest.mark.parametrize("until", [SHORT, LONG])
@pytest.mark.parametrize("torso", [NatureTorso(), ImpalaTorso()])
def test_pictures_are_learned_in_bfloat16_where_the_processor_has_it(torso: Any, until: Any) -> None:
    """The kind of processor decides, so nothing is said against repeating the run on another of its kind."""
    for tables in ({}, {"pictures": PICTURE_TIMES}):
        found = choose(plan_of(Net(torso=torso), until), PICTURE, **tables)
        assert found.settings["precision"] == "bfloat16"
        assert found.measured == []
        assert "update: in bfloat16, which this processor multiplies" in found.notes


def test_one_rule_switches_bfloat16_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "BFLOAT16_TORSOS", ())
    assert choose(plan_of(NATURE), PICTURE, pictures=PICTURE_TIMES).settings["precision"] == "float32"


def test_a_processor_without_bfloat16_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "multiplies_bfloat16", lambda: False)
    found = choose(plan_of(NATURE, LONG), PICTURE, pictures=FLOAT32_PICTURES)
    assert (found.settings["precision"], found.measured) == ("float32", [])


@pytest.mark.parametrize("until", [SHORT, LONG])
@pytest.mark.parametrize(
    ("plan", "spec"),
    [
        (plan_of(MLP), VECTOR),
        (plan_of(Net(torso=MlpTorso(sizes=(512, 512)))), VECTOR),
        (plan_of(MINATAR), GRID),
        (plan_of(Net(torso=NatureTorso(), memory=GruMemory())), PICTURE),
        (replaced(plan_of(NATURE), algo=Algo(view=SequencesView())), PICTURE),
        (plan_of(Net(torso=ImpalaTorso())), Spec((4, 35, 35), "uint8", (3,))),
        (plan_of(NATURE, device="cuda"), PICTURE),
    ],
)
def test_small_networks_and_sequences_stay_in_float32(plan: Plan, spec: Spec, until: Any) -> None:
    plan = replaced(plan, until=until)
    given = plan.runtime
    tables = {"pictures": PICTURE_TIMES, "grids": GRID_TIMES, "vectors": VECTOR_TIMES}
    found = choices.choose_settings(resolved(plan), given, spec, table_of(**tables))
    assert found.settings["precision"] == "float32"


@pytest.mark.parametrize(("half", "expected"), [(12.5e-3, "bfloat16"), (13.0e-3, "float32"), (40e-3, "float32")])
@pytest.mark.parametrize("until", [SHORT, LONG])
def test_a_short_run_too_uses_what_was_measured(half: float, expected: str, until: Any) -> None:
    times = with_(FLOAT32_PICTURES, **{"bfloat16_1_thread": 90e-3, "bfloat16_tasks": half})
    found = choose(plan_of(NATURE, until), PICTURE, pictures=times)
    assert found.settings["precision"] == expected
    # The measurement has changed numbers only where it says no.
    assert found.measured == ([] if expected == "bfloat16" else ["precision"])


@pytest.mark.parametrize("given", ["float32", "bfloat16"])
def test_the_plans_precision_goes_first(given: str) -> None:
    slow = with_(PICTURE_TIMES, **{name.replace(" ", "_"): 1.0 for name in PICTURE_TIMES if name.startswith(given)})
    found = choose(plan_of(NATURE, precision=given), PICTURE, pictures=slow)
    assert (found.settings["precision"], found.measured) == (given, [])


def test_compiling_comes_before_bfloat16() -> None:
    assert choose(plan_of(NATURE, compile=True), PICTURE).settings["precision"] == "float32"
    both = choose(plan_of(NATURE, compile=True, precision="bfloat16"), PICTURE)
    assert (both.settings["precision"], both.settings["compile"], len(both.notes)) == ("bfloat16", False, 1)
    other = replaced(plan_of(NATURE, compile=True), optim=Rmsprop())  # cannot be compiled: its precision is still open
    assert choose(other, PICTURE).settings["precision"] == "bfloat16"


def test_sequences_in_bfloat16_have_no_effect() -> None:
    plan = replaced(plan_of(Net(memory=GruMemory()), precision="bfloat16"), algo=Algo(view=SequencesView()))
    found = choose(plan, VECTOR)
    assert found.settings["precision"] == "float32"
    assert found.notes == ["runtime.precision=bfloat16 has no effect: sequences are computed in float32"]


# --- threads ---


@pytest.mark.parametrize(("tasks", "expected"), [(9e-3, 2), (12e-3, 1), (13e-3, 1)])
def test_a_second_thread_helps_where_it_was_measured_to(tasks: float, expected: int) -> None:
    """Numbers do not depend on it, so nothing is said."""
    found = choose(plan_of(NATURE), PICTURE, pictures=with_(PICTURE_TIMES, bfloat16_tasks=tasks, bfloat16_operations=1))
    assert (found.settings["threads"], found.settings["parallel"], found.measured) == (expected, "tasks", [])


@pytest.mark.parametrize(("tasks", "expected"), [(1.0e-3, 2), (1.3e-3, 1)])
def test_small_pictures_have_a_second_thread_only_where_it_was_measured_to_help(tasks: float, expected: int) -> None:
    assert choose(plan_of(MINATAR), GRID).settings["threads"] == 1
    found = choose(plan_of(MINATAR), GRID, grids=with_(GRID_TIMES, float32_tasks=tasks))
    assert (found.settings["threads"], found.measured) == (expected, [])


def test_without_a_table_convolutions_have_two_threads_and_the_rest_one() -> None:
    assert choose(plan_of(NATURE), PICTURE).settings["threads"] == 2
    assert choose(plan_of(MLP), VECTOR).settings["threads"] == 1


def test_a_member_of_a_group_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cores(2, monkeypatch, share=1)
    assert choose(plan_of(NATURE), PICTURE, pictures=PICTURE_TIMES).settings["threads"] == 1


MANY = with_(PICTURE_TIMES, bfloat16_operations=4e-3)


def test_many_cores_divide_operations_where_that_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cores(16, monkeypatch)
    found = choose(plan_of(NATURE), PICTURE, pictures=MANY)
    assert (found.settings["parallel"], found.settings["threads"]) == ("operations", 16)
    assert found.measured == ["parallel", "threads"]  # numbers depend on it
    (reason,) = measured_reason(found)
    assert "chose runtime.parallel=operations, runtime.threads=16;" in reason
    found = choose(plan_of(NATURE), PICTURE, pictures=with_(MANY, bfloat16_operations=7.5e-3))
    assert (found.settings["parallel"], found.settings["threads"]) == ("tasks", 2)


@pytest.mark.parametrize("runtime", [{"threads": 2}, {"parallel": "tasks"}])
def test_what_the_plan_says_of_threads_goes_first(runtime: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    set_cores(16, monkeypatch)
    found = choose(plan_of(NATURE, **runtime), PICTURE, pictures=MANY)
    assert (found.settings["parallel"], found.settings["threads"], found.measured) == ("tasks", 2, [])


def test_operations_are_not_divided_among_cores_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cores(16, monkeypatch, share=8)
    assert choose(plan_of(NATURE), PICTURE, pictures=MANY).settings["parallel"] == "tasks"
    set_cores(16, monkeypatch)
    learners = replaced(plan_of(NATURE), learners=Learners(num=2))
    assert choose(learners, PICTURE, pictures=MANY).settings["parallel"] == "tasks"


# --- compile ---


@pytest.mark.parametrize(
    ("compiled", "compiling", "expected"),
    [(1e-4, 10.0, True), (1e-4, 300.0, False), (2e-3, 1.0, False), (None, None, False)],
)
@pytest.mark.parametrize("spec", [VECTOR, GRID])
def test_compiled_if_it_saves_more_than_it_costs(
    compiled: float | None, compiling: float | None, expected: bool, spec: Spec
) -> None:
    plan = plan_of(MLP if spec is VECTOR else MINATAR, LONG)
    times = dict(VECTOR_TIMES)
    times |= {} if compiled is None or compiling is None else {"compiled": compiled, "compiling": compiling}
    found = choose(plan, spec, **{"vectors" if spec is VECTOR else "grids": times})
    assert found.settings["compile"] is expected
    assert found.measured == ["compile"]  # either way: the time of an update decides
    assert any("compiled, as it saves" in note for note in found.notes) is expected
    short = choose(replaced(plan, until=SHORT), spec, vectors=times, grids=times)
    assert (short.settings["compile"], short.measured) == (False, [])


def test_a_run_that_ends_at_a_score_is_compiled_only_if_the_plan_says_so() -> None:
    times = {**VECTOR_TIMES, "compiled": 1e-4, "compiling": 1.0}
    until_score = msgspec.structs.replace(LONG, score=475.0)
    found = choose(plan_of(MLP, until_score), VECTOR, vectors=times)
    assert (found.settings["compile"], found.measured) == (False, [])  # the seed alone decides the run
    assert choose(plan_of(MLP, until_score, compile=True), VECTOR, vectors=times).settings["compile"] is True
    assert choose(plan_of(MLP, LONG), VECTOR, vectors=times).settings["compile"] is True


def test_large_updates_gain_nothing_from_a_compiler() -> None:
    times = {**VECTOR_TIMES, "compiled": 1e-4, "compiling": 1.0}
    for plan in (
        plan_of(Net(torso=MlpTorso(sizes=(513, 8))), LONG),
        replaced(plan_of(MLP, LONG), algo=Algo(batch_size=1024)),
    ):
        assert not choose(plan, VECTOR, vectors=times).settings["compile"]
    assert not choose(plan_of(NATURE, LONG), PICTURE, pictures=times).settings["compile"]


@pytest.mark.parametrize("until", [SHORT, LONG])
def test_what_the_plan_says_of_compiling_goes_first(until: Any) -> None:
    times = {**VECTOR_TIMES, "compiled": 1e-4, "compiling": 1.0}
    assert choose(plan_of(MLP, until, compile=True), VECTOR).settings["compile"] is True
    assert choose(plan_of(MLP, until, compile=False), VECTOR, vectors=times).settings["compile"] is False
    found = choose(replaced(plan_of(MLP, until, compile=True), optim=Rmsprop()), VECTOR)
    assert found.settings["compile"] is False
    assert found.notes == ["runtime.compile=true has no effect: optim.type=rmsprop is not adam"]


# --- when it is measured ---


@pytest.mark.parametrize(
    ("plan", "spec", "table", "expected"),
    [
        (plan_of(NATURE, SHORT), PICTURE, table_of(), False),
        (plan_of(MLP, SHORT), VECTOR, table_of(), False),
        (plan_of(NATURE, LONG), PICTURE, table_of(), True),
        (plan_of(NATURE, LONG), PICTURE, table_of(pictures=PICTURE_TIMES), False),
        (plan_of(NATURE, LONG, threads=2, precision="float32"), PICTURE, table_of(), False),
        (plan_of(MINATAR, LONG), GRID, table_of(), True),
        (plan_of(MINATAR, LONG, compile=False), GRID, table_of(), True),
        (plan_of(MINATAR, LONG, compile=False, threads=1), GRID, table_of(), False),
        (plan_of(MLP, LONG), VECTOR, table_of(), True),
        (plan_of(MLP, LONG), VECTOR, table_of(vectors=VECTOR_TIMES), True),
        (plan_of(MLP, LONG), VECTOR, table_of(vectors={**VECTOR_TIMES, "compiled": 1.0, "compiling": 1.0}), False),
        (plan_of(MLP, LONG, compile=False), VECTOR, table_of(), False),
        (plan_of(Net(memory=GruMemory()), LONG), VECTOR, table_of(), False),
    ],
)
def test_only_a_long_run_measures_and_only_what_it_needs(
    plan: Plan, spec: Spec, table: MachineTable, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = resolved(plan)
    assert is_worth_measuring(full, plan.runtime, spec, table) is expected
    set_cores(2, monkeypatch, share=1)
    assert not is_worth_measuring(full, plan.runtime, spec, table)  # a member of a group


def test_a_run_is_like_one_example_or_none() -> None:
    found = [(NATURE, PICTURE), (MINATAR, GRID), (MLP, VECTOR), (Net(memory=GruMemory()), VECTOR)]
    assert [example_of(plan_of(net), spec) for net, spec in found] == ["pictures", "grids", "vectors", None]


def test_what_is_measured_for_a_long_run_is_kept_for_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(name: str, clock: Any) -> dict[str, float]:
        measured.append(name)
        return with_(PICTURE_TIMES, bfloat16_tasks=1.0, bfloat16_operations=1.0, bfloat16_1_thread=1.0)

    monkeypatch.setattr(measurement, "measure_example", measure)
    said: list[str] = []
    for until, told in ((LONG, 1), (SHORT, 0), (LONG, 0)):
        said.clear()
        plan = plan_of(NATURE, until)
        chosen, _, (reason,) = choose_machine_settings(resolved(plan), plan.runtime, PICTURE, said.append)
        assert chosen.runtime.precision == "float32"
        assert "runtime.precision=float32; to repeat this run, train with --plan" in reason
        assert len(said) == told
    assert measured == ["pictures"]


# --- real runs ---


def test_a_run_reports_what_was_measured_and_its_plan_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choices, "MIN_UPDATES", 10)
    plan = small({"runtime.compile": None, "until.steps": 150, "until.score": "none"})
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


OPEN = {**PONG, "runtime.threads": None, "until.steps": 100}


def test_a_short_run_by_the_kind_of_processor_is_exact(tmp_path: Path) -> None:
    run = train(small(OPEN, "ALE/Pong-v5"), out=tmp_path)
    assert (run.status["exact"], run.status["not_exact"]) == (True, [])
    runtime = read_plan(run.path / "run.toml").runtime
    assert (runtime.precision, runtime.parallel, runtime.threads) == ("bfloat16", "tasks", 2)


def test_a_run_that_goes_on_keeps_its_choice_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(small(OPEN, "ALE/Pong-v5"), out=tmp_path / "whole")
    part = train(small({**OPEN, "until.steps": 90}, "ALE/Pong-v5"), out=tmp_path / "part")
    # The other machine has no bfloat16, one core, and another table.
    set_cores(1, monkeypatch)
    monkeypatch.setattr(choices, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr("qfleet.system.cores.machine_cores", lambda: 1)
    monkeypatch.setattr(table, "machine_cores", lambda: 1)
    write_table(table_of(this_machine(), pictures=dict.fromkeys(PICTURE_TIMES, 1.0)))
    on = resumed(part, steps=100)
    assert read_plan(on.path / "run.toml").runtime == read_plan(whole.path / "run.toml").runtime
    assert (on.status["exact"], on.status["not_exact"]) == (True, [])
    assert weights_hash(on.path) == weights_hash(whole.path)
    fresh = train(small(OPEN, "ALE/Pong-v5"), out=tmp_path / "fresh")  # a new run there chooses anew
    assert read_plan(fresh.path / "run.toml").runtime.precision == "float32"
