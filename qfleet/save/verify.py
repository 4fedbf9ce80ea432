"""Checks that checkpoints on disk are as they were written. Nothing here changes a file."""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from qfleet.errors import NoCheckpointError, QfleetError, StorageError
from qfleet.files import NotRegularFile, is_folder, list_inside, open_inside
from qfleet.save.damage import Damaged
from qfleet.save.manifest import MANIFEST_NAME, FileEntry, Manifest, parse_manifest, step_of

MAX_MANIFEST_BYTES = 16 << 20
# We write no holes. A filesystem that compresses may make some of zeros; a forged file of holes takes hours to hash.
MAX_HOLE_BYTES = 1 << 30
# Errors that mean lost bytes; any other (no permission, no memory) says nothing about the checkpoint.
_LOST_BYTES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EBADMSG, errno.ENXIO}


class FileVerdict(NamedTuple):
    """The result of checking one checkpoint."""

    name: str
    ok: bool
    detail: str


def verify_run(path: Path) -> list[FileVerdict]:
    """A verdict for each checkpoint of a run directory (or for one checkpoint directory), oldest first."""
    if step_of(path.name) is not None:
        return [_verdict(path)]
    root = path / "checkpoints" if os.path.lexists(path / "checkpoints") else path
    require_folder(root)
    folders = [folder for _, folder in step_folders(root)]
    if not folders:
        raise NoCheckpointError(
            f"There is no checkpoint in {root}.",
            "A checkpoint is a directory step_<12 digits>, and none is there.",
            "Give the directory of a run that has saved at least once.",
        )
    # A folder that disappeared meanwhile was pruned by the run itself.
    return [verdict for folder in folders if (verdict := _verdict(folder)).ok or os.path.lexists(folder)]


def require_folder(root: Path) -> None:
    """Refuse a path that is no folder: a link could lead into another run's checkpoints."""
    if os.path.lexists(root) and not is_folder(root.parent, root.name):
        raise NoCheckpointError(
            f"{root} is not a folder.",
            "A link, a file or a device is in its place; a run keeps its checkpoints in a folder of its own.",
            "Restore the directory from a copy; nothing was touched.",
        )


def verify(path: Path) -> list[str]:
    """The problems of one checkpoint directory; none means that every byte of it is as written."""
    return _problems_of(path)[1]


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """The checkpoint directories under `root` by step, oldest first, whole or not."""
    try:
        names = list_inside(root.parent, root.name)
    except OSError as error:
        raise _unreadable_error(str(root), error) from None
    steps = ((step, root / name) for name in names if (step := step_of(name)) is not None)
    return sorted((step, path) for step, path in steps if is_folder(root, path.name))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint directory; its step must be that of the directory's name."""
    with open_saved(folder, MANIFEST_NAME) as file:
        manifest = parse_manifest(file.read(MAX_MANIFEST_BYTES + 1))
    if step_of(folder.name) != manifest.step:
        raise Damaged(folder.name, f"{MANIFEST_NAME} is that of step {manifest.step}")
    return manifest


def tree_problems(folder: Path, files: Mapping[str, FileEntry]) -> list[str]:
    """Missing, added or resized files and files of another type, found without reading them."""
    with as_damage(folder.name):
        found = dict(_walk(folder, files))
    extra = sorted(found.keys() - files.keys() - {MANIFEST_NAME})
    changed = (_file_problem(name, entry, found.get(name)) for name, entry in files.items())
    return [f"{name} is not in the manifest" for name in extra] + [change for change in changed if change]


def hash_problem(folder: Path, name: str, entry: FileEntry) -> str | None:
    """The problem of one file's bytes, if any; the file is read as a stream."""
    with open_saved(folder, name) as file:
        if (holes := entry.bytes - os.fstat(file.fileno()).st_blocks * 512) > MAX_HOLE_BYTES:
            return f"{name} has {holes} bytes that were never written"
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == entry.sha256 else f"{name} does not have the hash the manifest gives"


@contextmanager
def open_saved(folder: Path, name: str) -> Iterator[BufferedReader]:
    """Open a regular file for reading, without following links or waiting for pipes."""
    with as_damage(name):
        try:
            descriptor = open_inside(folder, name)
        except NotRegularFile:
            raise Damaged(name, f"{name} is not a plain file") from None
        with open(descriptor, "rb") as file:
            yield file


@contextmanager
def as_damage(name: str) -> Iterator[None]:
    """Raise an OSError as `Damaged`, or as a `StorageError` if it says nothing about the bytes."""
    try:
        yield
    except OSError as error:
        if error.errno not in _LOST_BYTES:
            raise _unreadable_error(name, error) from None
        raise Damaged(name, f"{name} cannot be read ({error.strerror})") from None


def _walk(folder: Path, files: Mapping[str, FileEntry]) -> Iterator[tuple[str, os.stat_result]]:
    """All files of a checkpoint by relative name; directories that the manifest does not imply are not entered."""
    known = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False) and name in known:
                    pending.append(name + "/")
                else:
                    yield name, entry.stat(follow_symlinks=False)


def _file_problem(name: str, entry: FileEntry, found: os.stat_result | None) -> str | None:
    if found is None:
        return f"{name} is missing"
    if not stat.S_ISREG(found.st_mode):
        return f"{name} is not a plain file"
    if found.st_size != entry.bytes:
        return f"{name} has {found.st_size} bytes instead of {entry.bytes}"
    return None


def _problems_of(folder: Path) -> tuple[dict[str, FileEntry], list[str]]:
    try:
        files = read_manifest(folder).files
        problems = tree_problems(folder, files)
        return files, problems or [bad for name, entry in files.items() if (bad := hash_problem(folder, name, entry))]
    except Damaged as damage:
        return {}, damage.problems
    except QfleetError as error:
        return {}, [error.what]


def _verdict(folder: Path) -> FileVerdict:
    files, problems = _problems_of(folder)
    size = sum(entry.bytes for entry in files.values())
    return FileVerdict(folder.name, not problems, "; ".join(problems) or f"{len(files)} files, {size} bytes")


def _unreadable_error(name: str, error: OSError) -> StorageError:
    return StorageError(
        f"{name} cannot be read: {error.strerror}.",
        "The operating system refused, so nothing is known about the checkpoint itself.",
        "Check the owner and permissions of the run directory and the health of the disk.",
    )
