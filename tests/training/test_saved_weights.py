"""Whose weights are looked at is said, and only the best are called the best."""

import json
from pathlib import Path
from typing import Any

import pytest

from qfleet import load, train
from qfleet.cli import main
from qfleet.errors import NoCheckpointError
from qfleet.save import Checkpoints, CheckpointWarning
from qfleet.training.evaluator import RunEvaluation
from qfleet.watch.compare import compare
from tests.support.runs import JUDGED, Settings, checkpoints, small, trained, until
from tests.training.test_damage import flip

EVALUATED: Settings = {**JUDGED, "seed": 3}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was evaluated; nobody changes it."""
    return trained(small(EVALUATED), tmp_path_factory.mktemp("judged"), name="judged").path


def test_the_row_names_the_checkpoint_and_the_seed(judged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = json.loads((judged / "best.json").read_text())["step"]
    assert main(["eval", str(judged), "--episodes", "2", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["which"], row["step"], row["checkpoint"], row["seed"]) == ("best", step, step, 3)
    assert row["checkpoint_name"] == f"step_{step:012d}"
    assert main(["eval", str(judged), "--episodes", "2", "--seed", "9", "--which", "latest", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["which"], row["checkpoint_name"], row["seed"]) == ("latest", checkpoints(judged)[-1].name, 9)


def test_the_text_names_the_checkpoint(judged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = json.loads((judged / "best.json").read_text())["step"]
    assert main(["eval", str(judged), "--episodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"best weights, step {step}, checkpoint step_{step:012d}, seed 3"


def test_a_run_that_was_never_evaluated_has_no_best_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(until(small(), 30), tmp_path).path
    assert main(["eval", str(run), "--episodes", "1"]) == 0
    said = capsys.readouterr().out
    assert "latest weights, step " in said
    assert ", untrained" in said  # learning starts at step 40
    assert "best" not in said


def test_best_is_known_without_best_json(judged: Path, tmp_path: Path) -> None:
    run = trained(small(EVALUATED), tmp_path).path
    (run / "best.json").unlink()
    weights = load(run).weights
    assert weights is not None
    assert weights.which == "best"


def test_a_new_run_names_the_weights_it_begins_with(
    judged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from qfleet.watch import make_watcher

    step = json.loads((judged / "best.json").read_text())["step"]
    train(until(small(), 30), out=tmp_path, weights_from=judged, watcher=make_watcher("plain"))
    assert f"note: begins with the best weights, step {step}, of judged" in capsys.readouterr().out


def test_a_score_of_other_weights_than_the_best_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_best = RunEvaluation.test_best

    def damaged(evaluation: RunEvaluation, stop: Any) -> Any:
        step = evaluation.train_state.best["env_steps"]  # type: ignore[index]
        flip(evaluation.run_log.folder / "checkpoints" / f"step_{step:012d}" / "model.safetensors")
        return test_best(evaluation, stop)

    monkeypatch.setattr(RunEvaluation, "test_best", damaged)
    run = trained(small(EVALUATED), tmp_path)
    (reason,) = run.status["not_exact"]
    assert reason.startswith("the best checkpoint cannot be used, the last weights were evaluated instead: ")
    assert (run.status["score"]["which"], run.status["score"]["checkpoint"]) == ("latest", run.status["env_steps"])
    assert "could not be read, the score is that of its last weights" in compare(run.path).notes[0]


def test_a_newest_checkpoint_that_is_damaged_is_named_and_passed_over(tmp_path: Path) -> None:
    run = trained(small(), tmp_path).path
    older, newest = checkpoints(run)
    flip(newest / "model.safetensors")
    with pytest.warns(CheckpointWarning, match=newest.name):
        weights = load(run, which="latest").weights
    assert weights is not None
    assert (weights.which, weights.checkpoint.path) == ("latest", older)


def test_a_best_that_was_deleted_is_an_error(judged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: Checkpoints, step: int, *, whole: bool = True) -> Any:
        raise NoCheckpointError(f"There is no checkpoint {step}.", "", "")

    monkeypatch.setattr(Checkpoints, "load", gone)
    with pytest.raises(NoCheckpointError, match="the best checkpoint of judged cannot be used: There is no checkpoint"):
        load(judged)
