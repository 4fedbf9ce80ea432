"""Readers of a run folder: bounded memory and time, whatever lies there, and one bad run never hides the others."""

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qfleet.cli import main
from qfleet.errors import UsageError
from qfleet.plan import make_plan, write_plan
from qfleet.watch import read_json, read_rows
from qfleet.watch.plot import MOST_ROWS_KEPT, curve_rows
from qfleet.watch.read_files import (
    MOST_LINE_BYTES,
    MOST_ROW_BYTES,
    MOST_ROWS,
    TAIL_BYTES,
    count_lines,
    each_row,
    last_rows,
)
from qfleet.watch.run_listing import list_runs, show_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    write_plan(make_plan("CartPole-v1"), folder / "run.toml")
    return folder


@contextmanager
def at_most(megabytes: float) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < megabytes * 1e6
    finally:
        tracemalloc.stop()


def sparse(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


def test_showing_a_run_reads_only_its_last_rows(run: Path) -> None:
    row = json.dumps({"kind": "progress", "env_steps": 1, "text": "x" * 1_000}) + "\n"
    last = json.dumps({"kind": "progress", "env_steps": 2}) + "\n"
    (run / "metrics.jsonl").write_text(row * 20_000 + last)
    assert (run / "metrics.jsonl").stat().st_size > 4 * TAIL_BYTES
    with at_most(megabytes=20):
        assert show_run(run)["last_progress"] == {"kind": "progress", "env_steps": 2}
    assert len(last_rows(run / "metrics.jsonl")) < 5_000


def test_a_file_with_too_many_bytes_is_refused_but_its_end_can_be_read(run: Path) -> None:
    sparse(run / "metrics.jsonl", MOST_ROW_BYTES + 1)
    with pytest.raises(UsageError, match=r"cannot read .*metrics\.jsonl"):
        read_rows(run / "metrics.jsonl")
    assert last_rows(run / "metrics.jsonl") == []
    assert show_run(run)["last_progress"] is None
    assert count_lines(run / "metrics.jsonl") == 0


def test_a_file_of_too_many_lines_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_ROWS >= 1_000_000
    monkeypatch.setattr("qfleet.watch.read_files.MOST_ROWS", 1_000)
    (run / "metrics.jsonl").write_text("{}\n" * 1_001)
    with pytest.raises(UsageError, match="cannot read"):
        read_rows(run / "metrics.jsonl")


def test_a_line_without_an_end_is_not_read_whole(run: Path) -> None:
    sparse(run / "metrics.jsonl", 8 * MOST_LINE_BYTES)
    with at_most(megabytes=4 * MOST_LINE_BYTES / 1e6):
        assert list(each_row(run / "metrics.jsonl")) == []


def test_a_plot_keeps_no_more_rows_than_it_can_show(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_ROWS_KEPT >= 10_000
    monkeypatch.setattr("qfleet.watch.plot.MOST_ROWS_KEPT", 100)
    rows = [{"kind": "progress", "env_steps": step, "loss": 1.0, "returns": [1.0] * 50} for step in range(1_000)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = curve_rows(run)
    assert 50 <= len(kept) <= 101
    assert kept[0] == {"kind": "progress", "env_steps": 0, "loss": 1.0}
    assert kept[-1]["env_steps"] > 900


@pytest.mark.parametrize(
    "text",
    ["1" * 4_000, "1" * 400, "-" + "9" * 21, "1e999", "[" * 5_000, "[" * 300 + "]" * 300, "NaN", '"x"', "null", "{}"],
)
@pytest.mark.parametrize("file", ["best.json", "status.json"])
def test_one_bad_run_does_not_hide_the_others(
    run: Path, file: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = run.with_name("other")
    other.mkdir()
    write_plan(make_plan("CartPole-v1"), other / "run.toml")
    fields = ", ".join(
        f'"{name}": {text}' for name in ("mean", "env_steps", "step", "score", "state", "reason", "exit_code")
    )
    (run / file).write_text(f"{{{fields}}}")
    monkeypatch.chdir(run.parents[1])
    assert {each["name"] for each in list_runs()} == {"one", "other"}
    for arguments in (["runs"], ["runs", "--json"], ["runs", "show", "one"], ["runs", "show", "one", "--json"]):
        assert main(arguments) == 0, arguments
    assert "other" in capsys.readouterr().out


def test_numbers_of_many_digits_are_refused(run: Path) -> None:
    (run / "best.json").write_text('{"step": 123456789012345678901}')
    assert read_json(run / "best.json") == {}
    (run / "best.json").write_text('{"step": 12345678901234567890, "mean": NaN}')
    assert read_json(run / "best.json") == {"step": 12345678901234567890, "mean": None}


@pytest.mark.parametrize("name", ["a\nFORGED done", "a\x1b[2J", "a\rb"])
def test_a_name_with_control_characters_forges_no_line(
    run: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.rename(run.with_name(name))
    monkeypatch.chdir(run.parents[1])
    assert main(["runs"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 2
    assert all(mark.isprintable() for mark in shown.replace("\n", ""))
