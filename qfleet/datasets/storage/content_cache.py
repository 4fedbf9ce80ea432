"""Files of a remote place, kept on this machine by the hash of their content."""

import fcntl
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from qfleet.files import DRAFT_SUFFIX, list_inside, open_inside, read_inside, remove_file, replace_inside

CACHE_BYTES = 8 << 30
FOLDER = "QFLEET_CACHE"  # names the folder; else the user's own cache
LOCK = ".lock"
LOCK_SECONDS = 5.0
_NAME = re.compile(r"[0-9a-f]{64}")
_DRAFT = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]+" + re.escape(DRAFT_SUFFIX))


class KeptFile(NamedTuple):
    """A file of the cache; the one that was used longest ago sorts first."""

    used_ns: int
    name: str
    num_bytes: int


class ContentCache:
    """At most `max_bytes` of files named by their SHA-256, which is checked whenever one is read.

    The files used longest ago go first. A damaged one is removed and counts as missing. A disk that is full or cannot
    be written costs the cache, not the reader. Several processes may use one folder: one at a time adds to it. What
    is not a regular file named by a hash is not the cache's own, and is left alone.
    """

    def __init__(self, folder: Path, max_bytes: int = CACHE_BYTES) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def get(self, sha256: str, num_bytes: int) -> bytes | None:
        """The bytes with this hash, if they are here."""
        try:
            data = read_inside(self.folder, sha256, num_bytes)
        except (OSError, ValueError):
            return None
        if hashlib.sha256(data).hexdigest() != sha256:
            with suppress(OSError):
                remove_file(self.folder, sha256)
            return None
        with suppress(OSError):
            os.utime(self.folder / sha256, follow_symlinks=False)
        return data

    def put(self, sha256: str, data: bytes) -> None:
        """Keep bytes whose hash was checked; older ones make room."""
        if len(data) > self.max_bytes or not _NAME.fullmatch(sha256):
            return
        with suppress(OSError, ValueError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._adding() as may_add:
                if may_add and self._is_free(sha256):
                    self._make_room(len(data))
                    replace_inside(self.folder, sha256, data, 0o600)

    @contextmanager
    def _adding(self) -> Iterator[bool]:
        """Is this the only process that adds a file? Not if others take too long."""
        with open(open_inside(self.folder, LOCK, os.O_RDWR | os.O_CREAT, 0o600), "rb+") as file:
            limit = time.monotonic() + LOCK_SECONDS
            while not (mine := try_lock(file.fileno())) and time.monotonic() < limit:
                time.sleep(0.02)
            yield mine

    def _is_free(self, name: str) -> bool:
        """May a file of this name be written? It is not there, or it is a file of the cache."""
        try:
            return stat.S_ISREG(os.stat(self.folder / name, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return True

    def _make_room(self, num_bytes: int) -> None:
        names = list_inside(self.folder)
        for name in filter(_DRAFT.fullmatch, names):  # of a killed writer: nobody else adds a file now
            remove_file(self.folder, name)
        kept = sorted(self._kept(names))
        total = sum(file.num_bytes for file in kept)
        for file in kept:
            if total + num_bytes <= self.max_bytes:
                return
            remove_file(self.folder, file.name)
            total -= file.num_bytes

    def _kept(self, names: list[str]) -> Iterator[KeptFile]:
        for name in filter(_NAME.fullmatch, names):
            with suppress(OSError):
                status = os.stat(self.folder / name, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield KeptFile(status.st_mtime_ns, name, status.st_size)


def try_lock(file: int) -> bool:
    """Lock a file unless another process has locked it; the end of the process, however it comes, unlocks it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def cache_folder() -> Path:
    """The folder of this user's cache on this machine."""
    named = os.environ.get(FOLDER)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else home / "qfleet" / "data"


def user_cache() -> ContentCache:
    """The cache of this user on this machine."""
    return ContentCache(cache_folder())
