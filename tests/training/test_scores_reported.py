"""What stands beside a score: episodes that were cut, how many validations it was chosen from, and the last one."""

import json
from pathlib import Path
from typing import Any

import pytest

from qfleet import load, train
from qfleet.cli import main
from qfleet.testing.toys import Random
from qfleet.training.evaluator import Evaluator
from qfleet.training.train_state import TrainState
from qfleet.watch import make_watcher
from qfleet.watch.text import end_lines, evaluation_line
from tests.support.runs import JUDGED, Settings, events, resumed, small, trained

SHORT: Settings = {**JUDGED, "until.steps": 120, "eval.max_steps": 30}


class Endless(Random):
    """One that never ends."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """A reward of 1, for ever."""
        shown, _, _, _, info = super().step(action)
        return shown, 1.0, False, False, info


def test_episodes_that_never_end_are_cut_counted_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(small(SHORT, "toys/Random-v0"), out=tmp_path, env=Endless, watcher=make_watcher("plain"))
    said = capsys.readouterr().out
    rows = [row for row in run.metrics if row["kind"] == "eval"]
    assert [(row["mean"], row["cut_episodes"]) for row in rows] == [(30.0, 3), (30.0, 3), (30.0, 4)]
    assert run.status["score"]["cut_episodes"] == 4
    assert "3 of them cut at eval.max_steps" in said
    assert "test episodes · 4 of them cut at eval.max_steps" in said
    (warning,) = [event["text"] for event in events(run.path, "warning")]
    assert "eval.max_steps=30" in warning
    row = load(run.path, env=Endless).evaluate(2)
    assert (row["cut_episodes"], row["mean"]) == (2, 30.0)


def test_episodes_that_end_are_not_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(small({**SHORT, "eval.max_steps": 500}), tmp_path)
    assert [row["cut_episodes"] for row in run.metrics if row["kind"] == "eval"] == [0, 0, 0]
    assert "cut" not in evaluation_line(run.metrics[0])
    assert main(["eval", str(run.path), "--episodes", "2"]) == 0
    assert "cut" not in capsys.readouterr().out


def test_the_command_line_says_how_many_were_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(small({**SHORT, "eval.max_steps": 5}), tmp_path)  # no CartPole falls as soon as that
    assert main(["eval", str(run.path), "--episodes", "2"]) == 0
    assert "cut: 2 episodes had not ended after eval.max_steps=5 steps" in capsys.readouterr().out
    assert main(["eval", str(run.path), "--episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cut_episodes"] == 2


def collapsing(monkeypatch: pytest.MonkeyPatch, *means: float) -> None:
    """Validations find these means, one after the other."""
    validate, left = Evaluator.validate, list(means)

    def found(evaluator: Evaluator, *args: Any, **how: Any) -> dict[str, Any] | None:
        row = validate(evaluator, *args, **how)
        mean = left.pop(0)
        return None if row is None else {**row, "mean": mean, "low": mean - 1, "high": mean + 1}

    monkeypatch.setattr(Evaluator, "validate", found)


def test_the_last_evaluation_stands_beside_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collapsing(monkeypatch, 40.0, 50.0, 11.2, 10.0)
    run = trained(small(JUDGED), tmp_path)
    score, best = run.status["score"], run.status["best"]
    assert (score["best_of"], score["last_eval"]["mean"], best["mean"]) == (3, 11.2, 50.0)
    assert (run.status["best_of"], run.status["last_eval"]["mean"]) == (3, 11.2)
    assert run.metrics[-1]["score"]["last_eval"]["mean"] == 11.2
    last, tested = score["last_eval"]["env_steps"], score["checkpoint"]
    told = f"       of the best of 3 validations, at {tested} steps; the last, at {last}: 11.2 [10.2, 12.2]"
    assert told in end_lines(run.status)
    card = (run.path / "card.md").read_text()
    assert "Best of 3 validations" in card
    assert "| last evaluation | 11.2 |" in card
    assert resumed(run, steps=320).status["best_of"] == 4  # one more at its new end


def test_a_best_that_is_the_last_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collapsing(monkeypatch, 40.0, 50.0, 60.0)
    run = trained(small(JUDGED), tmp_path)
    assert any(line.endswith("steps; which was the last one") for line in end_lines(run.status))


def test_a_run_of_an_older_version_does_not_know_how_many_there_were() -> None:
    train_state = TrainState()
    assert train_state.add_evaluation({"env_steps": 10, "episodes": 3, "mean": 5.0, "low": 4.0, "high": 6.0})
    before = {name: value for name, value in train_state.state_dict().items() if name != "evaluations"}
    train_state.load_state_dict(before)
    assert not train_state.add_evaluation({"env_steps": 20, "episodes": 3, "mean": 4.0, "low": 4.0, "high": 6.0})
    assert train_state.best_context()["best_of"] is None
