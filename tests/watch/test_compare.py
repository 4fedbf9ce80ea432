import json
import struct
from pathlib import Path

import numpy as np
import pytest

from qfleet.errors import UsageError
from qfleet.watch import RowLog, find_run, new_run_dir, write_json
from qfleet.watch.compare import compare, read_bounds, read_side
from qfleet.watch.plot import MOST_POINTS, aligned, plot_sides
from qfleet.watch.run_directory import find_run_or_group, member_dirs, run_label
from qfleet.watch.run_listing import list_runs, remove_run
from qfleet.watch.statistics import iqm, probability_of_improvement, stratified_bootstrap


def make_run(path: Path, score: float | None, *, seed: int = 0, env: str = "CartPole-v1", curve: float = 100.0) -> Path:
    path.mkdir(parents=True)
    (path / "run.toml").write_text(f'seed = {seed}\n[env]\nid = "{env}"\n')
    row = None if score is None else {"mean": score, "low": score - 1, "high": score + 1, "episodes": 100}
    write_json(path / "status.json", {"state": "done", "env_steps": 5000, "score": row})
    log = RowLog(path / "metrics.jsonl")
    for step in range(1000, 5001, 1000):
        log.row({"kind": "eval", "env_steps": step + seed, "mean": curve * step / 5000, "split": "validation"})
    log.row({"kind": "eval", "env_steps": 5000, "mean": -1000.0, "split": "test"})
    return path


def make_group(out: Path, name: str, scores: list[float | None], *, env: str = "CartPole-v1", unborn: int = 0) -> Path:
    group = out / name
    group.mkdir(parents=True)
    for seed, score in enumerate(scores):
        make_run(group / f"seed-{seed}", score, seed=seed, env=env)
    members = [{"name": f"seed-{seed}", "seed": seed} for seed in range(len(scores) + unborn)]
    write_json(group / "group.json", {"format": 1, "members": members})
    return group


# --- finding ---


def test_members_are_found_and_listed_with_their_group(tmp_path: Path) -> None:
    group = make_group(tmp_path, "cartpole-dqn-0001", [1.0, 2.0])
    make_run(tmp_path / "cartpole-dqn-0002", 3.0)
    assert find_run("cartpole-dqn-0001/seed-1", tmp_path) == group / "seed-1"
    assert find_run(group / "seed-1") == group / "seed-1"
    assert find_run("seed-0", tmp_path) == group / "seed-0"
    assert run_label(group / "seed-0") == "cartpole-dqn-0001/seed-0"
    names = [run["name"] for run in list_runs(tmp_path)]
    assert sorted(names) == ["cartpole-dqn-0001/seed-0", "cartpole-dqn-0001/seed-1", "cartpole-dqn-0002"]


def test_a_group_is_not_a_run(tmp_path: Path) -> None:
    group = make_group(tmp_path, "g", [1.0, 2.0])
    for name in ("g", str(group)):
        with pytest.raises(UsageError, match="is a group of runs, not a run") as caught:
            find_run(name, tmp_path)
        assert "g/seed-0, g/seed-1" in caught.value.why
        assert "qfleet compare" in caught.value.fix
    with pytest.raises(UsageError, match="is not a run directory"):
        remove_run(group)


def test_entries_are_groups_and_runs(tmp_path: Path) -> None:
    group, run = make_group(tmp_path, "cartpole-dqn-0001", [1.0]), make_run(tmp_path / "pong", 3.0)
    assert find_run_or_group("cartpole-dqn-0001", tmp_path) == group
    assert find_run_or_group("cart", tmp_path) == group
    assert find_run_or_group("p", tmp_path) == run
    assert find_run_or_group("cartpole-dqn-0001/seed-0", tmp_path) == group / "seed-0"
    assert find_run_or_group("seed", tmp_path) == group / "seed-0"
    assert find_run_or_group(group) == group
    with pytest.raises(UsageError, match="there is no run 'x'"):
        find_run_or_group("x", tmp_path)


def test_latest_is_a_member_or_its_whole_group(tmp_path: Path) -> None:
    make_run(tmp_path / "pong", 3.0)
    group = make_group(tmp_path, "g", [1.0])
    write_json(group / "seed-0" / "status.json", {"state": "running"})
    assert find_run("latest", tmp_path) == group / "seed-0"
    assert find_run_or_group("latest", tmp_path) == group


def test_names_in_a_group_file_cannot_lead_outside(tmp_path: Path) -> None:
    make_run(tmp_path / "outside", 3.0)
    group = make_group(tmp_path, "g", [1.0])
    for folder in (tmp_path, group):
        (folder / "run.toml").write_text('[env]\nid = "Trap"\n')
    names = ["../outside", "..", ".", "", "seed-0", str(tmp_path / "outside")]
    write_json(group / "group.json", {"format": 1, "members": [{"name": name} for name in names] + ["x", 3]})
    assert member_dirs(group) == [group / "seed-0"]


# --- comparing ---


def test_one_group(tmp_path: Path) -> None:
    make_group(tmp_path, "g", [1.0, 2.0, 9.0, 4.0])
    found = compare("g", out=tmp_path)
    scores = np.array([[1.0], [2.0], [9.0], [4.0]])
    assert found.envs == ("CartPole-v1",)
    assert {name: value.value for name, value in found.aggregates["g"].items()} == {
        "mean": 4.0,
        "median": 3.0,
        "iqm": 3.0,
    }
    assert found.aggregates["g"]["iqm"][1:] == stratified_bootstrap(iqm, scores)
    assert found.improvements == {}
    assert [(run.name, run.seed, run.score) for run in found.sides[0].runs][1] == ("g/seed-1", 1, 2.0)
    assert found.notes == ()


def test_sides_may_be_groups_runs_and_lists(tmp_path: Path) -> None:
    make_group(tmp_path, "a", [1.0, 2.0, 3.0])
    make_group(tmp_path, "b", [2.0, 0.0])
    make_run(tmp_path / "c1", 5.0)
    make_run(tmp_path / "c2", 6.0)
    found = compare("a", "b", "c1, c2", out=tmp_path)
    assert [side.name for side in found.sides] == ["a", "b", "c1,c2"]
    a, b = np.array([[1.0], [2.0], [3.0]]), np.array([[2.0], [0.0]])
    assert found.improvements["a", "b"].value == 4.5 / 6
    assert found.improvements["a", "b"][1:] == stratified_bootstrap(probability_of_improvement, a, b)
    assert found.improvements["a", "c1,c2"].value == 0.0
    assert list(found.improvements) == [("a", "b"), ("a", "c1,c2"), ("b", "c1,c2")]


def test_a_comparison_as_json_data(tmp_path: Path) -> None:
    make_group(tmp_path, "a", [1.0, 2.0])
    make_run(tmp_path / "b", 1.5)
    found = json.loads(json.dumps(compare("a", "b", out=tmp_path, threshold=2.0).as_dict()))
    assert found["sides"][0]["optimality_gap"]["value"] == 0.5
    assert found["sides"][0]["runs"][0]["path"] == str(tmp_path / "a" / "seed-0")
    assert found["sides"][1]["iqm"] == {"value": 1.5, "low": None, "high": None}
    assert found["improvements"] == [{"a": "a", "b": "b", "value": 0.5, "low": None, "high": None}]


def test_one_seed_has_no_interval_and_a_note(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 1.0)
    make_group(tmp_path, "b", [1.0, 2.0])
    found = compare("a", "b", out=tmp_path)
    assert found.aggregates["a"]["mean"] == (1.0, None, None)
    assert found.aggregates["b"]["mean"].low is not None
    assert found.notes == ("no interval for a: one seed does not show the spread of others; train more with --seeds",)


def test_members_without_a_score_are_named_and_not_counted(tmp_path: Path) -> None:
    make_group(tmp_path, "a", [1.0, None, 3.0], unborn=1)
    found = compare("a", out=tmp_path)
    assert len(found.sides[0].runs) == 2
    assert found.notes == ("a: not counted, no score yet: a/seed-1, a/seed-3",)


def test_several_environments_are_strata_between_bounds(tmp_path: Path) -> None:
    make_group(tmp_path, "a-cart", [100.0, 300.0])
    make_group(tmp_path, "a-pong", [0.0, 21.0], env="Pong")
    make_group(tmp_path, "b-pong", [-21.0], env="Pong")
    make_group(tmp_path, "b-cart", [500.0])
    bounds = {"CartPole-v1": (0.0, 500.0), "Pong": (-21.0, 21.0), "Other": (0.0, 1.0)}
    found = compare("a-cart,a-pong", "b-pong,b-cart", out=tmp_path, normalize=bounds)
    assert found.envs == ("CartPole-v1", "Pong")
    assert found.sides[0].scores(bounds).tolist() == [[0.2, 0.5], [0.6, 1.0]]
    assert found.aggregates["a-cart,a-pong"]["median"].value == pytest.approx((0.4 + 0.75) / 2)
    assert found.improvements["a-cart,a-pong", "b-pong,b-cart"].value == 0.5


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (["a", "nothing"], "there is no run 'nothing'"),
        (["a", "unscored"], "unscored has no score"),
        (["a", "pong"], "a and pong were not tested in the same environments"),
        (["a,pong"], "a,pong does not have the same number of scored runs in each environment"),
        (["alone,pong"], "scores of 2 environments cannot be averaged as they are"),
        (["a,a/seed-0"], "a/seed-0 is on one side twice"),
        (["a", "a"], "a is compared with itself"),
        ([","], "names nothing to compare"),
        (["unborn"], "no member of unborn has a score"),
        ([], "there is nothing to compare"),
    ],
)
def test_incomparable_sides_are_refused(tmp_path: Path, sides: list[str], message: str) -> None:
    make_group(tmp_path, "a", [1.0, 2.0])
    make_group(tmp_path, "unborn", [], unborn=2)
    make_run(tmp_path / "unscored", None)
    make_run(tmp_path / "alone", 1.0)
    make_run(tmp_path / "pong", 1.0, env="Pong")
    with pytest.raises(UsageError) as caught:
        compare(*sides, out=tmp_path)
    assert message in caught.value.what
    assert caught.value.why
    assert caught.value.fix


def test_bounds_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "bounds.toml"
    file.write_text('["CartPole-v1"]\nlow = 9\nhigh = 500.0\n["ALE/Pong-v5"]\nlow = -21\nhigh = 21\n')
    assert read_bounds(file) == {"CartPole-v1": (9.0, 500.0), "ALE/Pong-v5": (-21.0, 21.0)}
    for text in ('["x"]\nlow = 1\n', '["x"]\nlow = 1\nhigh = 1\n', "x = 3\n", '["x"]\nlow = "a"\nhigh = 2\n'):
        file.write_text(text)
        with pytest.raises(UsageError, match="has no bounds"):
            read_bounds(file)
    make_run(tmp_path / "r", 1.0)
    with pytest.raises(UsageError, match="the bounds lack CartPole-v1"):
        compare("r", out=tmp_path, normalize={"Other": (0.0, 1.0)})


def test_a_side_has_the_scores_on_test_episodes(tmp_path: Path) -> None:
    make_run(tmp_path / "r", 7.0, seed=3)
    (run,) = read_side("r", tmp_path).runs
    assert (run.score, run.low, run.high, run.seed, run.env) == (7.0, 6.0, 8.0, 3, "CartPole-v1")


# --- the picture ---


def test_curves_meet_at_common_steps() -> None:
    steps, values = aligned([([1000, 2000, 3000], [1, 2, 3]), ([1004, 2003], [10, 20]), ([998, 2001, 3007], [5, 6, 7])])
    assert steps.tolist() == [1004, 2003, 3007]
    assert values.tolist() == [[1, 2, 3], [10, 20, 20], [5, 6, 7]]  # the one that ended early keeps its last


def test_a_curve_begins_where_all_have_begun() -> None:
    steps, values = aligned([([100, 200, 300], [1, 2, 3]), ([300], [10])])
    assert steps.tolist() == [300]
    assert values.tolist() == [[3], [10]]


def test_long_curves_are_thinned() -> None:
    many = list(map(float, range(1, 5001)))
    steps, values = aligned([(many, many)])
    assert len(steps) == MOST_POINTS
    assert (steps[0], steps[-1]) == (1.0, 5000.0)
    assert (values[0] == steps).all()


def test_a_picture_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpl = pytest.importorskip("matplotlib")
    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    make_group(tmp_path, "a", [1.0, 2.0, 3.0])
    make_run(tmp_path / "b", 3.0)
    make_run(tmp_path / "p", 3.0, env="Pong")
    sides = {name: read_side(name, tmp_path) for name in ("a", "b", "p")}
    paths = {name: [run.path for run in side.runs] for name, side in sides.items()}
    data = plot_sides({"a": paths["a"], "b": paths["b"]}, tmp_path / "x.png").read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1000, 600)
    text = plot_sides(paths, tmp_path / "x.svg").read_text()
    for part in ("CartPole-v1", "Pong", "a (IQM of 3 runs, 95 % interval)", "b (1 run)", "return"):
        assert f">{part}<" in text, part
    empty = new_run_dir(tmp_path, "CartPole-v1", "empty")
    (empty / "metrics.jsonl").write_text('{"kind": "progress", "env_steps": 1}\n')
    with pytest.raises(UsageError, match="cannot be drawn"):
        plot_sides({"empty": [empty]}, tmp_path / "x.png")


def test_a_comma_in_a_path_is_no_list(tmp_path: Path) -> None:
    group = make_group(tmp_path / "a,b", "g", [1.0, 2.0])
    assert compare(group).aggregates["g"]["mean"].value == 1.5
    assert compare(f"{group}", group / "seed-1").sides[1].name == "g/seed-1"
