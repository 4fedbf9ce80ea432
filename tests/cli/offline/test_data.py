import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from qfleet.cli import main
from qfleet.datasets.format import open_dataset


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_verbs_from_an_environment_to_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "collect", "CartPole-v1", "raw", "--episodes", "40", "--seed", "1", "env.num=4"]) == 0
    assert "40 episodes" in capsys.readouterr().out
    assert main(["data", "inspect", "raw", "--coverage"]) == 0
    assert "different pairs of observation and action" in capsys.readouterr().out
    assert main(["data", "validate", "raw"]) == 0
    assert capsys.readouterr().out.startswith("ok: 40 episodes in 1 files")
    assert main(["data", "prepare", "raw", "ready", "--split", "50/25/25"]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", "ready", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["splits"]) == {"train", "validation", "test"}
    assert len(found["splits"]["train"]["return"]["quartiles"]) == 3
    assert main(["data", "inspect", "ready", "--plot", "data.png"]) == 0
    assert capsys.readouterr().out.endswith("plot data.png\n")
    assert Path("data.png").read_bytes()[:4] == b"\x89PNG"
    assert found["source"] == open_dataset("raw").version
    small = [
        "net.torso.type=mlp",
        "net.torso.sizes=[8]",
        "algo.batch_size=32",
        "eval.test_episodes=2",
        "eval.episodes=2",
    ]
    learn = ["replay.type=dataset", "replay.path=ready", "until.epochs=1", "--name", "run", "--quiet", *small]
    assert main(["train", "CartPole-v1", *learn]) == 0
    assert main(["data", "collect", "run", "more", "--policy", "epsilon=0.2", "--steps", "100"]) == 0
    assert open_dataset("more").manifest.settings["behaviour"] == "run, epsilon=0.2"
    assert open_dataset("more").manifest.num_steps >= 100


def test_the_same_seed_collects_the_same_version(capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main(["data", "collect", "CartPole-v1", name, "--episodes", "5", "--seed", seed]) == 0
    versions = [open_dataset(name).version for name in "abc"]
    assert versions[0] == versions[1] != versions[2]


def test_a_damaged_data_set_has_exit_code_5(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "collect", "CartPole-v1", "raw", "--episodes", "5"])
    (place / "raw/data/all-00000.parquet").write_bytes(b"PAR1")
    capsys.readouterr()
    assert main(["data", "validate", "raw"]) == 5
    assert "data/all-00000.parquet" in capsys.readouterr().out
    assert main(["data", "inspect", "nothing"]) == 5
    assert "there is no data set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["collect", "CartPole-v1", "raw"], "either --episodes or --steps must be given"),
        (["collect", "CartPole-v1", "raw", "--episodes", "5", "--policy", "greedy"], "needs the policy of a run"),
        (["collect", "CartPole-v1", "raw", "--episodes", "0"], "--episodes 0 is not valid"),
        (["inspect", "gs://bucket/raw"], "cannot be the place of a data set"),
    ],
)
def test_wrong_arguments_have_exit_code_2(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_without_pyarrow_the_command_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def no_arrow(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError("No module named 'pyarrow'")
        return real(name, *rest)

    for name in [each for each in sys.modules if each.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", no_arrow)
    assert main(["data", "collect", "CartPole-v1", "raw", "--episodes", "5"]) == 2
    shown = capsys.readouterr().err
    assert "data sets need the package pyarrow" in shown
    assert "data" in shown.rpartition("do:")[2]
