"""Safe access to files inside an untrusted folder: the only module that opens, creates or removes them.

Every function takes a folder and a name below it. The folder itself may be a link that the user named. Below it no
link is followed, in any part of the name, and only regular files are opened: a fifo cannot block its reader, a device
is not read. Each part of a name is opened relative to the descriptor of its parent, so a name cannot be replaced by a
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
_NOT_REGULAR = {errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR}
DRAFT_SUFFIX = ".draft"
WRITES = os.O_WRONLY | os.O_RDWR
BLOCK_BYTES = 512  # the unit of st_blocks


class NotRegularFile(OSError):
    """A link, a fifo, a folder or a device instead of a regular file."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file", str(path))


class HardLinked(OSError):
    """A file with a second name, which may lie outside of its folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EMLINK, "it has a second name (a hard link)", str(path))


class TooLarge(OSError):
    """A file larger than qfleet would ever write it."""

    def __init__(self, path: Path, size: int, max_bytes: int) -> None:
        super().__init__(errno.EFBIG, f"it has {size:,} bytes, and {max_bytes:,} are the most", str(path))


def _parts(name: str | Path) -> tuple[str, ...]:
    """Split a relative name; refuse one that leaves its folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in str(name):
        raise ValueError(f"{str(name)!r} does not stay inside its folder")
    return path.parts


@contextmanager
def open_folder(folder: Path, name: str | Path = ".") -> Iterator[int]:
    """The descriptor of a folder below `folder`, reached without following a link."""
    parts = _parts(name)
    descriptor = os.open(folder, _FOLDER_FLAGS)
    try:
        for index, part in enumerate(parts):
            try:
                child = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                if error.errno in _NOT_REGULAR:
                    raise NotRegularFile(Path(folder, *parts[: index + 1])) from error
                raise
            os.close(descriptor)
            descriptor = child
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def parent_folder(folder: Path, name: str | Path) -> Iterator[tuple[int, str]]:
    """The descriptor of the folder that holds a name, reached without following a link, and the name's last part."""
    *parents, last = _parts(name)
    with open_folder(folder, Path(*parents)) as parent:
        yield parent, last


# --- reading ---


def open_inside(folder: Path, name: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor.

    A file with a second name is not opened for writing: that name may lie outside the folder.
    """
    path = Path(folder, name)
    with parent_folder(folder, name) as (parent, last):
        try:
            file = os.open(last, flags | _FILE_FLAGS, mode, dir_fd=parent)
        except OSError as error:
            if error.errno in _NOT_REGULAR:
                raise NotRegularFile(path) from error
            raise
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise NotRegularFile(path)
    if found.st_nlink > 1 and flags & WRITES:
        os.close(file)
        raise HardLinked(path)
    return file


def read_inside(folder: Path, name: str | Path, max_bytes: int) -> bytes:
    """The bytes of a file; a larger one raises TooLarge without being read."""
    with os.fdopen(open_inside(folder, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise TooLarge(Path(folder, name), size, max_bytes)
        return file.read(max_bytes)


def is_file(folder: Path, name: str | Path) -> bool:
    """Is there a regular file of this name, reached without a link?"""
    return _has_type(folder, name, stat.S_ISREG)


def is_folder(folder: Path, name: str | Path) -> bool:
    """Is there a folder of this name, reached without a link?"""
    return _has_type(folder, name, stat.S_ISDIR)


def _has_type(folder: Path, name: str | Path, is_type: Callable[[int], bool]) -> bool:
    try:
        with parent_folder(folder, name) as (parent, last):
            return is_type(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode)
    except (OSError, ValueError):  # ValueError: a name that the system does not accept
        return False


def list_inside(folder: Path, name: str | Path = ".") -> list[str]:
    """The names in a folder, sorted; none if there is no such folder."""
    try:
        with open_folder(folder, name) as descriptor:
            return sorted(os.listdir(descriptor))
    except FileNotFoundError:
        return []


# --- writing ---


def replace_inside(folder: Path, name: str | Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file atomically and durably: readers see the old content or the new."""
    with parent_folder(folder, name) as (parent, last), _draft(parent, last, data, mode) as draft:
        os.replace(draft, last, src_dir_fd=parent, dst_dir_fd=parent)
        os.fsync(parent)


def overwrite_inside(folder: Path, name: str | Path, data: bytes) -> None:
    """Write over the bytes of a file that is there: this may work where a full disk has no room for a new one.

    Readers may see a part of it meanwhile.
    """
    with open(open_inside(folder, name, os.O_WRONLY), "wb", buffering=0) as file:
        if len(data) > os.fstat(file.fileno()).st_blocks * BLOCK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(Path(folder, name)))
        file.write(data)
        file.truncate(len(data))
        os.fsync(file.fileno())


def write_new_inside(folder: Path, name: str | Path, data: bytes, mode: int = 0o666) -> bool:
    """Write a file atomically and durably, unless there is one of this name; was it written?"""
    with parent_folder(folder, name) as (parent, last), _draft(parent, last, data, mode) as draft:
        try:
            os.link(draft, last, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
        except FileExistsError:
            return False
        finally:
            os.unlink(draft, dir_fd=parent)
        os.fsync(parent)
        return True


@contextmanager
def _draft(parent: int, last: str, data: bytes, mode: int) -> Iterator[str]:
    """The name of a durable file with this content beside the wanted one; an error removes it."""
    draft = f".{last}.{secrets.token_hex(8)}{DRAFT_SUFFIX}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE_FLAGS
        with os.fdopen(os.open(draft, flags, mode, dir_fd=parent), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=parent)
        raise


def make_folder(folder: Path, name: str | Path, mode: int = 0o777) -> Path:
    """Create a folder and its parents below an existing folder, if they are missing; a link is refused."""
    parts = _parts(name)
    for index, part in enumerate(parts):
        with open_folder(folder, Path(*parts[:index])) as parent, suppress(FileExistsError):
            os.mkdir(part, mode, dir_fd=parent)
            os.fsync(parent)
    with open_folder(folder, name):
        return Path(folder, name)


def rename_inside(folder: Path, old: str, new: str) -> None:
    """Rename a file within its folder; an existing file of the new name is replaced."""
    with open_folder(folder) as descriptor:
        os.replace(old, new, src_dir_fd=descriptor, dst_dir_fd=descriptor)


def remove_file(folder: Path, name: str | Path) -> None:
    """Remove a file if it exists; of a link, the link itself."""
    with suppress(FileNotFoundError), parent_folder(folder, name) as (parent, last):
        os.unlink(last, dir_fd=parent)


def remove_tree(folder: Path, name: str | Path) -> None:
    """Remove a folder with its contents; targets of links stay."""
    with parent_folder(folder, name) as (parent, last):
        shutil.rmtree(last, dir_fd=parent)


def remove_drafts(folder: Path) -> None:
    """Remove the unfinished files of a killed writer."""
    for name in list_inside(folder):
        if name.startswith(".") and name.endswith(DRAFT_SUFFIX):
            with suppress(OSError):
                remove_file(folder, name)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable on disk."""
    with open_folder(path) as descriptor:
        os.fsync(descriptor)


# --- logs ---


def open_log(file: str | Path, flags: int = os.O_WRONLY) -> int:
    """Open a log for appending, readable by its owner only; `file` is `<run folder>/<sub-folder>/<name>`.

    The null device discards the log.
    """
    if str(file) == os.devnull:
        return os.open(os.devnull, flags | os.O_CLOEXEC)
    folder = Path(file).absolute().parents[1]
    name = Path(file).absolute().relative_to(folder)
    make_folder(folder, name.parent)
    return open_inside(folder, name, flags | os.O_CREAT | os.O_APPEND, 0o600)


def require_regular_files(folder: Path, name: str) -> None:
    """Refuse a folder that contains anything but regular files; a missing folder is accepted."""
    for file in list_inside(folder, name):
        if not is_file(folder, f"{name}/{file}"):
            raise NotRegularFile(Path(folder, name, file))


# --- is it still the same folder? ---


class FolderIdentity:
    """The folder that a path named at first; it stays open, so that its inode number is not reused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor = os.open(folder, _FOLDER_FLAGS)

    def unchanged(self) -> bool:
        """Does the path still name the same folder, which was neither renamed nor removed?"""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.folder))
        except OSError:
            return False

    def close(self) -> None:
        """Close the folder."""
        os.close(self._descriptor)
