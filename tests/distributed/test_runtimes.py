"""One plan file on every runtime: the same command but for `runtime.type`, the same number of updates."""

import json
from pathlib import Path

import pytest

from qfleet.cli import main
from qfleet.plan import read_plan
from qfleet.plan.paths import tag_of
from tests.support.runs import settings, status

ON_RAY = (pytest.mark.slow, pytest.mark.ray)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small plan that says what the machine is, but not which runtime."""
    chosen = settings({"env.id": "CartPole-v1", "runtime.device": "cpu"})
    path = tmp_path / "small.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in chosen.items()))
    return path


@pytest.mark.parametrize("runtime", ["inline", "processes", pytest.param("ray", marks=ON_RAY)])
def test_one_plan_file_trains_on_every_runtime(runtime: str, file: Path, tmp_path: Path) -> None:
    if runtime == "ray":
        pytest.importorskip("ray")
    command = ["train", "--plan", str(file), "--quiet", "--out", str(tmp_path), "--name", runtime]
    assert main([*command, f"runtime.type={runtime}"]) == 0
    plan, ended = read_plan(tmp_path / runtime / "run.toml"), status(tmp_path / runtime)
    assert tag_of(type(plan.runtime)) == runtime
    assert (plan.runtime.device, plan.runtime.threads, plan.runtime.compile) == ("cpu", 1, False)
    assert ended["state"] == "done"
    # 5 samples per insert in batches of 16, after 40 steps.
    assert ended["updates"] == 5 * (ended["env_steps"] - 40) // 16 > 0
