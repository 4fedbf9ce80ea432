"""Parts of the user's own in a group: every member gets a copy, and a resumed group asks for them again."""

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch

from qfleet import load, resume_group, train_group
from qfleet.errors import UsageError
from qfleet.plan import read_plan
from qfleet.qlearn import ActionChoice, NextValues
from qfleet.testing.toys import Random
from tests.support.runs import SMALL, Settings, small, status

SHORT: Settings = {**SMALL, "until.steps": 150}


@dataclass(frozen=True)
class Uniform:
    """A rule of the user's own: every next action is as likely."""

    needs_online = False
    needs_current = False

    def __call__(self, values: NextValues) -> ActionChoice:
        return ActionChoice(torch.full_like(values.target_next, 1.0 / values.target_next.shape[-1]))


class Locked(Random):
    """Holds what cannot be sent to another process."""

    def __init__(self, lock: Any) -> None:
        super().__init__()


def stop(row: dict[str, Any]) -> bool:
    return bool(row["env_steps"] > 90)


def test_members_train_with_the_parts_and_callbacks_and_are_resumed_with_them(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"env": Random, "rule": Uniform()}
    group = train_group("Mine", 1, overrides=SHORT, out=tmp_path, name="g", callbacks=[stop], **parts)
    member = group.members[0]
    assert status(member)["reason"] == "stopped by a callback"
    assert read_plan(member / "run.toml").custom == read_plan(group.path / "plan.toml").custom
    assert "Uniform" in str(read_plan(member / "run.toml").custom.rule)
    with pytest.raises(UsageError, match="was trained with parts of your own") as caught:
        resume_group(group.path, env=Random)
    assert "rule=..." in caught.value.fix
    ended = resume_group(group.path, **parts)
    assert ended.exit_code == 0
    assert load(member, env=Random).status["exact"] is True


def test_an_environment_object_and_a_preset(tmp_path: Path) -> None:
    group = train_group("CartPole-v1", 1, preset="dqn", overrides=SHORT, env=gym.make("CartPole-v1"), out=tmp_path)
    assert group.exit_code == 0
    assert group.path.name.startswith("cartpole-dqn")


@pytest.mark.parametrize(
    ("given", "named"),
    [({"env": partial(Locked, threading.Lock())}, "env="), ({"callbacks": [threading.Lock()]}, "callbacks=")],
)
def test_what_cannot_be_sent_is_refused_before_anything_is_made(
    given: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="cannot be given to the members of a group") as caught:
        train_group(small(), 2, out=tmp_path, **given)
    assert caught.value.what.startswith(named)
    assert not list(tmp_path.iterdir())


def test_a_wrong_part_is_refused_before_a_group_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="env= was given a Random object"):
        train_group(small(), 2, env=Random(), out=tmp_path)
    assert not list(tmp_path.iterdir())
