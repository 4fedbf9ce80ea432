"""Environments that fail under a command: the exit code, the message, and the lines of the user's own code."""

import json
from pathlib import Path

import pytest

from qfleet.cli import main

ENV = """
import sys

import gymnasium as gym
import numpy as np


class Env(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {{}}

    def step(self, action):
        Env.steps += 1
        if Env.steps >= 100:
            self.fail()
        return np.zeros(2, np.float32), 1.0, False, Env.steps % 10 == 0, {{}}

    def fail(self):
        {fault}
"""
SMALL = ["--steps", "400", "--quiet", "env.num=2", "eval.episodes=0", "eval.test_episodes=0"]


def write_env(folder: Path, fault: str) -> str:
    (folder / "my_env.py").write_text(ENV.format(fault=fault))
    return "my_env.py:Env"


@pytest.mark.parametrize(
    ("fault", "output"),
    [("sys.exit(0)", "SystemExit: 0 (it called sys.exit)"), ("raise ValueError('boom')", "ValueError: boom")],
)
def test_frames_of_user_code_and_the_log_are_shown(
    fault: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = write_env(tmp_path, fault)
    assert main(["train", name, *SMALL]) == 4
    error = capsys.readouterr().err
    assert f"step() raised {output} at my_env.py:23 in fail" in error
    assert "at: my_env.py:19 in step: self.fail()" in error
    assert f"at: my_env.py:23 in fail: {fault}" in error
    (run,) = (tmp_path / "runs").iterdir()
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 4)
    log = run / "logs" / "run-0.log"
    assert f"log: {log.relative_to(tmp_path)}" in error
    assert "Traceback" in log.read_text()


def test_before_there_is_a_run_the_whole_traceback_goes_to_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "my_env.py").write_text("def Env():\n    raise ValueError('boom')\n")
    assert main(["train", "my_env.py:Env", *SMALL]) == 4
    error = capsys.readouterr().err
    assert "at: my_env.py:2 in Env: raise ValueError('boom')" in error
    (log,) = tmp_path.glob("qfleet-env-*.log")
    assert f"log: {log}" in error
    assert "ValueError: boom" in log.read_text()
