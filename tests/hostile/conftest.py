"""A server that forks for each command, and base runs that are made once for all test processes."""

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.commands import TINY, Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def make_bases(server: Server, folder: Path) -> None:
    """A run, a group of two and a run in processes, by a user whose key the hostile folders' reader does not have."""
    made = {"run": [], "other": ["--seed", "5"], "group": ["--seeds", "2"], "processes": ["runtime.type=processes"]}
    for name, options in made.items():
        command = ["train", "CartPole-v1", "--steps", "300", "--name", name, "save.every_steps=100", *TINY, *options]
        result = server.run(folder, command, limit_seconds=100)
        assert result.code == 0, result.err + result.out


@pytest.fixture(scope="session")
def bases(server: Server, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder with the base runs."""
    top = tmp_path_factory.getbasetemp()
    folder = (top if worker_id == "master" else top.parent) / "hostile-bases"
    folder.mkdir(exist_ok=True)
    with (folder / "made").open("a+") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)  # the other test processes wait here
        mark.seek(0)
        if not mark.read():
            (folder / "tmp").mkdir(exist_ok=True)
            make_bases(server, folder)
            mark.write("made")
            mark.flush()
    return folder / "runs"
