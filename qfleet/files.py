"""Files inside a folder that may come from a stranger: the only place where qfleet opens, makes or removes them.

Every call takes a folder and a name below it. The folder itself is taken as the user named it. Below it no link is
followed, in any part of the name, and only regular files are opened: a fifo does not keep its reader waiting, a device
is not read. Each step is made relative to the descriptor of the folder before it, so a name cannot be exchanged for a
link between a check and its use.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_PLAIN = {errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR}
DRAFT_END = ".draft"
WRITES = os.O_WRONLY | os.O_RDWR


class NotPlain(OSError):
    """A link, a fifo, a folder or a device stands where a regular file is expected."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file", str(path))


class HardLinked(OSError):
    """It has a second name, which may lie outside of its folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EMLINK, "it has a second name (a hard link)", str(path))


class TooLarge(OSError):
    """It has more bytes than any such file of ours."""

    def __init__(self, path: Path, size: int, most_bytes: int) -> None:
        super().__init__(errno.EFBIG, f"it has {size:,} bytes, and {most_bytes:,} are the most", str(path))


def _parts(name: str | Path) -> tuple[str, ...]:
    """The parts of a relative name that stays below its folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in str(name):
        raise ValueError(f"{str(name)!r} does not stay inside its folder")
    return path.parts


@contextmanager
def _open_folder(folder: Path, parts: tuple[str, ...]) -> Iterator[int]:
    here = os.open(folder, _FOLDER_FLAGS)
    try:
        for index, part in enumerate(parts):
            try:
                below = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=here)
            except OSError as error:
                if error.errno in _NOT_PLAIN:
                    raise NotPlain(Path(folder, *parts[: index + 1])) from error
                raise
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


@contextmanager
def folder_below(folder: Path, name: str | Path) -> Iterator[int]:
    """The descriptor of a folder below `folder`, reached without following a link."""
    with _open_folder(folder, _parts(name)) as here:
        yield here


@contextmanager
def folder_of(folder: Path, name: str | Path) -> Iterator[tuple[int, str]]:
    """The descriptor of the folder that holds a name, reached without following a link, and the name's last part."""
    *above, last = _parts(name)
    with _open_folder(folder, tuple(above)) as here:
        yield here, last


# --- reading ---


def open_inside(folder: Path, name: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """A descriptor of a regular file, and of nothing else.

    A file with a second name is not opened for writing: that name may lie outside the folder.
    """
    path = Path(folder, name)
    with folder_of(folder, name) as (here, last):
        try:
            file = os.open(last, flags | _FILE_FLAGS, mode, dir_fd=here)
        except OSError as error:
            if error.errno in _NOT_PLAIN:
                raise NotPlain(path) from error
            raise
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise NotPlain(path)
    if found.st_nlink > 1 and flags & WRITES:
        os.close(file)
        raise HardLinked(path)
    return file


def read_inside(folder: Path, name: str | Path, most_bytes: int) -> bytes:
    """The bytes of a file; TooLarge beyond `most_bytes`, without reading them."""
    with os.fdopen(open_inside(folder, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise TooLarge(Path(folder, name), size, most_bytes)
        return file.read(most_bytes)


def is_file(folder: Path, name: str | Path) -> bool:
    """Is there a regular file of this name, reached without a link?"""
    return _kind(folder, name, stat.S_ISREG)


def is_folder(folder: Path, name: str | Path) -> bool:
    """Is there a folder of this name, reached without a link?"""
    return _kind(folder, name, stat.S_ISDIR)


def _kind(folder: Path, name: str | Path, wanted: Callable[[int], bool]) -> bool:
    try:
        with folder_of(folder, name) as (here, last):
            return wanted(os.stat(last, dir_fd=here, follow_symlinks=False).st_mode)
    except (OSError, ValueError):  # ValueError: a name that the system does not take
        return False


def names_inside(folder: Path, name: str | Path = ".") -> list[str]:
    """The names in a folder, sorted; none if there is no such folder."""
    try:
        with _open_folder(folder, _parts(name)) as here:
            return sorted(os.listdir(here))
    except FileNotFoundError:
        return []


# --- writing ---


def replace_inside(folder: Path, name: str | Path, data: bytes, mode: int = 0o666) -> None:
    """Put a file in place in one step, safe on the disk when this returns: readers see the old one or the new one."""
    with folder_of(folder, name) as (here, last):
        draft = f".{last}.{secrets.token_hex(8)}{DRAFT_END}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE_FLAGS
            with os.fdopen(os.open(draft, flags, mode, dir_fd=here), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, last, src_dir_fd=here, dst_dir_fd=here)
            os.fsync(here)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=here)
            raise


def make_folder(folder: Path, name: str | Path, mode: int = 0o777) -> Path:
    """Make a folder below a folder that is there, unless it is; a link of that name is refused."""
    parts = _parts(name)
    for index, part in enumerate(parts):
        with _open_folder(folder, parts[:index]) as here, suppress(FileExistsError):
            os.mkdir(part, mode, dir_fd=here)
            os.fsync(here)
    with _open_folder(folder, parts):
        return Path(folder, name)


def rename_inside(folder: Path, old: str, new: str) -> None:
    """Give a name in a folder another one there, in place of whatever had that."""
    with _open_folder(folder, ()) as here:
        os.replace(old, new, src_dir_fd=here, dst_dir_fd=here)


def remove_file(folder: Path, name: str | Path) -> None:
    """Remove one name, if it is there; of a link the link itself."""
    with suppress(FileNotFoundError), folder_of(folder, name) as (here, last):
        os.unlink(last, dir_fd=here)


def remove_tree(folder: Path, name: str | Path) -> None:
    """Remove a folder and all that is in it; what links lead to stays."""
    with folder_of(folder, name) as (here, last):
        shutil.rmtree(last, dir_fd=here)


def remove_drafts(folder: Path) -> None:
    """Remove what a killed writer left of files that it was about to put in place."""
    for name in names_inside(folder):
        if name.startswith(".") and name.endswith(DRAFT_END):
            with suppress(OSError):
                remove_file(folder, name)


def sync_folder(path: Path) -> None:
    """Make the names in a folder safe on the disk."""
    with _open_folder(path, ()) as here:
        os.fsync(here)


# --- logs ---


def open_log(file: str | Path, flags: int = os.O_WRONLY) -> int:
    """A descriptor that appends to a log, readable by its owner only; `file` is `<run folder>/<sub-folder>/<name>`.

    The null device is taken for a log that nobody wants.
    """
    if str(file) == os.devnull:
        return os.open(os.devnull, flags | os.O_CLOEXEC)
    folder = Path(file).absolute().parents[1]
    name = Path(file).absolute().relative_to(folder)
    make_folder(folder, name.parent)
    return open_inside(folder, name, flags | os.O_CREAT | os.O_APPEND, 0o600)


def require_plain(folder: Path, name: str) -> None:
    """Refuse a folder with anything but regular files in it; one that is not there has none."""
    for each in names_inside(folder, name):
        if not is_file(folder, f"{name}/{each}"):
            raise NotPlain(Path(folder, name, each))


# --- is it still the same folder? ---


class Identity:
    """Which folder a path led to when this was made; the folder is held open, so that no other gets its number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held = os.open(folder, _FOLDER_FLAGS)

    def unchanged(self) -> bool:
        """Does the path still lead to the same folder? It does not once that was renamed or removed."""
        try:
            return os.path.samestat(os.fstat(self._held), os.stat(self.folder))
        except OSError:
            return False

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._held)
