"""The example workflows and the blocks of docs/workflow.md: each reaches a score or has a property."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.api import load
from qfleet.cli import main
from qfleet.workflow.plan import read_workflow
from qfleet.workflow.stages import run_workflow
from tests.workflow.workflows import given

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/workflow.md").read_text()


def example(name: str, out: Path) -> dict[str, Any]:
    return run_workflow(read_workflow(ROOT / "examples" / name), out)


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("workflow_*.toml")), ids=lambda file: file.stem)
def test_every_example_is_a_workflow(file: Path) -> None:
    assert read_workflow(file).plan.collect is not None


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_of_cartpole_learns_from_random_play(tmp_path: Path) -> None:
    """CartPole-v1, seed 1, 1,000 random episodes: the whole interval of 100 test episodes is above 150."""
    report = example("workflow_cartpole.toml", tmp_path / "out")
    assert report["test"]["episodes"] == 100
    assert report["test"]["low"] > 150
    assert report["data"]["all"]["return"]["mean"] < 30
    assert sum(stage["seconds"] for stage in report["stages"]) < 180


def block(start: str) -> str:
    """The block of docs/workflow.md that begins with this line."""
    found = re.search(rf"```\w+\n({re.escape(start)}.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def visits(file: Path) -> None:
    """Visits of a shop: offer 1 is paid, offer 0 is not."""
    draw = np.random.default_rng(1)
    lines = ["visit,seen,spent,offer,paid,left,seen2,spent2"]
    for visit in range(200):
        spent = 0
        for seen in range(6):
            offer = int(draw.integers(2))
            after = spent + offer
            lines.append(f"{visit},{seen},{spent},{offer},{offer},{int(seen == 5)},{seen + 1},{after}")
            spent = after
    file.write_text("\n".join(lines) + "\n")


def test_the_logs_of_the_page_become_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file and the command of docs/workflow.md, with a table of visits: the policy makes the paid offer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs.toml").write_text(block("# logs.toml"))
    visits(tmp_path / "visits.csv")
    command = block("qfleet workflow logs.toml").split()[1:]
    assert main([*command, "learn.until.epochs=12", "learn.algo.target.every_updates=20"]) == 0
    assert "report workflows/logs/report.html" in capsys.readouterr().out
    (folder,) = (tmp_path / "workflows/logs").glob("learned-*")
    policy = load(folder).policy
    states = [np.array([seen, spent], np.float32) for seen in range(5) for spent in range(seen + 1)]
    assert np.mean([policy.predict(state)[0] for state in states]) > 0.8


def test_exit_codes_of_the_page_are_those_of_the_errors() -> None:
    from qfleet import errors

    rows = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|", PAGE, re.MULTILINE))
    codes = {errors.UsageError, errors.DivergedError, errors.EnvError, errors.StorageError}
    assert {str(kind.exit_code) for kind in codes} <= rows.keys()


def test_the_forms_of_the_page_are_workflows(tmp_path: Path) -> None:
    for line in block("qfleet workflow my.toml learn.learners.num=2").splitlines():
        words = [word for word in line.split() if "=" in word]
        settings = {path.replace(".", "__"): value for path, _, value in (word.partition("=") for word in words)}
        found = given(tmp_path, **settings)
        assert ("learners.num", "2") in found.learn_settings
