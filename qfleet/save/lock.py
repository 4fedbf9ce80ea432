"""One writer per run: a lock that is released when its owner dies."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from qfleet.errors import StorageError
from qfleet.files import FolderIdentity, open_inside, remove_drafts, remove_file

LOCK_NAME = "run.lock"
_ATTEMPTS = 20
_PAUSE_SECONDS = 0.1


class Locked(NamedTuple):
    """What a lock is for: the name of its file, and how messages speak of it."""

    lock_name: str
    name: str
    spoils: str
    instead: str


RUN = Locked(
    LOCK_NAME,
    "run",
    "Two writers would spoil each other's checkpoints.",
    "start a new run with another --name",
)


class Owner(NamedTuple):
    """The process that holds the lock."""

    pid: int
    host: str
    since: str


def require_in_place(run_dir: FolderIdentity) -> None:
    """Refuse to go on once the directory was renamed or removed: nothing written now would be found there."""
    if not run_dir.unchanged():
        raise StorageError(
            f"The run directory {run_dir.folder} was renamed or removed while the run was writing to it.",
            "What is written from here on would be lost, or would make a second directory of the same name.",
            "If it was renamed, go on with: qfleet resume NEW_PATH. If it was removed, start a new run.",
        )


@contextmanager
def hold_run(run_dir: Path, locked: Locked = RUN) -> Iterator[Callable[[], None]]:
    """Lock a run directory for this process, or raise an error that names the owner; removes the lock file after.

    Gives the function that raises once the directory is no longer in its place.
    """
    path = Path(run_dir) / locked.lock_name
    with ExitStack() as opened:
        try:
            identity = opened.enter_context(closing(FolderIdentity(path.parent.absolute())))
            file = _acquire(path, locked)
        except OSError as error:
            raise StorageError(
                f"The lock {path} cannot be taken: {error.strerror}.",
                f"Without it two processes could write the same {locked.name}.",
                "Check that the directory exists, belongs to you, and lies on a filesystem with file locks.",
            ) from None
        opened.callback(_release, path, file)
        with suppress(OSError):
            remove_drafts(path.parent)
        yield partial(require_in_place, identity)


def _release(path: Path, file: int) -> None:
    """Remove the lock file while it is still held: a process that opened it meanwhile notices, and tries again."""
    with suppress(OSError):
        remove_file(path.parent, path.name)
    os.close(file)


def _acquire(path: Path, locked: Locked) -> int:
    owner: Owner | None = None
    for _ in range(_ATTEMPTS):
        file = open_inside(path.parent, path.name, os.O_RDWR | os.O_CREAT, 0o600)
        if _lock(file) and _is_in_place(file, path):
            _write_owner(file)
            return file
        owner = _parse_owner(os.pread(file, 4096, 0))
        os.close(file)
        if owner and _alive(owner):
            break
        # Its owner is dead or not yet known: a dying child, or a process that has not written its name yet.
        time.sleep(_PAUSE_SECONDS)
    raise _held_error(path, owner, locked)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        os.close(file)
        raise
    return True


def _is_in_place(file: int, path: Path) -> bool:
    """Whether the path still names the file that we hold."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _write_owner(file: int) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.fchmod(file, 0o600)
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(), 0)


def _parse_owner(content: bytes) -> Owner | None:
    try:
        fields = json.loads(content)
        return Owner(int(fields["pid"]), str(fields["host"]), str(fields["since"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _alive(owner: Owner) -> bool:
    """Whether the owner may still be running; on another machine we cannot know."""
    if owner.host != socket.gethostname():
        return True
    try:
        with suppress(PermissionError):  # it is another user's
            os.kill(owner.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _held_error(path: Path, owner: Owner | None, locked: Locked) -> StorageError:
    writer = f"process {owner.pid} on {owner.host} since {owner.since}" if owner else "another process"
    return StorageError(
        f"The {locked.name} {path.parent} is being written by {writer}.",
        locked.spoils,
        f"Wait for it to end or stop it, then try again; or {locked.instead}.",
    )
