"""Wrong uses of groups and comparisons, and their exact error messages."""

# Messages stay on one line, as they are shown.
# ruff: noqa: E501

import io
from pathlib import Path
from typing import NamedTuple

import pytest

from qfleet.cli import main
from qfleet.watch import write_json


class Wrong(NamedTuple):
    """A command and the three sentences it earns."""

    command: str
    what: str
    why: str
    fix: str


WRONG = [
    Wrong(
        "train CartPole-v1 --seeds many",
        "--seeds many is not valid",
        "--seeds must be an integer of at least 1.",
        "Write for example --seeds 5",
    ),
    Wrong(
        "train CartPole-v1 --seeds 0",
        "--seeds 0 is not valid",
        "--seeds must be an integer of at least 1.",
        "Write for example --seeds 5",
    ),
    Wrong(
        "train CartPole-v1 --seeds 2 --jobs 0",
        "--jobs 0 is not valid",
        "--jobs must be an integer of at least 1.",
        "Write for example --jobs 2",
    ),
    Wrong(
        "train CartPole-v1 --jobs 2",
        "--jobs 2 has no effect",
        "Without --seeds there is one run.",
        "Leave --jobs out, or train a group: --seeds 5",
    ),
    Wrong(
        "train CartPole-v1 --seeds 2 --profile",
        "--profile needs a single run",
        "--seeds 2 trains several.",
        "Leave --profile out, or train one run with it.",
    ),
    Wrong(
        "resume pair --profile",
        "--profile needs a single run",
        "runs/pair is a group of several.",
        "Leave --profile out, or train one run with it.",
    ),
    Wrong(
        "resume one --jobs 2",
        "--jobs 2 has no effect",
        "runs/one is one run.",
        "Leave --jobs out, or train a group: --seeds 5",
    ),
    Wrong(
        "train CartPoel-v1 --seeds 2",
        "env.id='CartPoel-v1' is not a known environment.",
        "The nearest known ids are CartPole-v1, CartPole-v0, phys2d/CartPole-v1.",
        "Use a known id, module:Id for one that a module registers, or path/to/file.py:ClassName for your own.",
    ),
    Wrong(
        "train CartPole-v1 --seeds 2 --name pair",
        "there is already a run called 'pair' in runs",
        "a new run never writes into the directory of an old one",
        "choose another --name, or go on with it: qfleet resume runs/pair",
    ),
    Wrong(
        "train CartPole-v1 --seeds 2 --name latest",
        "'latest' cannot be the name of a run",
        "a name has 1 to 100 of the characters A-Z a-z 0-9 . _ -, starts with a letter or digit or _, and is not 'latest'",
        "choose another --name, for example cartpole-first-try",
    ),
    Wrong(
        "eval pair",
        "runs/pair is a group of runs, not a run",
        "its members are pair/seed-0, pair/seed-1",
        "name a member, or see all of them: qfleet compare runs/pair",
    ),
    Wrong(
        "resume strange",
        "runs/strange/group.json is not a group that this version knows",
        "It has format 7 and 0 members; format 1 is known.",
        "Restore the file from a copy, or resume the members one by one.",
    ),
    Wrong(
        "compare",
        "qfleet compare needs SIDE",
        "The argument SIDE is missing.",
        "Try: qfleet compare latest",
    ),
    Wrong(
        "compare pair pari",
        "there is no run 'pari'",
        "runs holds for example pair",
        "list them with: qfleet runs, or give the path of a run directory",
    ),
    Wrong(
        "compare pair unscored",
        "unscored has no score",
        "a run is scored on test episodes when it has reached its end, unless eval.test_episodes is 0",
        "let it come to its end: qfleet resume runs/unscored",
    ),
    Wrong(
        "compare pair pong",
        "pair and pong were not tested in the same environments",
        "pair has CartPole-v1; pong has Pong",
        "compare sides that have the same environments",
    ),
    Wrong(
        "compare pair,pong",
        "pair,pong does not have the same number of scored runs in each environment",
        "CartPole-v1 has 2, Pong has 1",
        "name as many runs of each, with commas between",
    ),
    Wrong(
        "compare one,pong",
        "scores of 2 environments cannot be averaged as they are: CartPole-v1, Pong",
        "their returns have different scales",
        "give --normalize FILE.toml with low and high for each (see docs/groups.md)",
    ),
    Wrong(
        "compare one,pong --normalize bounds.toml",
        "the bounds lack Pong",
        "each environment needs the scores that become 0 and 1",
        'add to the file: ["Pong"] and, below, low = 0.0 and high = 500.0',
    ),
    Wrong(
        "compare one --normalize wrong.toml",
        "wrong.toml: ['CartPole-v1'] has no bounds",
        "low and high must be finite numbers, and low the smaller one",
        'write: ["CartPole-v1"] and, below, low = 0.0 and high = 500.0',
    ),
    Wrong(
        "compare one --normalize none.toml",
        "there is no file none.toml",
        "it sets which scores become 0 and 1",
        "check the path after --normalize",
    ),
    Wrong(
        "compare pair --threshold high",
        "--threshold high is not valid",
        "--threshold must be a finite number.",
        "Write for example --threshold 475",
    ),
    Wrong(
        "compare pair --threshold nan",
        "--threshold nan is not valid",
        "--threshold must be a finite number.",
        "Write for example --threshold 475",
    ),
    Wrong(
        "compare pair --threshold=-inf",
        "--threshold -inf is not valid",
        "--threshold must be a finite number.",
        "Write for example --threshold 475",
    ),
    Wrong(
        "compare one --normalize endless.toml",
        "endless.toml: ['CartPole-v1'] has no bounds",
        "low and high must be finite numbers, and low the smaller one",
        'write: ["CartPole-v1"] and, below, low = 0.0 and high = 500.0',
    ),
    Wrong(
        "runs rm pair one",
        "runs/pair (a group of 2 runs), runs/one would be deleted",
        "Standard input is no terminal, so it cannot be confirmed.",
        "Add --yes to delete.",
    ),
    Wrong(
        "plot pair",
        "the group runs/pair has nothing to plot yet",
        "None of its runs has written a row.",
        "Let it train: qfleet resume runs/pair",
    ),
    Wrong(
        "compare pair,pair/seed-0",
        "pair/seed-0 is on one side twice",
        "counted twice it would look like two runs with equal scores",
        "name it once",
    ),
    Wrong(
        "compare pair pair",
        "pair is compared with itself",
        "two sides have the same name",
        "name each side once",
    ),
    Wrong(
        "compare ,",
        "',' names nothing to compare",
        "a side is a group, a run, or several of them with commas between",
        "list them with: qfleet runs",
    ),
    Wrong(
        "compare pair --file nowhere/x.png",
        "cannot draw into nowhere/x.png",
        "its folder does not exist",
        "give a name like curves.png (or .svg, .pdf) in a folder that exists",
    ),
]


def make_run(path: Path, score: float | None, env: str = "CartPole-v1") -> None:
    path.mkdir(parents=True)
    (path / "run.toml").write_text(f'seed = 0\n[env]\nid = "{env}"\n')
    write_json(path / "status.json", {"state": "done", "score": None if score is None else {"mean": score}})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pair of seeds and some runs."""
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        make_run(Path(f"runs/pair/seed-{seed}"), 10.0 + seed)
    write_json(Path("runs/pair/group.json"), {"format": 1, "members": [{"name": "seed-0"}, {"name": "seed-1"}]})
    make_run(Path("runs/one"), 12.0)
    make_run(Path("runs/unscored"), None)
    make_run(Path("runs/pong"), 20.0, "Pong")
    Path("runs/strange").mkdir()
    Path("runs/strange/group.json").write_text('{"format": 7, "members": []}')
    Path("bounds.toml").write_text('["CartPole-v1"]\nlow = 0\nhigh = 500\n')
    Path("wrong.toml").write_text('["CartPole-v1"]\nlow = 500\nhigh = 0\n')
    Path("endless.toml").write_text('["CartPole-v1"]\nlow = 0\nhigh = inf\n')
    monkeypatch.setattr("sys.stdin", io.StringIO())
    return tmp_path


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.command)
def test_wrong_use(wrong: Wrong, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.rglob("*"))

    code = main(wrong.command.split())

    assert capsys.readouterr().err == f"error: {wrong.what}\n  why: {wrong.why}\n   do: {wrong.fix}\n"
    assert code == 2
    assert sorted(place.rglob("*")) == before
