"""docs/own-environment.md: the messages that it shows are those that qfleet prints."""

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from qfleet import Plan, train
from qfleet.cli import main
from qfleet.errors import QfleetError
from tests.support.pages import ROOT, blocks_of

PAGE = ROOT / "docs/own-environment.md"
ZEROS = np.zeros(2, np.float32)


class Plain(gym.Env[Any, Any]):
    """No mistake; each test makes one."""

    reset_info: dict[str, Any] = {}  # noqa: RUF012
    step_result: tuple[Any, ...] = (ZEROS, 1.0, False, False, {})

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return ZEROS, self.reset_info

    def step(self, action: Any) -> Any:
        return self.step_result


class Outside(Plain):
    step_result = (ZEROS + 2, 1.0, False, False, {})


class Misshapen(Plain):
    step_result = (np.zeros(3, np.float32), 1.0, False, False, {})


class NotANumber(Plain):
    step_result = (ZEROS, float("nan"), False, False, {})


class OldGym(Plain):
    step_result = (ZEROS, 1.0, False, {})


class Unseeded(Plain):
    def reset(self) -> Any:  # type: ignore[override]
        return ZEROS, {}


class MaskedOnce(Plain):
    reset_info = {"action_mask": np.array([True, False])}  # noqa: RUF012


class NothingAllowed(Plain):
    reset_info = {"action_mask": np.array([False, False])}  # noqa: RUF012


class Dividing(Plain):
    def step(self, action: Any) -> Any:
        return 1 / 0


class Unbounded(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = gym.spaces.Box(-np.inf, np.inf, (2,))


def messages() -> list[str]:
    """The second column of the table of mistakes, without what follows the code."""
    table = PAGE.read_text("utf-8").partition("## Common mistakes")[2].partition("\n\nSome")[0]
    return re.findall(r"^\| .* \| `(.*?)`[^|`]*\|$", table, re.MULTILINE)


RAISING = [Outside, Misshapen, NotANumber, OldGym, Unseeded, MaskedOnce, NothingAllowed, Dividing, Unbounded]


@pytest.mark.parametrize("mistake", RAISING)
def test_messages_of_the_table_are_printed(mistake: type[Plain], tmp_path: Path) -> None:
    with pytest.raises(QfleetError) as error:
        train(Plan.of("Mistake", overrides={"until.steps": 50}), env=mistake, out=tmp_path)
    assert len([message for message in messages() if message in str(error.value)]) == 1, str(error.value)


ROLLING = """
import random

import numpy as np
from gymnasium import Env, spaces


class Rolling(Env):
    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.array([random.random(), 0], np.float32), 1.0, False, False, {}
"""


def test_randomness_from_elsewhere_is_found_by_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rolling.py").write_text(ROLLING)
    assert main(["env", "check", "rolling.py:Rolling"]) == 4
    said = capsys.readouterr().out
    assert [message for message in messages() if message in said] == [messages()[5]]


def test_every_message_of_the_table_has_its_case() -> None:
    assert len(messages()) == len(RAISING) + 2  # the check's own, and the refused option


def test_the_refused_option_is_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(PAGE)
    (tmp_path / "delivery.py").write_text(blocks[0].text)
    shown = blocks[-1].text.splitlines()[1:]
    assert main(["train", "delivery.py:Delivery", "env.options.rooms=3"]) == 2
    said = capsys.readouterr().err.replace(f"{tmp_path}/", "")
    assert said.splitlines()[-3:] == shown
    assert messages()[-1] in said


def test_the_check_shown_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(PAGE)
    (tmp_path / "delivery.py").write_text(blocks[0].text)
    assert main(["env", "check", "delivery.py:Delivery"]) == 0
    shown = next(block.text for block in blocks if block.text.startswith("made "))
    assert capsys.readouterr().out.startswith(shown)
