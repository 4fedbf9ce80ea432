"""Files of a remote place, kept on this machine by the hash of their content."""

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from qfleet.files import list_inside, read_inside, remove_drafts, remove_file, replace_inside

CACHE_BYTES = 8 << 30
FOLDER = "QFLEET_CACHE"  # names the folder; else the user's own cache


class ContentCache:
    """At most `max_bytes` of files named by their SHA-256, which is checked whenever one is read.

    The files used longest ago go first. A damaged one is removed and counts as missing. A disk that is full or cannot
    be written costs the cache, not the reader.
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
        if len(data) > self.max_bytes:
            return
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make_room(len(data))
            replace_inside(self.folder, sha256, data, 0o600)

    def _make_room(self, num_bytes: int) -> None:
        remove_drafts(self.folder)
        found = []
        for name in list_inside(self.folder):
            with suppress(OSError):
                status = os.stat(self.folder / name, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):  # decoded files have a folder of their own
                    found.append((status.st_mtime_ns, name, status.st_size))
        total = sum(size for _, _, size in found)
        for _, name, size in sorted(found):
            if total + num_bytes <= self.max_bytes:
                return
            remove_file(self.folder, name)
            total -= size


def cache_folder() -> Path:
    """The folder of this user's cache on this machine."""
    named = os.environ.get(FOLDER)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else home / "qfleet" / "data"


def user_cache() -> ContentCache:
    """The cache of this user on this machine."""
    return ContentCache(cache_folder())
