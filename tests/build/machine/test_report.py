"""What `qfleet doctor` says about this machine."""

import json
from typing import Any

import pytest

from qfleet.build.machine import choices, measurement, report
from qfleet.build.machine.table import NEVER_SECONDS, MachineTable, read_table, write_table
from qfleet.cli import main
from tests.build.machine.parts import GRID_TIMES, KIND, PICTURE_TIMES, VECTOR_TIMES, table_of

TIMES: dict[str, dict[str, float]] = {
    "pictures": PICTURE_TIMES,
    "grids": {**GRID_TIMES, "compiling": 12.0, "compiled": 0.8e-3},
    "vectors": {**VECTOR_TIMES, "compiling": 100.0, "compiled": 0.5e-3},
    "layout": {"channels last": 6e-3, "contiguous": 11e-3},
}


@pytest.fixture(autouse=True)
def a_machine_with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "multiplies_bfloat16", lambda: True)
    for name in ("choices.machine_cores", "choices.usable_cores"):
        monkeypatch.setattr(f"qfleet.build.machine.{name}", lambda: 2)
    monkeypatch.setattr("qfleet.build.threads.usable_cores", lambda: 2)


def test_the_table_says_what_runs_choose() -> None:
    table = table_of(**TIMES)
    rows = dict(report.chosen_rows(table))
    assert rows["nature, 84x84 pixels, batch 32"] == (
        "runtime.precision=bfloat16, runtime.parallel=tasks, runtime.threads=2"
    )
    assert rows["minatar, 10x10 cells, batch 32"].endswith("threads=1; compiled in runs of 50,000 updates and more")
    assert rows["mlp, 120-84, batch 128"].endswith("threads=1; compiled in runs of 200,001 updates and more")
    assert ("mlp, 120-84, batch 128", "compiling", "100.0 s", "2026-11-19T00:00:00+00:00") in report.measured_rows(
        table
    )
    assert report.machine_text(table) == "a processor (avx512_bf16), 2 cores, torch 2.13.0"
    assert report.remarks(table) == []


def test_without_a_compiler_or_a_gain_nothing_is_compiled() -> None:
    for compiled, compiling in ((NEVER_SECONDS, NEVER_SECONDS), (2e-3, 1.0)):
        table = table_of(vectors={**VECTOR_TIMES, "compiled": compiled, "compiling": compiling})
        assert report.compiled_from_updates("vectors", table) is None
    assert report.compiled_from_updates("vectors", table_of()) is None
    assert report.seconds_text(NEVER_SECONDS) == "no compiler"


def test_a_machine_on_which_another_layout_is_faster_is_remarkable() -> None:
    (remark,) = report.remarks(table_of(layout={"channels last": 2.0, "contiguous": 1.0}))
    assert "contiguous pictures are faster here" in remark


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "measure_example", lambda name, clock: TIMES[name])
    monkeypatch.setattr(measurement, "measure_layouts", lambda clock: TIMES["layout"])
    monkeypatch.setattr(measurement, "call_isolated", lambda work, args, limit: [12.0, 1e-4])


@pytest.mark.usefixtures("measured")
def test_doctor_measures_and_shows_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--measure"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("measuring this machine: half a minute, at most 120 s")
    assert f"torch {read_table().kind.torch}" in said
    for words in ("bfloat16 tasks", "9 ms", "minatar, 10x10 cells", "runtime.precision=bfloat16", "compiling"):
        assert words in said
    assert list(read_table().examples) == list(TIMES)


@pytest.mark.usefixtures("measured")
def test_doctor_measures_again_and_keeps_what_was_disturbed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--measure"]) == 0
    monkeypatch.setattr(
        measurement,
        "measure_example",
        lambda name, clock: None if name == "pictures" else {"float32 1 thread": 7.0},
    )
    capsys.readouterr()
    assert main(["doctor", "--measure"]) == 0
    assert "not measured: another program used the processor (nature" in capsys.readouterr().out
    assert read_table().seconds("pictures") == PICTURE_TIMES
    assert read_table().seconds("grids")["float32 1 thread"] == 7.0


@pytest.mark.usefixtures("measured")
def test_the_table_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--measure", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["machine"]["torch"] == read_table().kind.torch
    assert found["measured"]["pictures"]["seconds"] == PICTURE_TIMES
    assert found["measured"]["pictures"]["at"][:2] == "20"
    assert found["chosen"]["pictures"]["precision"] == "bfloat16"
    assert found["compiled_from_updates"]["vectors"] == 50_000
    assert found["kept"] is True


@pytest.mark.parametrize("table", [MachineTable(KIND), table_of(**TIMES)])
def test_doctor_has_a_line_about_it(table: MachineTable, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(table_of(read_table().kind, **{name: rows.seconds for name, rows in table.examples.items()}))
    assert main(["doctor", "--json"]) == 0
    (line,) = [each["detail"] for each in json.loads(capsys.readouterr().out) if each["name"] == "measured"]
    assert "qfleet doctor --measure" in line
    shown = "2026-11-19: an update of nature in bfloat16 8.5 ms, nature in float32 14 ms, minatar in float32 1.1 ms"
    assert line.startswith(shown if table.examples else "not yet")
