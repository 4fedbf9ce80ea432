"""Pipes, sockets, devices, and folders in the place of files; files in the place of folders; modes and locks."""

import json
import os
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.hostile.cases.links import FILES, FOLDERS, RIGHT, placed
from tests.hostile.place import Case, Place

CAN_MAKE_DEVICES = os.geteuid() == 0
NO_DEVICES = "" if CAN_MAKE_DEVICES else "only root makes device files"
BLOCKED = ("run.toml", "status.json", "metrics.jsonl", "logs/run-0.log", "run.lock", "CHECKPOINT/model.safetensors")


FEWER = ("empty", "gone", "closed", "read-only")  # these leave a file or folder, or nothing, which may do


def fifo(name: str, place: Place) -> None:
    """Opening it blocks until the other side is opened."""
    os.mkfifo(place.clear(placed(place, name)))


def bound(name: str, place: Place) -> None:
    """A socket; its path is bound from inside its folder, for a path of a socket must be short."""
    path = place.clear(placed(place, name))
    before = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


def device(name: str, place: Place) -> None:
    """/dev/zero under another name."""
    os.mknod(place.clear(placed(place, name)), 0o666 | stat.S_IFCHR, os.makedev(1, 5))


def block(name: str, place: Place) -> None:
    """A block device that is not there."""
    os.mknod(place.clear(placed(place, name)), 0o666 | stat.S_IFBLK, os.makedev(250, 250))


def directory(name: str, place: Place) -> None:
    """A folder, not empty."""
    path = place.clear(placed(place, name))
    path.mkdir()
    (path / "file").write_text("x")


def plain_file(name: str, place: Place) -> None:
    """A file where a folder belongs."""
    place.write(placed(place, name), "not a folder")


def empty(name: str, place: Place) -> None:
    """A file without content."""
    place.write(placed(place, name), b"")


def missing(name: str, place: Place) -> None:
    """Nothing."""
    place.clear(placed(place, name))


def closed(name: str, place: Place) -> None:
    """May not be read nor entered."""
    (place.run / placed(place, name)).chmod(0)


def read_only(name: str, place: Place) -> None:
    """May be read only."""
    (place.run / placed(place, name)).chmod(0o555)


def lock(pid: object, host: object, place: Place) -> None:
    """A lock that another process is said to hold."""
    place.write("run.lock", json.dumps({"pid": pid, "host": host, "since": "2020-01-01\n\x1b[31mFORGED"}))


def cases_of(kind: str, make: Callable[..., None], names: tuple[str, ...], skip: str = "") -> list[Case]:
    """One case for each name."""
    made: list[Case] = []
    for name in names:
        codes = {} if kind in FEWER else RIGHT.get(name, {})
        made.append(Case(f"{kind}-{name.replace('/', '-')}", partial(make, name), codes=codes, skip=skip))
    return made


HERE = socket.gethostname()
CASES = [
    *cases_of("fifo", fifo, (*FILES[:12], *FILES[14:17])),
    *cases_of("socket", bound, BLOCKED),
    *cases_of("device", device, BLOCKED[1:], NO_DEVICES),
    *cases_of("block-device", block, BLOCKED[1:4], NO_DEVICES),
    *cases_of("directory", directory, (*FILES[:12], *FILES[14:17])),
    *cases_of("file", plain_file, FOLDERS),
    *cases_of("empty", empty, ("run.toml", "status.json", "best.json", *FILES[14:])),
    *cases_of("gone", missing, ("status.json", "metrics.jsonl", "checkpoints", "CHECKPOINT/model.safetensors", "logs")),
    *cases_of("closed", closed, ("run.toml", "status.json", "metrics.jsonl", "checkpoints", "CHECKPOINT", "logs", ".")),
    *cases_of("read-only", read_only, ("checkpoints", "logs", ".")),
    Case("lock-of-init", partial(lock, 1, HERE)),
    Case("lock-of-another-machine", partial(lock, 1, "\x1b]0;FORGED\x07\nFORGED host")),
    Case("lock-of-nobody", partial(lock, 10**30, HERE)),
    Case("lock-of-a-text", partial(lock, "x", HERE)),
    Case("lock-of-minus-one", partial(lock, -1, HERE)),
]
