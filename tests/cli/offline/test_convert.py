from pathlib import Path

import pytest

from qfleet.cli import main
from qfleet.datasets.format import open_dataset


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("format", ["minari", "rllib"])
def test_export_and_import_find_the_same_episodes(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "collect", "CartPole-v1", "raw", "--episodes", "5"]) == 0
    assert main(["data", "export", "raw", "there", "--format", format]) == 0
    assert "note: splits and hashes are not part of" in capsys.readouterr().err
    assert main(["data", "import", "there", "back"]) == 0
    hashes = [[row.hash for row in open_dataset(name).index] for name in ("raw", "back")]
    assert hashes[0] == hashes[1]
    assert main(["data", "export", "raw", "there", "--format", format]) == 2
    assert "holds a data set already" in capsys.readouterr().err


def test_a_csv_file_is_imported_with_a_mapping(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "logs.csv").write_text("x,y,action,r,terminated\n1,2,0,1,0\n3,4,1,1,1\n")
    names = ["--column", "reward=r", "--column", "obs=x,y"]
    assert main(["data", "import", "logs.csv", "logs", *names, "--env", "Logs-v0", "--actions", "2"]) == 0
    assert "Logs-v0 · 1 episodes · 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--column", "reward"], "--column reward is not valid"),
        (["--column", "price=r"], "--column price=r is not valid"),
        (["--actions", "two"], "--actions two is not valid"),
        (["--format", "minari", "--actions", "2"], "do not go with a data set of Minari"),
    ],
)
def test_wrong_arguments_have_exit_code_2(
    arguments: list[str], problem: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "logs.csv").write_text("obs,action,r,terminated\n1,0,1,1\n")
    assert main(["data", "import", "logs.csv", "logs", *arguments]) == 2
    assert problem in capsys.readouterr().err
