"""Learners that MPI has started: the steps of learners by shared memory, and all of them end with the run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from qfleet import train
from qfleet.plan import make_plan
from tests.run.parts import SMALL, Settings, checkpoints, events, status, words

ROOT = Path(__file__).parents[2]
SHORT: Settings = {"learners.num": 3, "until.steps": 140, "save.every_steps": 1_000}


@pytest.fixture
def mpirun() -> list[str]:
    pytest.importorskip("mpi4py")
    if (command := shutil.which("mpirun")) is None:
        pytest.skip("mpirun is not installed (apt: openmpi-bin)")
    return [command, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3"]


def run(
    mpirun: list[str], tmp_path: Path, changes: Settings, env_id: str = "CartPole-v1"
) -> subprocess.CompletedProcess[str]:
    command = [*mpirun, sys.executable, "-m", "qfleet", *words(tmp_path, changes, env_id), "--name", "run"]
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
    env = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"sync.type": "allreduce"},
        {"sync.type": "local"},
        {"sync.type": "gossip"},
        {"learners.bundles": True, "env.num": 3, "algo.batch_size": 15},
    ],
    ids=["allreduce", "local", "gossip", "bundles"],
)
def test_learners_by_mpi_make_the_same_steps(mpirun: list[str], tmp_path: Path, more: Settings) -> None:
    changes: Settings = {**SHORT, **more}
    done = run(mpirun, tmp_path, {**changes, "learners.backend": "mpi"})
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "run"
    assert [row["learners"] for row in events(folder, "group_formed")] == [3]
    near = train(make_plan("CartPole-v1", overrides={**SMALL, **changes}), out=tmp_path / "near")
    assert status(folder)["updates"] == near.status["updates"] > 0
    own, other = (load_file(checkpoints(path)[-1] / "model.safetensors") for path in (folder, near.path))
    for name, value in own.items():
        np.testing.assert_allclose(value, other[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_too_few_processes_are_refused(mpirun: list[str], tmp_path: Path) -> None:
    done = run(mpirun, tmp_path, {**SHORT, "learners.num": 4, "learners.backend": "mpi"})
    assert done.returncode != 0
    assert "learners.num=4, but MPI has started 3 processes" in done.stderr


@pytest.mark.slow
def test_a_run_that_is_refused_keeps_nobody_waiting(mpirun: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    done = run(mpirun, tmp_path, {**SHORT, "learners.backend": "mpi"})
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


FAILS = """
import os
import gymnasium as gym
import numpy as np


class Fails(gym.Env):
    observation_space, action_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32), gym.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps > 40 and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            raise RuntimeError("only here")
        return np.zeros(1, np.float32), 0.0, self.steps % 10 == 0, False, {}
"""


@pytest.mark.slow
def test_one_that_fails_ends_all(mpirun: list[str], tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    more = {"learners.bundles": True, "env.num": 3, "algo.batch_size": 15, "learners.timeout_seconds": 10.0}
    done = run(mpirun, tmp_path, {**SHORT, **more, "learners.backend": "mpi"}, "fails.py:Fails")
    assert done.returncode != 0
    assert "only here" in done.stderr
