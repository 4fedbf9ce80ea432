import json
from pathlib import Path
from typing import Any

import pytest

import qfleet.sweep.sweep
from qfleet.cli import main
from qfleet.plan import make_plan
from qfleet.sweep.sweep import Group
from qfleet.watch import RowLog, write_json

Captured = pytest.CaptureFixture[str]


def make_group(name: str, scores: list[float | None], *, exit_code: int = 0, reason: str = "all are done") -> Path:
    group = Path("runs") / name
    for seed, score in enumerate(scores):
        folder = group / f"seed-{seed}"
        folder.mkdir(parents=True)
        (folder / "run.toml").write_text(f'seed = {seed}\n[env]\nid = "CartPole-v1"\n')
        row = None if score is None else {"mean": score, "low": score - 1, "high": score + 1}
        write_json(folder / "status.json", {"state": "done", "score": row})
        log = RowLog(folder / "metrics.jsonl")
        for step in (1000, 2000):
            log.row({"kind": "eval", "env_steps": step, "mean": step / 100})
    members = [{"name": f"seed-{seed}"} for seed in range(len(scores))]
    document = {"members": members, "exit_code": exit_code, "reason": reason, "resume": f"qfleet resume {group}"}
    write_json(group / "group.json", document)
    return group


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_one_group(capsys: Captured) -> None:
    group = make_group("g", [10.0, 10.0])
    assert main(["compare", "latest"]) == 0
    assert capsys.readouterr().out == (
        "run       seed  score [95 % of its episodes]\n"
        "g/seed-0  0     10.0 [9.00, 11.0]\n"
        "g/seed-1  1     10.0 [9.00, 11.0]\n"
        "\n"
        "CartPole-v1  runs  mean               median             IQM\n"
        "g            2     10.0 [10.0, 10.0]  10.0 [10.0, 10.0]  10.0 [10.0, 10.0]\n"
        "\n"
        "plot   runs/g/plot.png\n"
    )
    assert (group / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_two_groups(capsys: Captured) -> None:
    make_group("a", [10.0, 10.0])
    make_group("b", [5.0, 5.0])
    assert main(["compare", "a", "b", "--threshold", "7", "--file", "both.png"]) == 0
    shown = capsys.readouterr().out.splitlines()
    header, a, b = shown[6:9]
    assert header.split() == ["CartPole-v1", "runs", "mean", "median", "IQM", "gap"]
    assert a.endswith("0 [0, 0]")
    assert b.endswith("2.00 [2.00, 2.00]")
    assert shown[-3:] == ["P(a > b) = 1.00 [1.00, 1.00]", "", "plot   both.png"]
    assert Path("both.png").exists()
    assert not Path("runs/a/plot.png").exists()


def test_as_json(capsys: Captured) -> None:
    make_group("a", [10.0, 12.0])
    make_group("b", [5.0, None])
    assert main(["compare", "a", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [side["mean"]["value"] for side in found["sides"]] == [11.0, 5.0]
    assert found["improvements"][0] == {"a": "a", "b": "b", "value": 1.0, "low": None, "high": None}
    assert [note.split(":")[0] for note in found["notes"]] == ["b", "no interval for b"]
    assert found["picture"] is None


def test_bounds(capsys: Captured) -> None:
    make_group("a", [10.0, 30.0])
    Path("bounds.toml").write_text('["CartPole-v1"]\nlow = 10\nhigh = 50\n')
    assert main(["compare", "a", "--normalize", "bounds.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["normalized"], found["sides"][0]["mean"]["value"]) == (True, 0.25)


class Calls(list[tuple[Any, dict[str, Any]]]):
    """Stands in for a function of the run room: remembers its arguments, answers with a group that has ended."""

    def __init__(self, group: Path) -> None:
        self.group = group

    def __call__(self, *subject: Any, **arguments: Any) -> Group:
        self.append((subject, arguments))
        return Group(self.group)


def test_train_with_seeds_makes_a_group(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    calls = Calls(make_group("my group", [10.0, 11.0]))
    monkeypatch.setattr(qfleet.sweep.sweep, "train_group", calls)
    command = ["train", "CartPole-v1", "--seeds", "2", "--jobs", "1", "--seed", "7", "--steps", "20_000", "--name", "x"]
    assert main(command) == 0
    (subject, arguments) = calls[0]
    assert subject == (make_plan("CartPole-v1", None, {"until.steps": 20_000, "seed": 7}), 2)
    assert [arguments[key] for key in ("jobs", "out", "name", "weights_from")] == [1, "runs", "x", None]
    assert arguments["command"] == ["qfleet", *command]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("CartPole-v1: Double DQN, 5-step returns; cartpole defaults")
    assert "my group/seed-1  1     11.0 [10.0, 12.0]" in shown
    assert shown[-3:] == [
        "plot   runs/my group/plot.png",
        "group  runs/my group: all are done",
        "next   qfleet compare 'runs/my group' OTHER",
    ]


def test_a_group_that_failed_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    calls = Calls(make_group("g", [None, None], exit_code=4, reason="0 of 2 members are done"))
    monkeypatch.setattr(qfleet.sweep.sweep, "train_group", calls)
    assert main(["train", "CartPole-v1", "--seeds", "2"]) == 4
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2:] == ["group  runs/g: 0 of 2 members are done", "next   qfleet resume runs/g"]


def test_json_and_quiet_keep_standard_output(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    calls = Calls(make_group("g", [10.0, 11.0]))
    monkeypatch.setattr(qfleet.sweep.sweep, "train_group", calls)
    assert main(["train", "CartPole-v1", "--seeds", "2", "--json"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["train", "CartPole-v1", "--seeds", "2", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_resume_takes_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(make_group("g", [10.0, 11.0], exit_code=143))
    monkeypatch.setattr(qfleet.sweep.sweep, "resume_group", calls)
    assert main(["resume", "latest", "--steps", "1e5", "--jobs", "2", "--trust-env", "--quiet"]) == 143
    (subject, arguments) = calls[0]
    assert subject == (Path("runs/g"),)
    assert {key: arguments[key] for key in ("steps", "jobs", "trust_env", "strict")} == {
        "steps": 100_000,
        "jobs": 2,
        "trust_env": True,
        "strict": False,
    }


def test_dry_run_says_how_many_fit(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("qfleet.sweep.capacity.usable_cores", lambda: 3)
    assert main(["train", "CartPole-v1", "--seeds", "5", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "members     5, 3 at once" in shown
    assert main(["train", "CartPole-v1", "--seeds", "5", "--jobs", "2", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["needs"]["at_once"] == 2
    assert not Path("runs").exists()


def test_json_output_has_no_nan(capsys: Captured) -> None:
    group = make_group("a", [10.0, 12.0])
    (group / "seed-1" / "status.json").write_text('{"score": {"mean": NaN, "low": -Infinity}}')
    (group / "seed-0" / "status.json").write_text('{"score": {"mean": 10.0, "low": -Infinity, "high": NaN}}')
    assert main(["compare", "a", "--json"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(shown, parse_constant=lambda name: pytest.fail(name))
    assert [(run["score"], run["low"], run["high"]) for run in found["sides"][0]["runs"]] == [(10.0, None, None)]
    assert found["sides"][0]["missing"] == ["a/seed-1"]
    assert main(["runs", "show", "a", "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))


def test_a_run_on_two_sides_is_noted(capsys: Captured) -> None:
    make_group("a", [10.0, 12.0])
    assert main(["compare", "a", "a/seed-0"]) == 0
    assert "note: a and a/seed-0 share a/seed-0: P is closer to 0.5 than it should be" in capsys.readouterr().out


def test_a_preset_names_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(make_group("g", [10.0]))
    monkeypatch.setattr(qfleet.sweep.sweep, "train_group", calls)
    assert main(["train", "CartPole-v1", "--seeds", "1", "--preset", "rainbow-small", "--quiet"]) == 0
    assert main(["train", "CartPole-v1", "--seeds", "1", "--quiet"]) == 0
    assert [arguments["name"] for _, arguments in calls] == ["cartpole-rainbow-small-#", "cartpole-double-n5-#"]


# --- other verbs on a group ---


def test_show_a_group(capsys: Captured) -> None:
    group = make_group("g", [10.0, 11.0], reason="as played")
    assert main(["runs", "show", "g"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["reason", "as", "played"] in shown
    assert ["resume", "qfleet", "resume", "runs/g"] in shown  # where it is now, whatever the group wrote
    assert [line[0] for line in shown if line and line[0].startswith("g/")] == ["g/seed-0", "g/seed-1"]
    assert main(["runs", "show", "g", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], [run["score"] for run in found["runs"]]) == (str(group), [10.0, 11.0])


def test_remove_a_group(capsys: Captured) -> None:
    make_group("g", [10.0, 11.0])
    make_group("kept", [1.0])
    assert main(["runs", "rm", "g", "--yes"]) == 0
    assert capsys.readouterr().out == "removed runs/g\n"
    assert [path.name for path in Path("runs").iterdir()] == ["kept"]


def test_plot_a_group(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    group = make_group("g", [10.0, 11.0, None])
    (group / "seed-2" / "metrics.jsonl").unlink()
    drawn: list[list[Path]] = []

    def draw(paths: list[Path], file: Path) -> Path:
        drawn.append(paths)
        return file

    monkeypatch.setattr("qfleet.watch.plot.plot_runs", draw)
    assert main(["plot", "g"]) == 0
    assert drawn == [[group / "seed-0", group / "seed-1"]]
    assert capsys.readouterr().out == "runs/g/plot.png\n"


def test_verify_a_group(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    make_group("g", [10.0, 11.0])
    good, bad = ("step_1", True, "5 files"), ("step_2", False, "model.safetensors has another hash")
    for first, second, code in (
        ([good], [good], 0),
        ([good], [good, bad], 5),
        ([bad], [good, bad], 6),
        ([good], [], 6),
    ):
        found = {"seed-0": first, "seed-1": second}
        monkeypatch.setattr("qfleet.save.verify_run", lambda path, found=found: found[path.name])
        assert main(["verify", "g"]) == code
        shown = capsys.readouterr()
        assert shown.out.startswith("runs/g/seed-0\n")
        assert "runs/g/seed-1\n" in shown.out
        assert ("2 of 2 runs fail" in shown.err) == (first == [bad])
