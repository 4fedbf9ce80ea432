"""Learners that MPI has started: the steps of learners by shared memory, and all of them end with the run."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from safetensors.numpy import load_file

from qfleet import train
from qfleet.distributed import mpi
from qfleet.distributed.mpi import MpiTransport, create_group, probe_env_spec, rank_main
from qfleet.errors import EnvError, QfleetError
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from tests.support.runs import SMALL, Settings, checkpoints, events, status, train_arguments

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
    command = [*mpirun, sys.executable, "-m", "qfleet", *train_arguments(tmp_path, changes, env_id), "--name", "run"]
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
    env = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)


# Without MPI


class OneRank:
    """A world in which groups are formed at once, or never."""

    def __init__(self, *, late: bool = False) -> None:
        self.ended, self.freed, self.code, self.late = threading.Event(), False, 0, late

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def Get_group(self) -> "OneRank":
        return self

    def Incl(self, ranks: list[int]) -> "OneRank":
        return self

    def Create_group(self, group: "OneRank") -> "OneRank":
        if self.late and self.ended.wait(20):
            raise InterruptedError
        return self

    def Free(self) -> None:
        self.freed = True

    def Abort(self, code: int) -> None:
        self.code = code
        self.ended.set()


def hasty(seconds: float) -> Plan:
    return make_plan("CartPole-v1", overrides={"learners.num": 2, "learners.timeout_seconds": seconds})


def test_a_group_that_does_not_form_in_time_aborts_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    world = OneRank(late=True)
    with pytest.raises(InterruptedError):
        create_group(world, [0, 1], hasty(0.2))
    assert world.code == 1
    assert "rank 0: the other ranks did not answer within 0.2 seconds" in capsys.readouterr().err


def test_a_group_that_forms_in_time_is_freed_when_closed() -> None:
    world = OneRank()
    comm = create_group(world, [0], hasty(0.2))
    assert not world.ended.wait(0.5)
    comm.close()
    assert world.freed


def test_a_rank_that_is_refused_prints_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*_: Any) -> None:
        raise EnvError("it fails", "It is broken.", "Mend it.")

    world = OneRank()
    monkeypatch.setattr("qfleet.distributed.mpi.mpi", lambda: SimpleNamespace(COMM_WORLD=world))
    monkeypatch.setattr("qfleet.distributed.mpi.serve_rank", refused)
    rank_main((None, None, None))
    assert capsys.readouterr().err == "rank 0: it fails\nIt is broken.\nMend it.\n"
    assert world.code == EnvError.exit_code


def test_a_rank_for_which_no_run_begins_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "START_SECONDS", 0.1)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # it would ignore Ctrl-C from now on
    monkeypatch.setattr(MpiTransport, "receive", lambda transport, seconds: None)
    with pytest.raises(QfleetError, match=r"no run began within 0\.1 seconds"):
        mpi.serve_rank(OneRank(), (None, None, None))


def test_one_environment_is_probed_and_closed() -> None:
    made, closed = list[Any](), list[Any]()

    class Seen(gym.Env[Any, Any]):
        observation_space, action_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32), gym.spaces.Discrete(2)

        def __init__(self) -> None:
            made.append(self)

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            return np.zeros(1, np.float32), {}

        def close(self) -> None:
            closed.append(self)

    spec = probe_env_spec(make_plan("CartPole-v1", overrides={"env.num": 4}), Seen)
    assert (spec.obs, spec.num_actions) == ((1,), 2)
    assert len(made) == 1
    assert closed == made


# With MPI


def run_script(mpirun: list[str], tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(script)
    command = [*mpirun, sys.executable, "script.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)


STOPPED = """
import os, signal
from qfleet.plan import make_plan
from qfleet.distributed.mpi import create_group, mpi

world = mpi().COMM_WORLD
if world.Get_rank() == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
create_group(world, [0, 1, 2], make_plan("CartPole-v1", overrides={"learners.num": 3, "learners.timeout_seconds": 3.0}))
"""


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_a_group_forms_aborts_all(mpirun: list[str], tmp_path: Path) -> None:
    done = run_script(mpirun, tmp_path, STOPPED)
    assert done.returncode != 0
    assert "the other ranks did not answer within 3 seconds" in done.stderr


CODED = """
import torch
from qfleet.plan import make_plan
from qfleet.distributed.mpi import create_group, mpi
from qfleet.sync.codecs import Half

world, plan = mpi().COMM_WORLD, make_plan("CartPole-v1")
for _ in range(100):
    comm = create_group(world, [2, 0, 1], plan)
    values = torch.arange(5.0) / 3 + comm.rank
    mean = Half(torch.bfloat16).mean(values, comm)[1]
    assert torch.allclose(mean, torch.arange(5.0) / 3 + 1.0, rtol=1e-2), mean
    found = comm.gather(values.to(torch.bfloat16))
    assert [each.dtype for each in found] == [torch.bfloat16] * 3
    assert all(torch.equal(each, (torch.arange(5.0) / 3 + rank).to(torch.bfloat16)) for rank, each in enumerate(found))
    assert comm.gather(torch.tensor(comm.rank))[2] == 2
    comm.close()
    assert comm.mpi_comm == mpi().COMM_NULL
print("well", flush=True)
"""


@pytest.mark.slow
def test_half_precision_travels_by_mpi_and_groups_are_freed(mpirun: list[str], tmp_path: Path) -> None:
    done = run_script(mpirun, tmp_path, CODED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("well") == 3


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
def test_a_refused_run_ends_all_ranks(mpirun: list[str], tmp_path: Path) -> None:
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
def test_a_rank_that_fails_aborts_all(mpirun: list[str], tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    more = {"learners.bundles": True, "env.num": 3, "algo.batch_size": 15, "learners.timeout_seconds": 10.0}
    done = run(mpirun, tmp_path, {**SHORT, **more, "learners.backend": "mpi"}, "fails.py:Fails")
    assert done.returncode != 0
    assert "only here" in done.stderr
    assert "Traceback" not in done.stderr
