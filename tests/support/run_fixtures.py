import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from qfleet import Run
from qfleet.training.checkpointing import Saver, is_due
from tests.support.nursery import Nursery
from tests.support.runs import Settings, small, trained


class Reference(Protocol):
    """Asks for the undisturbed run of a plan."""

    def __call__(self, changes: Settings | None = None, env_id: str = "CartPole-v1") -> Run: ...


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state folder, so that no test writes into the real one."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here cuts the power, so nothing in this process need be safe from it."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def every_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save whenever enough steps were made, be the disk as slow as it likes: the same checkpoints every time."""
    monkeypatch.setattr(
        Saver, "due", lambda self: is_due(self.components.steps, self.plan.every_steps, self.tried_steps)
    )


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Processes to kill."""
    place = Nursery(tmp_path_factory.mktemp("nursery"))
    yield place
    place.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A run that nothing disturbed; made once for each plan."""
    made: dict[str, Run] = {}

    def run(changes: Settings | None = None, env_id: str = "CartPole-v1") -> Run:
        key = f"{env_id} {changes}"
        if key not in made:
            made[key] = trained(small(changes, env_id), tmp_path_factory.mktemp("reference"))
        return made[key]

    return run
