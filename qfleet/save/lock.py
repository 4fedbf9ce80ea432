"""One writer per run: a lock that dies with its owner."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from qfleet.errors import StorageError
from qfleet.files import Identity, open_inside, remove_drafts, remove_file

LOCK_NAME = "run.lock"
_ATTEMPTS = 20
_PAUSE_SECONDS = 0.1


class Owner(NamedTuple):
    """Who signed the lock."""

    pid: int
    host: str
    since: str


class HeldRun:
    """A run directory that this process alone writes."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def require_in_place(self) -> None:
        """Refuse to go on once the directory was renamed or removed: nothing written now would be found there."""
        if not self._identity.unchanged():
            raise StorageError(
                f"The run directory {self._identity.folder} was renamed or removed while the run was writing to it.",
                "What is written from here on would be lost, or would make a second directory of the same name.",
                "If it was renamed, go on with: qfleet resume NEW_PATH. If it was removed, start a new run.",
            )


@contextmanager
def hold_run(run_dir: Path) -> Iterator[HeldRun]:
    """Be the only writer of a run directory, or say who is. The lock file is gone afterwards."""
    path = Path(run_dir) / LOCK_NAME
    with ExitStack() as opened:
        try:
            identity = opened.enter_context(closing(Identity(path.parent.absolute())))
            file = _acquire(path)
        except OSError as error:
            raise StorageError(
                f"The lock {path} cannot be taken: {error.strerror}.",
                "Without it two processes could write the same run.",
                "Check that the directory exists, belongs to you, and lies on a filesystem with file locks.",
            ) from None
        opened.callback(_release, path, file)
        with suppress(OSError):
            remove_drafts(path.parent)
        yield HeldRun(identity)


def _release(path: Path, file: int) -> None:
    """Remove the lock while it is still held: whoever opened it meanwhile sees that, and tries again."""
    with suppress(OSError):
        remove_file(path.parent, path.name)
    os.close(file)


def _acquire(path: Path) -> int:
    owner: Owner | None = None
    for _ in range(_ATTEMPTS):
        file = open_inside(path.parent, path.name, os.O_RDWR | os.O_CREAT, 0o600)
        if _lock(file) and _is_named(file, path):
            _sign(file)
            return file
        owner = _owner(os.pread(file, 4096, 0))
        os.close(file)
        if owner and _alive(owner):
            break
        # Its owner is gone or not yet known: a dying child, or someone between opening and signing.
        time.sleep(_PAUSE_SECONDS)
    raise _held(path, owner)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        os.close(file)
        raise
    return True


def _is_named(file: int, path: Path) -> bool:
    """Whether the name still leads to the file we hold."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _sign(file: int) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.fchmod(file, 0o600)
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(), 0)


def _owner(content: bytes) -> Owner | None:
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
        os.kill(owner.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _held(path: Path, owner: Owner | None) -> StorageError:
    who = f"process {owner.pid} on {owner.host} since {owner.since}" if owner else "another process"
    return StorageError(
        f"The run {path.parent} is being written by {who}.",
        "Two writers would spoil each other's checkpoints.",
        "Wait for it to end or stop it, then try again; or start a new run with another --name.",
    )
