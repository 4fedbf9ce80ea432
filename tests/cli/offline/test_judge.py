import json
from pathlib import Path

import pytest

from qfleet.cli import main

SMALL = ["net.torso.type=mlp", "net.torso.sizes=[8]", "algo.batch_size=32", "eval.test_episodes=2", "eval.episodes=2"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_judged_on_recorded_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "collect", "CartPole-v1", "raw", "--episodes", "120", "--seed", "1", "env.num=4"]) == 0
    assert main(["data", "prepare", "raw", "ready", "--split", "40/10/50"]) == 0
    learn = ["replay.type=dataset", "replay.path=ready", "until.epochs=1", "--name", "run", "--quiet", *SMALL]
    assert main(["train", "CartPole-v1", *learn]) == 0
    capsys.readouterr()
    assert main(["data", "judge", "run", "ready", "--json", "--updates", "100"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["split"] == "test"
    assert 40 < found["episodes"] < 80
    numbers = found["numbers"]
    assert 0.0 < numbers["accuracy"]["value"] < 1.0
    assert numbers["accuracy"]["low"] < numbers["accuracy"]["value"] < numbers["accuracy"]["high"]
    assert numbers["recorded_return"]["value"] > 5.0
    assert len(found["calibration"]["groups"]) > 5
    assert all(each["value"] is not None or each["refused"] for each in numbers.values())
    assert main(["data", "judge", "run", "ready", "--json", "--updates", "100"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["data", "judge", "run", "ready", "--split", "validation", "--updates", "100"]) == 0
    shown = capsys.readouterr().out
    assert "refused" in shown  # there are too few validation episodes for a fit
    assert "epsilon 0.1" in shown


@pytest.mark.parametrize("arguments", [["--split", "all"], ["--epsilon", "2"], ["--split", "tests"]])
def test_wrong_arguments_have_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "judge", "missing", "ready", *arguments]) == 2
    assert "missing" in capsys.readouterr().err or arguments[1] in ("2", "tests")
