import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from qfleet import Run
from qfleet.training.checkpointing import Saver, is_due
from tests.support.command_server import CommandServer
from tests.support.runs import Settings, small, trained


class Reference(Protocol):
    """Returns the undisturbed run of a plan."""

    def __call__(self, changes: Settings | None = None, env_id: str = "CartPole-v1") -> Run: ...


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state folder, so that no test writes into the real one; and what was measured here does not count."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    monkeypatch.setattr("qfleet.build.machine.table.cache_folder", lambda: home / "cache")
    return home


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: no test here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def every_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save by steps alone, however slow the disk is: the same checkpoints every time."""
    monkeypatch.setattr(
        Saver, "due", lambda self: is_due(self.components.steps, self.plan.every_steps, self.tried_steps)
    )


@pytest.fixture(scope="session")
def command_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandServer]:
    """Starts qfleet processes that a test may kill."""
    server = CommandServer(tmp_path_factory.mktemp("command_server"))
    yield server
    server.close()


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
