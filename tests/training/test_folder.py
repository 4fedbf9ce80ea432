"""What a run leaves in its folder, while it goes on and after every kind of end."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qfleet.save import verify_run
from tests.support.run_fixtures import Reference
from tests.support.runs import JUDGED, checkpoints, events, resumed, rows, same, small, status, trained, until

TELLING = "toys/Random-v0"
EVERY_ROW = {"kind", "seconds", "env_steps", "updates"}
FIELDS = {
    "progress": {"steps_per_second", "updates_per_second", "epsilon", "loss", "return_mean"},
    "eval": {"episodes", "mean", "median", "iqm", "low", "high", "returns"},
    "end": {"state", "exit_code", "reason"},
}


def test_rows_have_the_documented_fields_in_order(reference: Reference) -> None:
    found = reference(JUDGED, TELLING).metrics
    assert {row["kind"] for row in found} == FIELDS.keys()
    for row in found:
        assert EVERY_ROW | FIELDS[row["kind"]] <= row.keys()
    assert [row["env_steps"] for row in found] == sorted(row["env_steps"] for row in found)
    assert [row["seconds"] for row in found] == sorted(row["seconds"] for row in found)
    assert [row["kind"] for row in found].index("end") == len(found) - 1
    splits = [row["split"] for row in found if row["kind"] == "eval"]
    assert splits == ["validation"] * 3 + ["test"]
    assert [len(row["returns"]) for row in found if row["kind"] == "eval"] == [3, 3, 3, 4]


def test_the_folder_is_complete_and_says_how_it_ended(reference: Reference) -> None:
    run = reference(JUDGED, TELLING)
    names = {path.name for path in run.path.iterdir()}
    assert {"run.toml", "status.json", "metrics.jsonl", "events.jsonl", "provenance.json", "checkpoints"} <= names
    assert {"best.json", "card.md"} <= names
    assert not {name for name in names if name.startswith(".") or name == "run.lock"}
    found = status(run.path)
    assert (found["state"], found["exit_code"], found["reason"]) == ("done", 0, "reached until.steps=300")
    assert found["env_steps"] == run.metrics[-1]["env_steps"] >= 300
    assert found["updates"] == run.metrics[-1]["updates"] > 0
    assert found["resume"] == f"qfleet resume {run.path}"
    assert found["exact"] is True
    assert found["pid"] is None
    assert found["score"]["mean"] == run.result()["mean"]  # type: ignore[index]
    for checkpoint in checkpoints(run.path):
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        assert re.fullmatch(r"step_\d{12}", checkpoint.name)
        assert {"bytes", "sha256"} == manifest["files"]["model.safetensors"].keys()


def test_the_status_says_that_it_runs_while_it_runs(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def look(row: dict[str, Any]) -> None:
        seen.append(status(next(tmp_path.iterdir())))

    trained(until(small(), 60), tmp_path, callbacks=[look])
    assert {found["state"] for found in seen} == {"running"}
    assert all(found["pid"] for found in seen)
    # Killed now, it must not look like a success.
    assert {found["exit_code"] for found in seen} == {None}


def test_an_early_end_by_score_is_a_success(tmp_path: Path) -> None:
    run = trained(small({**JUDGED, "until.score": 5.0}), tmp_path)
    assert run.exit_code == 0
    assert run.status["reason"] == "validation interval is above until.score=5"
    assert run.status["env_steps"] < 200


def test_a_missed_score_is_no_failure_but_is_not_called_solved(tmp_path: Path) -> None:
    run = trained(small({**JUDGED, "until.score": 500.0}), tmp_path)
    assert (run.exit_code, run.status["reason"]) == (0, "reached until.steps=300")


def test_time_ends_a_run_too(tmp_path: Path) -> None:
    run = trained(small({"until.seconds": 0.2, "until.steps": 1_000_000}), tmp_path)
    assert (run.exit_code, run.status["reason"]) == (0, "reached until.seconds=0.2")


@pytest.mark.usefixtures("every_save")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_as_many_checkpoints_are_kept_as_asked_and_the_best(seed: int, tmp_path: Path) -> None:
    run = trained(small({**JUDGED, "save.keep": 3, "until.steps": 600, "seed": seed}, TELLING), tmp_path)
    judged = [row for row in run.metrics if row["kind"] == "eval" and row["split"] == "validation"]
    best = max(reversed(judged), key=lambda row: row["mean"])
    found = json.loads((run.path / "best.json").read_text())
    assert (found["step"], found["mean"]) == (best["env_steps"], best["mean"])
    kept = {int(path.name.removeprefix("step_")) for path in checkpoints(run.path)}
    assert found["step"] in kept
    assert len(kept - {found["step"]}) in (2, 3)
    assert max(kept) == run.status["env_steps"]
    assert all(verdict.ok for verdict in verify_run(run.path))
    assert next(row for row in run.metrics if row.get("split") == "test")["checkpoint"] == found["step"]


@pytest.mark.usefixtures("every_save")
@pytest.mark.parametrize("keep", [2, 3])
def test_the_best_that_any_kept_checkpoint_names_is_kept(keep: int, tmp_path: Path) -> None:
    """Damage to the newest must not lose the best: the one before it may know another."""
    named: set[int] = set()
    for seed in range(4):
        run = trained(small({**JUDGED, "save.keep": keep, "seed": seed}, TELLING), tmp_path)
        books = [json.loads((path / "state.json").read_text())["book"] for path in checkpoints(run.path)[-keep:]]
        bests = {train_state["best"]["env_steps"] for train_state in books}
        assert bests <= {int(path.name.removeprefix("step_")) for path in checkpoints(run.path)}
        named |= {len(bests)}
    assert max(named) > 1  # or nothing was tried


@pytest.mark.usefixtures("every_save")
def test_best_json_never_names_a_missing_checkpoint(tmp_path: Path) -> None:
    """The last policy of a finished run is judged out of turn; a longer run forgets that, and so must best.json."""
    run = trained(until(small({**JUDGED, "eval.every_steps": 280}, TELLING), 60), tmp_path)
    assert json.loads((run.path / "best.json").read_text())["step"] == run.status["env_steps"]
    seen: list[bool] = []

    def look(row: dict[str, Any]) -> None:
        file = run.path / "best.json"
        names = [path.name for path in checkpoints(run.path)]
        seen.append(not file.exists() or f"step_{json.loads(file.read_text())['step']:012d}" in names)

    ended = resumed(run, steps=300, callbacks=[look])
    assert all(seen)
    assert same(ended.path, trained(small({**JUDGED, "eval.every_steps": 280}, TELLING), tmp_path / "whole").path)


def test_rows_after_the_last_commit_are_cut_off_on_resume(tmp_path: Path, reference: Reference) -> None:
    run = trained(until(small(), 110), tmp_path)
    assert rows(run.path)[-1]["kind"] == "end"
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"kind":"progress","env_steps":114}\n{"torn')
    assert same(resumed(run, steps=300).path, reference().path)
    assert sum(row["kind"] == "end" for row in rows(run.path)) == 1


def test_a_resumed_run_says_so_and_names_what_changed(tmp_path: Path) -> None:
    before = trained(until(small(), 60), tmp_path).status["seconds"]
    run = resumed(next(tmp_path.iterdir()), steps=90)
    (event,) = events(run.path, "resumed")
    assert event["env_steps"] >= 60
    assert event["changes"] == ["changed until.steps: 60 -> 90"]
    assert run.plan.until.steps == 90
    # The clock goes on from where the commit was, and rows stay in order.
    assert run.status["seconds"] > 0.5 * before
    assert [row["seconds"] for row in run.metrics] == sorted(row["seconds"] for row in run.metrics)
    assert "steps = 90" in (run.path / "run.toml").read_text()
