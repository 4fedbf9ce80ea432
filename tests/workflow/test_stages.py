"""Which stages are done, skipped, refused or begun again, and what the report says about them."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qfleet.api import load, resume, train
from qfleet.cli import main
from qfleet.datasets.format import open_dataset
from qfleet.datasets.prepare import PreparePlan, parse_split, prepare_dataset
from qfleet.datasets.storage import LocalFolder
from qfleet.errors import QfleetError, StorageError, UsageError
from qfleet.files import list_inside
from qfleet.plan.compose import compose
from qfleet.save.lock import hold_run
from qfleet.training.evaluation.held_out import HeldOutEvaluator
from qfleet.workflow import stages
from qfleet.workflow.learning import decisions, first_parameters
from tests.support.recorded import make_dataset
from tests.workflow.workflows import PLAN, csv_plan, given, run, skipped


def names(report: dict[str, Any]) -> list[str]:
    return [stage["stage"] for stage in report["stages"]]


def test_a_file_of_logs_becomes_a_policy(tmp_path: Path) -> None:
    """No simulator: rows of a CSV file. Action 1 is paid, so the policy takes it."""
    report = run(tmp_path, csv_plan(tmp_path))
    assert names(report) == ["import", "validate", "prepare", "learn", "judge"]
    assert report["data"]["episodes"] == 120
    assert report["test"]["measure"] == "td_error"
    policy = load(tmp_path / "out" / report["run"]).policy
    states = np.array([[x, y] for x in range(-3, 4) for y in range(3)], np.float32)
    assert all(policy.predict(state)[0] == 1 for state in states)
    again = run(tmp_path, csv_plan(tmp_path))
    assert skipped(again) == [True, False, True, True, True]
    with (tmp_path / "logs.csv").open("a") as file:
        file.write("last,0,0,1,1.0,1,1,0\n")
    text = (tmp_path / "plan.toml").read_text()
    changed = run(tmp_path, text)
    assert skipped(changed) == [False, False, False, False, False]
    assert changed["data"]["episodes"] == 121


def test_a_data_set_that_is_split_is_used_as_it_is(tmp_path: Path) -> None:
    make_dataset(tmp_path / "raw", [20] * 60)
    prepare_dataset(open_dataset(str(tmp_path / "raw")), str(tmp_path / "ready"), PreparePlan(parse_split("80/10/10")))
    text = f'env = "Logs-v0"\ndata = "{tmp_path / "ready"}"\n' + PLAN[PLAN.index("[learn]") :]
    report = run(tmp_path, text)
    assert names(report) == ["open", "validate", "learn", "judge"]
    assert report["data"]["version"] == open_dataset(str(tmp_path / "ready")).version
    other = run(tmp_path, text, prepare__split="50/25/25")
    assert names(other) == ["open", "validate", "prepare", "learn", "judge"]
    assert other["data"]["source"] == report["data"]["version"]


def test_strata_keys_and_engines_are_those_of_data_prepare(tmp_path: Path) -> None:
    ids = [row.id for row in make_dataset(tmp_path / "raw", [20] * 60).index]
    (tmp_path / "sites.csv").write_text("id,key\n" + "".join(f"{id},{n % 3}\n" for n, id in enumerate(ids)))
    prepare = f'[prepare]\nstrata = "key"\nkeys = "{tmp_path / "sites.csv"}"\njobs = 1\n'
    text = f'env = "Logs-v0"\ndata = "{tmp_path / "raw"}"\n{prepare}' + PLAN[PLAN.index("[learn]") :]
    first = run(tmp_path, text)
    made = open_dataset(str(next((tmp_path / "out").glob("prepared-*"))))
    assert made.manifest.settings["strata"] == "key"
    assert skipped(run(tmp_path, text, prepare__jobs="2"))[2]  # who does the work changes nothing
    (tmp_path / "sites.csv").write_text("id,key\n" + "".join(f"{id},{n % 2}\n" for n, id in enumerate(ids)))
    changed = run(tmp_path, text)
    assert not skipped(changed)[2]
    assert changed["data"]["version"] != first["data"]["version"]


def test_another_version_of_qfleet_learns_anew_from_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    monkeypatch.setattr(stages, "version", lambda name: "99.0")
    assert skipped(run(tmp_path)) == [True, False, True, False, False]


def test_settings_of_the_command_line_change_only_their_stage(tmp_path: Path) -> None:
    first = run(tmp_path)
    again = run(tmp_path, judge__epsilon="0.2")
    assert skipped(again) == [True, False, True, True, False]
    assert again["on_data"]["epsilon"] == 0.2
    other = run(tmp_path, learn__seed="5")
    assert skipped(other) == [True, False, True, False, False]
    assert other["first_parameters"] != first["first_parameters"]
    assert skipped(run(tmp_path, collect__episodes="61")) == [False, False, False, False, False]


def test_the_same_settings_in_other_words_are_the_same_run(tmp_path: Path) -> None:
    run(tmp_path)
    assert skipped(run(tmp_path, learn__until__epochs="2")) == [True, False, True, True, True]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"learn__algo__n_steps": "3"}, "algo.n_steps"),
        ({"learn__runtime__type": "processes", "learn__actors__num": "2"}, "actors.num"),
        ({"learn__replay__path": "elsewhere"}, "sets learn.replay.path"),
        ({"learn__env__id": "Acrobot-v1"}, "sets learn.env.id"),
        ({"learn__preset": "nothing"}, "nothing"),
        ({"collect__policy": "nobody"}, "nobody"),
        ({"prepare__split": "50/50"}, "is no split"),
        ({"prepare__group": "moon"}, "group"),
        ({"prepare__strata": "return:0"}, "strata"),
        ({"prepare__strata": "key"}, "--keys FILE goes with"),
        ({"prepare__file_bytes": "5"}, "--file-bytes 5 is not possible"),
        ({"collect__episodes": "0"}, "episodes"),
        ({"collect__episodes__more": "1"}, "no table of a stage"),
        ({"collect__episodes": "10000000000"}, "episodes"),
        ({"judge__updates": "1e30"}, "updates"),
        ({"judge__epsilon": "nan"}, "epsilon"),
    ],
)
def test_a_mistake_in_any_stage_is_refused_before_the_first(
    tmp_path: Path, settings: dict[str, str], text: str
) -> None:
    with pytest.raises(UsageError) as raised:
        run(tmp_path, **settings)
    assert text in f"{raised.value.what} {raised.value.why}"
    assert not (tmp_path / "out").exists()


def test_the_test_split_is_read_only_after_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a data set: the files of the test split are opened once for the final score, and once to judge."""
    read = LocalFolder.read
    opened: list[str] = []

    def note(place: LocalFolder, name: str, max_bytes: int) -> bytes:
        opened.extend(split for split in ("train", "validation", "test") if split in name)
        return read(place, name, max_bytes)

    test = HeldOutEvaluator.test

    def note_test(evaluator: HeldOutEvaluator, *args: Any, **more: Any) -> Any:
        opened.append("FINAL")
        return test(evaluator, *args, **more)

    monkeypatch.setattr(LocalFolder, "read", note)
    monkeypatch.setattr(HeldOutEvaluator, "test", note_test)
    report = run(tmp_path, csv_plan(tmp_path))
    assert report["test"]["episodes"] == 10
    before, after = opened[: opened.index("FINAL")], opened[opened.index("FINAL") :]
    assert "train" in before
    assert "validation" in before
    assert "test" not in before
    assert set(after) == {"FINAL", "test"}
    assert after.count("FINAL") == 1


def test_a_second_workflow_in_one_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(tmp_path)
    (tmp_path / "out").mkdir()
    with hold_run(tmp_path / "out", stages.LOCKED):
        assert main(["workflow", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out")]) == 5
    shown = capsys.readouterr().err
    assert f"The workflow {tmp_path / 'out'} is being written by process" in shown
    assert "another folder with --out" in shown
    assert list_inside(tmp_path / "out") == []


def test_a_damaged_data_set_of_a_stage_is_found(tmp_path: Path) -> None:
    run(tmp_path)
    (file,) = (tmp_path / "out").glob("collected-*/data/*.parquet")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(StorageError, match="Remove the folder"):
        run(tmp_path)
    shutil.rmtree(file.parents[1])
    assert skipped(run(tmp_path)) == [False, False, True, True, True]


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    first = run(tmp_path)
    folder = tmp_path / "out" / first["run"]
    shutil.rmtree(folder / "checkpoints")
    (folder / "status.json").unlink()
    again = run(tmp_path)
    assert again["test"] == first["test"]


def test_plateaus_and_the_end_are_in_the_report(tmp_path: Path) -> None:
    """A learner that learns nothing: its rate is lowered, and it stops for lack of patience."""
    steer = {"learn__steer__learning_rate__type": "plateau", "learn__steer__learning_rate__patience": "1"}
    rate = {"learn__optim__learning_rate": "1e-12", "learn__steer__learning_rate__floor": "1e-14"}
    more = {"learn__steer__stop_patience": "3", "learn__until__epochs": "50", "learn__algo__target__every_updates": "7"}
    report = run(tmp_path, csv_plan(tmp_path), **steer, **rate, **more)
    found = report["decisions"]
    assert {row["what"] for row in found} == {"go on, new best", "go on", "adjust", "stop"}
    assert "optim.learning_rate 1e-12 ->" in next(row["reason"] for row in found if row["what"] == "adjust")
    assert "steer.stop_patience=3" in found[-1]["reason"]
    page = (tmp_path / "out/report.html").read_text()
    assert "steer.stop_patience=3" in page
    assert "adjusted" in page


def test_decisions_say_which_checkpoint_is_kept() -> None:
    row = {"kind": "eval", "split": "validation", "low": 0.0, "high": 2.0}
    rows = [{**row, "env_steps": 10, "mean": 1.0}, {**row, "env_steps": 20, "mean": 0.5}]
    found = decisions(rows, {"exit_code": 0, "env_steps": 20, "reason": "reached until.steps=20"})
    assert [each["what"] for each in found] == ["go on, new best", "go on", "stop"]
    assert decisions(rows, {"state": "running"})[-1]["what"] == "go on"


def test_learners_that_began_differently_are_an_error(tmp_path: Path) -> None:
    events = [
        '{"kind":"first_parameters","sha256":"aa"}',
        '{"kind":"group_formed","updates":0,"parameters":["aa","bb"]}',
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(events) + "\n")
    fake: Any = SimpleNamespace(path=tmp_path)
    with pytest.raises(QfleetError, match="did not begin with the same parameters"):
        first_parameters(fake)
    (tmp_path / "events.jsonl").write_text("\n".join(events).replace("bb", "aa") + "\n")
    assert first_parameters(fake) == {"sha256": "aa", "learners": 2}


def test_processes_make_the_numbers_of_one_thread(tmp_path: Path) -> None:
    one = run(tmp_path)
    other = run(tmp_path, learn__runtime__type="processes")
    assert other["learning"]["runtime"] == "processes"
    assert other["run"] != one["run"]
    for name in ("test", "validation", "first_parameters"):
        assert without_clock(other[name]) == without_clock(one[name])


def without_clock(value: Any) -> Any:
    rows = value if isinstance(value, list) else [value]
    return [{name: each for name, each in row.items() if name != "seconds"} for row in rows]


def test_a_mixture_of_policies_is_collected_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of its runs are inputs: a run that learned more is collected anew."""
    small = {"net": {"torso": {"type": "mlp", "sizes": [8]}}, "eval": {"episodes": 0, "test_episodes": 0}}
    plan = compose(file="test", tables={"env": {"id": "CartPole-v1"}, "until": {"steps": 1_500}, **small}).plan
    monkeypatch.chdir(tmp_path)
    train(plan, out="runs", name="medium", progress=False)
    mixed = PLAN.replace("episodes = 60", 'steps = 900\ncut = true\npolicy = ["random:0.5", "medium,epsilon=0.1:0.5"]')
    mixed = mixed.replace("seed = 1", 'seed = 1\nruntime.type = "processes"\nactors.num = 2\nenv.num = 4')
    report = run(tmp_path, mixed)
    assert report["data"]["steps"] == 900
    assert {"random", "medium, epsilon=0.1"} <= set(report["data"]["behaviours"])
    assert skipped(run(tmp_path, mixed)) == [True, False, True, True, True]
    resume("runs/medium", steps=2_500, progress=False)
    assert skipped(run(tmp_path, mixed))[0] is False
