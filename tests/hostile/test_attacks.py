"""The ways in which a run folder from elsewhere once had code executed: packed, unpacked, and read by every command."""

import shutil
import socket
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.hostile.cases.plans import runtime
from tests.hostile.commands import COMMANDS, Server, find_violations
from tests.hostile.place import Case, Make, Place, make_place, plant_modules

pytestmark = pytest.mark.timeout(900)  # the server ends a command that takes too long

READERS = tuple(name for name in COMMANDS if name not in ("rm", "train-plan"))


def unpacked(make: Make, bases: Path, top: Path, base: str = "run") -> Place:
    """What an attacker made in a folder of his own, packed there and unpacked in the user's folder."""
    theirs = make_place(top / "theirs", bases / base, bases / "other", "hostile")
    ours = make_place(top / "ours", bases / base, bases / "other", "hostile")
    # Hostile files name the places that they attack, and those are the user's.
    make(Place(theirs.root, attacked=ours.root))
    shutil.rmtree(ours.run)
    with tarfile.open(top / "run.tar", "w") as archive:
        for path in sorted(
            {theirs.run, *theirs.root.glob("*.py"), *theirs.root.glob(".git*"), theirs.root / "tracked"}
        ):
            if path.exists():
                archive.add(path, path.relative_to(theirs.root))
    with tarfile.open(top / "run.tar") as archive:
        archive.extractall(ours.root, filter="fully_trusted")  # noqa: S202  as careless as users are
    return ours


def log_link(place: Place) -> None:
    """The log leads to a file that Python reads at its next start, and a file name holds a line for it."""
    line = f"import os; open({str(place.canary)!r} + os.sep + 'pth', 'w')".replace("/", "'+chr(47)+'")
    for folder in (place.run / "checkpoints").iterdir():
        (folder / f"x\n{line}\n").touch()
    place.link("logs/run-0.log", place.victim / "folder" / "evil.pth")


def actor_log_links(place: Place) -> None:
    """The same for the logs of actors and members."""
    for name in ("actor-0", "seed-0", "seed-1", "learner-1", "replay-0"):
        place.link(f"logs/{name}.log", place.victim / "folder" / f"{name}.pth")


def foreign_address(port: int, place: Place) -> None:
    """A Ray cluster of the attacker, and no token asked of it."""
    runtime(f'type = "ray"\naddress = "127.0.0.1:{port}"\nallow_no_token = true\ndevice = "cpu"\n', place)


def planted_modules(place: Place) -> None:
    """Files with the names of modules, where the user types the command."""
    plant_modules(place.root, place)
    plant_modules(place.run, place)


def git_settings(place: Place) -> None:
    """A repository whose settings name programs: a monitor, filters, hooks, a pager."""
    program = f"touch {place.canary}/git; cat"
    (place.root / "tracked").write_text("first\n")
    (place.root / ".gitattributes").write_text("tracked filter=x diff=x\n")
    git(place.root, "init", "--quiet")
    git(place.root, "add", "tracked", ".gitattributes")
    git(place.root, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "--quiet", "-m", "x")
    names = ("core.fsmonitor", "filter.x.clean", "filter.x.smudge", "core.pager", "diff.external", "diff.x.textconv")
    for name in (*names, "core.sshCommand", "core.editor", "credential.helper"):
        git(place.root, "config", name, program)
    (place.root / "tracked").write_text("other\n")  # of the same size, so that git must look into it
    hook = place.root / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\n{program}\n")
    hook.chmod(0o755)


def git(folder: Path, *arguments: str) -> str:
    """Ask git."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout


def check(make: Make, server: Server, place: Place, names: tuple[str, ...]) -> None:
    """No command runs or touches anything of it."""
    case = Case("attack", make)
    found = find_violations(server, place, case, names)
    assert not found, f"{case.about}\n" + "\n".join(found)


def test_a_log_that_leads_to_what_python_runs(server: Server, bases: Path, tmp_path: Path) -> None:
    check(log_link, server, unpacked(log_link, bases, tmp_path), READERS)


@pytest.mark.parametrize("base", ["processes", pytest.param("group", marks=pytest.mark.slow)])
def test_logs_of_actors_and_members(base: str, server: Server, bases: Path, tmp_path: Path) -> None:
    check(actor_log_links, server, unpacked(actor_log_links, bases, tmp_path, base), ("resume",))


@contextmanager
def listener() -> Iterator[tuple[int, list[object]]]:
    """A port on this machine, and the addresses that have connected to it."""
    connections: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        ended = threading.Event()

        def listen() -> None:
            while not ended.is_set():
                try:
                    connection, address = server.accept()
                except TimeoutError:
                    continue
                connections.append(address)
                connection.close()

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield server.getsockname()[1], connections
        finally:
            ended.set()
            thread.join(timeout=5)


def test_a_plan_that_names_the_attackers_cluster(server: Server, bases: Path, tmp_path: Path) -> None:
    with listener() as (port, connections):
        make: Make = partial(foreign_address, port)
        place = unpacked(make, bases, tmp_path)
        check(make, server, place, READERS)
        assert not connections
    with listener() as (port, connections):
        socket.create_connection(("127.0.0.1", port)).close()
    assert connections  # the listener does record connections


def test_modules_where_the_command_is_typed(server: Server, bases: Path, tmp_path: Path) -> None:
    check(planted_modules, server, unpacked(planted_modules, bases, tmp_path), READERS)


@pytest.mark.parametrize("base", ["processes", pytest.param("group", marks=pytest.mark.slow)])
def test_modules_where_processes_are_started(base: str, server: Server, bases: Path, tmp_path: Path) -> None:
    check(planted_modules, server, unpacked(planted_modules, bases, tmp_path, base), ("resume",))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_repository_whose_settings_name_programs(server: Server, bases: Path, tmp_path: Path) -> None:
    place = unpacked(git_settings, bases, tmp_path)
    check(git_settings, server, place, READERS)
    git(place.root, "status")
    assert list(place.canary.iterdir())  # the trap works: plain git commands run it
