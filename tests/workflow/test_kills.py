"""kill -9 in the middle of each stage, and Ctrl-C: started again, a workflow ends as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qfleet.workflow.inputs import weights_hash
from qfleet.workflow.plan import read_workflow
from qfleet.workflow.stages import run_workflow
from tests.workflow.workflows import PLAN, csv_plan, run, skipped, write

ROOT = Path(__file__).parents[2]
BEFORE = {"collect": 0, "import": 0, "prepare": 2, "learn": 3, "judge": 4}  # stages that were done


def results(report: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on interruptions."""
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in report["validation"]]
    same = {name: report[name] for name in ("test", "on_data", "first_parameters", "decisions")}
    return {**same, "validation": rows, "version": report["data"]["version"], "weights": weights_of(report)}


def weights_of(report: dict[str, Any]) -> str:
    return weights_hash(Path(report["run_folder"]))


def die(place: Path, stage: str) -> int:
    words = [sys.executable, "-m", "tests.workflow.killed", str(place / "plan.toml"), str(place / "out"), stage]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, timeout=120, check=False)
    return done.returncode


@pytest.mark.parametrize(
    "stage",
    [
        "learn",
        "import",
        pytest.param("collect", marks=pytest.mark.slow),
        pytest.param("prepare", marks=pytest.mark.slow),
        pytest.param("judge", marks=pytest.mark.slow),
    ],
)
def test_a_stage_that_was_killed_ends_as_the_unbroken_one(tmp_path: Path, stage: str) -> None:
    """The same versions of data sets, rows and weights."""
    text = csv_plan(tmp_path) if stage == "import" else PLAN
    unbroken = run(tmp_path, text, "unbroken")
    assert die(tmp_path, stage) == -signal.SIGKILL
    assert not (tmp_path / "out/report.json").exists()
    again = run(tmp_path, text)
    done = [each != "validate" and at < BEFORE[stage] for at, each in enumerate(stage_names(again))]
    assert skipped(again) == done
    assert results(again) == results(unbroken)


def stage_names(report: dict[str, Any]) -> list[str]:
    return [stage["stage"] for stage in report["stages"]]


def start(plan: Path, out: Path) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "qfleet", "workflow", str(plan), "--out", str(out)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_while_learning_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    plan = write(tmp_path, PLAN.replace("until.epochs = 2", "until.epochs = 60"))
    unbroken = run_workflow(read_workflow(plan), tmp_path / "unbroken")
    process = start(plan, tmp_path / "out")
    until = time.monotonic() + 60
    while not list((tmp_path / "out").glob("learned-*/metrics.jsonl")):
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert '"reason": "stopped by SIGINT"' in (tmp_path / "out/report.json").read_text()
    page = (tmp_path / "out/report.html").read_text()
    assert "The same command goes on where it was stopped" in page
    again = run_workflow(read_workflow(plan), tmp_path / "out")
    assert results(again) == results(unbroken)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_in_another_stage_ends_with_130(tmp_path: Path) -> None:
    plan = write(tmp_path, PLAN.replace("episodes = 60", "episodes = 100_000"))
    process = start(plan, tmp_path / "out")
    until = time.monotonic() + 60
    while not list((tmp_path / "out").glob("workflow.lock")):
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "the same command goes on" in output
    assert not list((tmp_path / "out").glob("*/manifest.json"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_workflow_that_is_killed_again_and_again_ends_as_the_unbroken_one(tmp_path: Path) -> None:
    """The command and all that it has started, at random times."""
    plan = write(tmp_path, PLAN.replace("until.epochs = 2", "until.epochs = 20"))
    unbroken = run_workflow(read_workflow(plan), tmp_path / "unbroken")
    draw = random.Random(7)
    for _ in range(6):
        process = start(plan, tmp_path / "out")
        time.sleep(draw.uniform(2.0, 6.0))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    time.sleep(1.0)  # what it has started ends with it
    again = run_workflow(read_workflow(plan), tmp_path / "out")
    assert results(again) == results(unbroken)
