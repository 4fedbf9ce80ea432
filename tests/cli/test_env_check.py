"""What `env check` says when an environment fails: whether training on it works all the same."""

from pathlib import Path

import pytest

from qfleet.cli import main

ENV = """
import gymnasium as gym
import numpy as np

class Env(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    kept = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(2, {value}, np.float32), {{}}

    def step(self, action):
        Env.kept += 1
        return np.full(2, {value}, np.float32), 1.0, False, False, {{}}
"""


@pytest.mark.parametrize(
    ("value", "failed", "why"),
    [
        ("Env.kept % 97 / 97", "determinism", "Training on it works, but a run cannot be repeated"),
        ("5", "contract", "Training on it would be wrong or impossible"),
    ],
)
def test_a_failed_check_says_what_it_means(
    value: str, failed: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(ENV.format(value=value))
    assert main(["env", "check", f"{tmp_path}/own.py:Env"]) == 4
    error = capsys.readouterr().err
    assert f"fails {failed}" in error
    assert why in error
