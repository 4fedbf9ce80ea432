import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qfleet.errors import StorageError, UsageError
from qfleet.watch import RowLog, find_run, new_run_dir, write_json
from qfleet.watch.card import write_card
from qfleet.watch.new_run_dir import next_name
from qfleet.watch.run_directory import find_run_or_group
from qfleet.watch.run_listing import diff_runs, list_runs, remove_group, remove_run, show_run

PLAN = 'seed = 3\n[env]\nid = "CartPole-v1"\n[algo]\nn_step = 3\n[algo.rule]\ntype = "double"\n'


def make_run(out: Path, name: str, *, state: str = "done", age: float = 0.0, plan: str = PLAN) -> Path:
    path = new_run_dir(out, "CartPole-v1", name)
    (path / "run.toml").write_text(plan)
    score = {"mean": 499.0, "low": 497.0, "high": 500.0, "median": 500.0, "iqm": 500.0, "episodes": 100}
    write_json(path / "status.json", {"state": state, "env_steps": 5000, "updates": 600, "score": score})
    write_json(path / "best.json", {"mean": 498.0, "step": 4000})
    moment = (path / "status.json").stat().st_mtime - age
    os.utime(path / "status.json", (moment, moment))
    return path


def test_numbers_go_up(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    assert new_run_dir(out, "CartPole-v1").name == "cartpole-dqn-0001"
    assert new_run_dir(out, "CartPole-v1").name == "cartpole-dqn-0002"
    (out / "cartpole-dqn-0041").mkdir()
    assert new_run_dir(out, "CartPole-v1").name == "cartpole-dqn-0042"
    assert new_run_dir(out, "CartPole-v1", next_name("CartPole-v1", "per")).name == "cartpole-per-0001"
    assert new_run_dir(out, "CartPole-v1", "sweep-#").name == "sweep-0001"
    assert new_run_dir(out, "CartPole-v1", "sweep-#").name == "sweep-0002"


@pytest.mark.parametrize(
    ("env_id", "stem"),
    [
        ("ALE/Pong-v5", "pong"),
        ("MinAtar/Breakout-v1", "minatar-breakout"),
        ("worlds/maze.py:Maze", "maze"),
        ("pkg:My_World-v0", "my-world"),
        ("../../etc", "etc"),
        ("::", "run"),
    ],
)
def test_names_from_environments(tmp_path: Path, env_id: str, stem: str) -> None:
    path = new_run_dir(tmp_path, env_id)
    assert path == tmp_path / f"{stem}-dqn-0001"


def test_many_at_once_never_share_a_directory(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: new_run_dir(tmp_path, "CartPole-v1"), range(40)))
    assert len(set(paths)) == 40


@pytest.mark.parametrize(
    "name",
    ["", "..", ".", ".x", "-x", "a/b", "../a", "a b", "a\n", "x" * 101, "latest", "ä", "-#", "#", "../a-#", "a#"],
)
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        new_run_dir(tmp_path, "CartPole-v1", name)
    assert repr(name) in caught.value.what
    assert caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    new_run_dir(tmp_path, "CartPole-v1", "mine")
    with pytest.raises(UsageError, match="already a run called 'mine'"):
        new_run_dir(tmp_path, "CartPole-v1", "mine")


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(StorageError, match="cannot make a run directory"):
        new_run_dir(tmp_path / "runs", "CartPole-v1")


def test_finding(tmp_path: Path) -> None:
    old = make_run(tmp_path, "cartpole-dqn-0001", age=50)
    new = make_run(tmp_path, "cartpole-dqn-0002", age=10)
    other = make_run(tmp_path, "pong", age=90)
    assert find_run("cartpole-dqn-0001", tmp_path) == old
    assert find_run("latest", tmp_path) == new
    assert find_run("po", tmp_path) == other
    assert find_run(str(old), "elsewhere") == old
    assert find_run(old, "elsewhere") == old


def test_a_whole_name_wins_over_longer_ones(tmp_path: Path) -> None:
    make_run(tmp_path, "pong-2")
    assert find_run("pong", tmp_path).name == "pong-2"
    make_run(tmp_path, "pong")
    assert find_run("pong", tmp_path).name == "pong"


def test_not_finding(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run in"):
        find_run("latest", tmp_path)
    make_run(tmp_path, "cartpole-dqn-0001")
    make_run(tmp_path, "cartpole-dqn-0002")
    with pytest.raises(UsageError) as caught:
        find_run("cartpol-dqn-0001", tmp_path)
    assert "cartpole-dqn-0001" in caught.value.why
    with pytest.raises(UsageError) as caught:
        find_run("cart", tmp_path)
    assert caught.value.what == "'cart' could be 2 runs"
    assert "cartpole-dqn-0001, cartpole-dqn-0002" in caught.value.why


@pytest.mark.parametrize("find", [find_run, find_run_or_group])
def test_a_run_without_its_plan_is_reported(find: Any, tmp_path: Path) -> None:
    (make_run(tmp_path, "pong") / "run.toml").unlink()
    for name in ("pong", tmp_path / "pong"):
        with pytest.raises(UsageError, match=r"pong has no run\.toml") as caught:
            find(name, tmp_path)
        assert "put run.toml back" in caught.value.fix


def test_the_resume_command_names_the_current_path(tmp_path: Path) -> None:
    old = make_run(tmp_path, "pong")
    write_json(old / "status.json", {"state": "interrupted", "resume": f"qfleet resume {old}"})
    new = shutil.copytree(old, tmp_path / "my copies" / "pong")
    assert show_run(old)["status"]["resume"] == f"qfleet resume {old}"
    assert show_run(new)["status"]["resume"] == f"qfleet resume '{new}'"


@pytest.mark.parametrize("name", ["..", ".", "", "a/../b", "nothing\0here", "x" * 300])
def test_names_that_lead_nowhere(tmp_path: Path, name: str) -> None:
    make_run(tmp_path, "a")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError):
        find_run(name, tmp_path / "out")


def test_listing(tmp_path: Path) -> None:
    make_run(tmp_path, "older", age=100)
    make_run(tmp_path, "newer")
    broken = make_run(tmp_path, "oldest", age=200)
    (broken / "run.toml").write_text("= not toml")
    (tmp_path / "not-a-run").mkdir()
    rows = list_runs(tmp_path)
    assert [row["name"] for row in rows] == ["newer", "older", "oldest"]
    assert {key: rows[1][key] for key in ("env", "state", "steps", "best", "score")} == {
        "env": "CartPole-v1",
        "state": "done",
        "steps": 5000,
        "best": 498.0,
        "score": 499.0,
    }
    assert 99 < rows[1]["age_seconds"] < 200
    assert rows[2]["env"] == "?"
    assert list_runs(tmp_path / "none") == []


def test_running_means_that_a_process_holds_the_lock(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a", state="running")
    assert list_runs(tmp_path)[0]["state"] == "killed"
    with open(path / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert list_runs(tmp_path)[0]["state"] == "running"
    assert list_runs(tmp_path)[0]["state"] == "killed"


@pytest.mark.timeout(20)
def test_a_pipe_instead_of_the_lock_does_not_block(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a", state="running")
    os.mkfifo(path / "run.lock")
    assert list_runs(tmp_path)[0]["state"] == "killed"


def test_a_new_runs_name_is_safe_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[list[str]] = []

    def watched(file: int) -> None:
        assert os.path.samestat(os.fstat(file), os.stat(tmp_path / "runs"))
        synced.append(os.listdir(tmp_path / "runs"))

    monkeypatch.setattr(os, "fsync", watched)
    path = new_run_dir(tmp_path / "runs", "CartPole-v1")
    assert synced == [[path.name]]


def test_removing(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a")
    with open(path / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="is in use"):
            remove_run(path)
        assert (path / "run.toml").exists()
    remove_run(path)
    assert not path.exists()


def test_removing_only_runs(tmp_path: Path) -> None:
    (tmp_path / "holiday-pictures").mkdir()
    run = make_run(tmp_path, "a")
    (tmp_path / "link").symlink_to(run)
    for path in (tmp_path / "holiday-pictures", tmp_path, tmp_path / "link", tmp_path / "none"):
        with pytest.raises(UsageError, match="is not a run directory"):
            remove_run(path)
    assert (run / "run.toml").exists()


def test_removing_does_not_follow_links(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    run = make_run(tmp_path / "runs", "a")
    (run / "link").symlink_to(precious)
    remove_run(run)
    assert (precious / "file").read_text() == "keep"


def test_showing(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a")
    log = RowLog(path / "metrics.jsonl")
    log.row({"kind": "eval", "env_steps": 1, "mean": 5.0})
    log.row({"kind": "eval", "env_steps": 2, "mean": 6.0, "split": "validation"})
    log.row({"kind": "eval", "env_steps": 2, "mean": 7.0, "split": "test"})
    step = path / "checkpoints" / "step_000000005000"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    (path / "checkpoints" / "step_000000006000").mkdir()
    before = show_run(path)["bytes"]
    os.link(step / "manifest.json", path / "same")
    run = show_run(path)
    assert run["checkpoints"] == ["step_000000005000"]
    assert run["last_eval"]["mean"] == 6.0
    assert run["plan"]["algo"]["n_step"] == 3
    assert run["bytes"] == before


def test_differences(tmp_path: Path) -> None:
    a = make_run(tmp_path, "a")
    b = make_run(tmp_path, "b", plan=PLAN.replace("n_step = 3", "n_step = 5\nloss = 'mse'").replace("seed = 3\n", ""))
    assert diff_runs(a, b) == [("seed", 3, None), ("algo.n_step", 3, 5), ("algo.loss", None, "mse")]
    assert diff_runs(a, a) == []
    with pytest.raises(UsageError, match="there is no plan file"):
        diff_runs(a, tmp_path)


def test_the_card(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a-b")
    write_json(path / "provenance.json", {"versions": {"torch": "2.13.0"}})
    text = write_card(path).read_text()
    assert "CartPole-v1, done after 5,000 steps." in text
    assert "| test | 499.0 | 497.0 | 500.0 | 500.0 | 500.0 | 100 |" in text
    assert "| `algo.n_step` | 3 |" in text
    assert "| torch | 2.13.0 |" in text
    assert "qfleet resume a-b" in text


def make_group(out: Path, name: str) -> Path:
    for seed in (0, 1):
        make_run(out / name, f"seed-{seed}")
    write_json(out / name / "group.json", {"members": [{"name": "seed-0"}, {"name": "seed-1"}, {"name": "seed-2"}]})
    return out / name


def test_a_group_is_removed_with_its_runs(tmp_path: Path) -> None:
    group = make_group(tmp_path, "pair")
    remove_group(group)
    assert list(tmp_path.iterdir()) == []


def test_a_group_without_runs_is_removed(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    write_json(tmp_path / "none" / "group.json", {"members": [{"name": "seed-0"}]})
    remove_group(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("held", ["", "seed-1"])
def test_a_group_in_use_loses_no_run(tmp_path: Path, held: str) -> None:
    group = make_group(tmp_path, "pair")
    with open(group / held / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="is in use"):
            remove_group(group)
    assert (group / "seed-0" / "run.toml").exists()


def test_other_folders_are_not_removed_as_groups(tmp_path: Path) -> None:
    run, group = make_run(tmp_path, "run"), make_group(tmp_path, "pair")
    (tmp_path / "link").symlink_to(group)
    for path in (run, tmp_path / "link"):
        with pytest.raises(UsageError, match="is not the directory of a group"):
            remove_group(path)
    assert run.exists()
    assert (group / "seed-0").exists()
