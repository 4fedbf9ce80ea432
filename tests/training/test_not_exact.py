"""`exact` is true only when it is; otherwise `not_exact` says why."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qfleet import resume, train
from qfleet.errors import StorageError
from qfleet.training.log.run_status import ASYNCHRONOUS, CLOCK_ENDS, ENV_FAULT
from qfleet.training.train_state import UNKNOWN, TrainState
from qfleet.watch import RowLog, read_json
from tests.support.runs import JUDGED, LOCAL, Settings, checkpoints, events, resumed, rows, same, small, trained
from tests.training.test_faults import BREAKING, full_disk

RISING: Settings = {**JUDGED, "eval.every_steps": 60, "until.steps": 250, "save.every_steps": 10_000}


def book_of(run: Path) -> dict[str, Any]:
    """What the newest checkpoint says of the run so far."""
    found: dict[str, Any] = json.loads((checkpoints(run)[-1] / "state.json").read_text())["book"]
    return found


def test_an_undisturbed_run_is_exact_and_has_no_reason_not_to_be(tmp_path: Path) -> None:
    run = trained(small(), tmp_path)
    assert (run.status["exact"], run.status["not_exact"]) == (True, [])


def test_a_best_policy_that_could_not_be_saved_is_not_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = full_disk(monkeypatch, lambda number: number == 2)  # the first is the beginning, the second the first best
    run = trained(small({**RISING, "until.steps": 100}), tmp_path)
    lost = tried[1]
    (reason,) = run.status["not_exact"]
    assert reason.startswith("the best policy so far, ")
    assert reason.endswith(f" at step {lost}, could not be saved")
    assert run.status["exact"] is False
    assert f"not exact: {reason}" in [event["text"] for event in events(run.path, "warning")]
    assert read_json(run.path / "best.json")["step"] != lost
    assert run.metrics[-2]["checkpoint"] != lost
    assert book_of(run.path)["not_exact"] == [reason]
    again = resumed(run, steps=120)  # once not exact, always, and for the same reason
    assert again.status["not_exact"] == [reason]


def test_a_row_that_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(small(), tmp_path / "whole")
    write, calls = RowLog.row, [0]

    def refusing(log: RowLog, row: Mapping[str, Any]) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise StorageError("cannot write metrics.jsonl", "the system said: no", "wait")
        write(log, row)

    monkeypatch.setattr(RowLog, "row", refusing)
    run = trained(small(), tmp_path / "refused")
    assert calls[0] > len(rows(whole.path))
    assert same(run.path, whole.path)
    assert run.status["exact"] is True


def test_rows_that_are_lost_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(log: RowLog, row: Mapping[str, Any]) -> None:
        raise StorageError("cannot write metrics.jsonl", "the system said: no", "wait")

    monkeypatch.setattr(RowLog, "row", refusing)
    run = trained(small({"until.steps": 100, "log.every_steps": 100, "save.every_steps": 10_000}), tmp_path)
    assert (run.status["exact"], run.status["not_exact"]) == (False, ["metrics.jsonl lacks rows that were refused: 1"])


def test_a_run_whose_environment_failed_is_not_exact(tmp_path: Path) -> None:
    toy: Settings = {"env.options": {"every": 40}, "env.workers": 1, "env.rebuilds": 1000, "until.steps": 100}
    run = train(small(toy, BREAKING), out=tmp_path)
    assert events(run.path, "env_fault")
    assert (run.status["exact"], run.status["not_exact"]) == (False, [ENV_FAULT])


def test_a_run_with_actors_in_processes_says_so_from_the_beginning(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    plan = small({"runtime.type": "processes", "actors.num": 1, **LOCAL, "until.steps": 100})
    run = train(plan, out=tmp_path, callbacks=[lambda row: seen.append(read_json(_only(tmp_path)))])
    assert (seen[0]["state"], seen[0]["exact"], seen[0]["not_exact"]) == ("running", False, [ASYNCHRONOUS])
    assert run.status["not_exact"] == [ASYNCHRONOUS]
    assert events(run.path, "warning")[0]["text"] == f"not exact: {ASYNCHRONOUS}"


def _only(out: Path) -> Path:
    return next(out.glob("*/status.json"))


def test_an_end_by_the_clock_is_reported_without_marking_the_train_state(tmp_path: Path) -> None:
    run = trained(small({"until.seconds": 0.2, "until.steps": 1_000_000}), tmp_path)
    assert (run.status["exact"], run.status["not_exact"]) == (False, [CLOCK_ENDS])
    assert events(run.path, "warning")[0]["text"] == f"not exact: {CLOCK_ENDS}"
    further = resume(run.path, steps=run.status["env_steps"] + 40)  # no clock ends it any more
    assert further.status["exact"] is True


def test_an_update_that_could_not_be_compiled_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no compiler")

    monkeypatch.setattr("qfleet.learn.compiled_update.compile_with_inductor", fails)
    with pytest.warns(RuntimeWarning, match="going on step by step"):
        run = train(small({"runtime.compile": True, "until.steps": 100}), out=tmp_path)
    (reason,) = run.status["not_exact"]
    assert reason.startswith("the update could not be compiled")
    assert reason.endswith("(OSError: no compiler)")


def test_runs_of_older_versions_have_no_reason_written_down() -> None:
    before = {name: value for name, value in TrainState(exact=False).state_dict().items() if name != "not_exact"}
    train_state = TrainState()
    train_state.load_state_dict(before)
    assert (train_state.exact, train_state.not_exact) == (False, [UNKNOWN])
    train_state.load_state_dict({**before, "exact": True})
    assert (train_state.exact, train_state.not_exact) == (True, [])
