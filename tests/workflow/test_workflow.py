import json
from pathlib import Path

import msgspec
import pytest

from qfleet.api import train
from qfleet.cli import main
from qfleet.errors import UsageError
from qfleet.plan.compose import compose
from qfleet.workflow.inputs import weights_hash
from qfleet.workflow.plan import read_workflow
from qfleet.workflow.stages import run_workflow
from tests.support.recorded import make_dataset
from tests.workflow.workflows import PLAN, write

ROOT = Path(__file__).parents[2]


def test_a_workflow_ends_with_a_report_and_is_not_done_twice(tmp_path: Path) -> None:
    plan = read_workflow(write(tmp_path))
    first = run_workflow(plan, tmp_path / "out")
    assert first["state"] == "done"
    assert first["test"]["episodes"] == 4
    assert [stage["stage"] for stage in first["stages"]] == ["collect", "validate", "prepare", "learn", "judge"]
    assert not any(stage["skipped"] for stage in first["stages"])
    second = run_workflow(plan, tmp_path / "out")
    assert [stage["skipped"] for stage in second["stages"]] == [True, False, True, True, True]
    assert second["on_data"] == first["on_data"]
    assert first["on_data"]["numbers"]["fitted_q"]["refused"]  # too few test episodes
    assert "it needs 20 episodes" in (tmp_path / "out/report.html").read_text()
    assert second["test"] == first["test"]
    assert second["data"]["version"] == first["data"]["version"]
    assert json.loads((tmp_path / "out/report.json").read_text())["run"] == second["run"]


def test_only_stages_with_other_inputs_are_done_again(tmp_path: Path) -> None:
    run_workflow(read_workflow(write(tmp_path)), tmp_path / "out")
    changed = PLAN.replace("until.epochs = 2", "until.epochs = 1")
    again = run_workflow(read_workflow(write(tmp_path, changed)), tmp_path / "out")
    assert [stage["skipped"] for stage in again["stages"]] == [True, False, True, False, False]


def test_the_weights_of_the_recorded_policy_are_an_input(tmp_path: Path) -> None:
    small = {"net": {"torso": {"type": "mlp", "sizes": [8]}}, "eval": {"episodes": 0, "test_episodes": 0}}
    plan = compose(file="test", tables={"env": {"id": "CartPole-v1"}, "until": {"steps": 200}, **small}).plan
    one = train(plan, out=tmp_path, name="one").path
    other = train(msgspec.structs.replace(plan, seed=plan.seed + 1), out=tmp_path, name="other").path
    assert weights_hash(one) == weights_hash(one) != weights_hash(other)
    assert weights_hash(None) == ""


def test_a_collection_that_was_killed_is_made_again(tmp_path: Path) -> None:
    plan = read_workflow(write(tmp_path))
    first = run_workflow(plan, tmp_path / "out")
    (collected,) = (tmp_path / "out").glob("collected-*")
    (collected / "manifest.json").unlink()
    again = run_workflow(plan, tmp_path / "out")
    assert [stage["skipped"] for stage in again["stages"]] == [False, False, True, True, True]
    assert again["data"] == first["data"]


def test_the_report_loads_nothing_and_escapes_what_it_shows(tmp_path: Path) -> None:
    make_dataset(tmp_path / "raw", [20] * 60, env_id="<script>alert(1)</script>")
    text = PLAN.replace("CartPole-v1", "<script>alert(1)</script>").replace(
        "[collect]\nepisodes = 60\nseed = 1", f'data = "{tmp_path / "raw"}"'
    )
    report = run_workflow(read_workflow(write(tmp_path, text)), tmp_path / "out")
    assert report["test"]["measure"] == "td_error"
    page = (tmp_path / "out/report.html").read_text()
    assert "<script" not in page
    assert "not how well the policy acts" in page


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("env = 'CartPole-v1'", "has neither `data` nor"),
        ("env = 'CartPole-v1'\ndata = 'x'\n[collect]\nepisodes = 1", "has `data` and a table"),
        ("env = 'CartPole-v1'\nlearning = 1", "is no workflow"),
        ("[collect]\nepisodes = 0", "is no workflow"),
    ],
)
def test_a_wrong_workflow_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem.replace("`", "`")):
        read_workflow(write(tmp_path, text))


def test_code_that_the_file_names_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, PLAN.replace("CartPole-v1", "own.py:Env"))
    assert main(["workflow", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "names code to run" in capsys.readouterr().err
