"""A folder full of files named like modules: commands that are given there import none of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import LOCAL, Settings, train_arguments
from tests.system.test_child_process import poisoned

NAMES = (
    *("argparse", "cyclopts", "dataclasses", "json", "logging", "msgspec", "numpy", "random", "selectors", "signal"),
    *("socket", "string", "struct", "subprocess", "tempfile", "torch", "typing_extensions", "gymnasium", "rich"),
    *("lz4", "ray", "mpi4py", "tensorboard", "cloudpickle", "numba", "usercustomize", "sitecustomize", "qfleet"),
)
CONSOLE = [str(Path(sys.executable).with_name("qfleet"))]
MODULE = [sys.executable, "-m", "qfleet"]
PROCESSES: Settings = {"runtime.type": "processes", "actors.num": 2, "replay.samples_per_insert": 4, **LOCAL}


def call(program: list[str], here: Path, *given: str) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(here.parent / "state")}
    done = subprocess.run([*program, *given], cwd=here, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (here / "marks").exists(), (here / "marks").read_text()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return poisoned(tmp_path / "here", *NAMES)


def test_actors_and_learner_in_processes_import_nothing_from_it(here: Path) -> None:
    call(CONSOLE, here, *train_arguments(Path("runs"), {**PROCESSES, "until.steps": 100}), "--name", "a")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, PROCESSES], ids=["inline", "processes"])
def test_train_resume_and_eval_import_nothing_from_it(here: Path, settings: Settings) -> None:
    call(CONSOLE, here, *train_arguments(Path("runs"), {**settings, "until.steps": 100}), "--name", "a")
    call(CONSOLE, here, "resume", "a", "--steps", "150", "--quiet")
    call(CONSOLE, here, "eval", "a", "--episodes", "2")


@pytest.mark.slow
def test_a_group_imports_nothing_from_it(here: Path) -> None:
    call(CONSOLE, here, *train_arguments(Path("runs"), {"until.steps": 100}), "--seeds", "2", "--name", "a")
    call(CONSOLE, here, "resume", "a", "--steps", "150", "--quiet")


@pytest.mark.slow
@pytest.mark.ray
def test_processes_of_ray_import_nothing_from_it(here: Path) -> None:
    pytest.importorskip("ray")
    changes = {"runtime.type": "ray", "runtime.actor_cpus": 0.1, "runtime.learner_cpus": 0.1, "actors.num": 2}
    call(CONSOLE, here, *train_arguments(Path("runs"), {**changes, "until.steps": 100, "replay.samples_per_insert": 4}))


@pytest.mark.slow
def test_python_m_imports_nothing_from_it_but_the_environment_that_is_named(here: Path) -> None:
    (here / "qfleet.py").unlink()  # Python itself looks there for what -m names
    (here / "mine.py").write_text(
        "import gymnasium as gym\nfrom qfleet.testing.toys import Random\n"
        "gym.register('Mine-v0', entry_point=Random, max_episode_steps=20)\n"
    )
    changes = {**PROCESSES, "until.steps": 100}
    for env_id in ("mine:Mine-v0", "mine.py:Random"):
        call(MODULE, here, *train_arguments(Path("runs"), changes, env_id))
