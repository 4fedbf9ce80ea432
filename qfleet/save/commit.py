"""Writing and deleting checkpoints: the only file operations that change a run's checkpoints.

Files are written and fsynced in `.tmp-<uuid>`, the manifest last, and the directory is then renamed to
`step_<12 digits>`. A second commit of the same step replaces the first: the first is renamed to `.old-step_...` until
the second is safe, and gets its name back at the next start if that never happened.
"""

import errno
import hashlib
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from qfleet.errors import StorageError
from qfleet.files import is_folder, list_inside, read_inside
from qfleet.save.files import Data, RealFiles
from qfleet.save.manifest import MANIFEST_NAME, FileEntry, Manifest, valid_name, write_manifest

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass(frozen=True, slots=True)
class Link:
    """A file of an earlier checkpoint, to be hard-linked instead of written again."""

    path: Path
    sha256: str
    bytes: int


Blob: TypeAlias = Data | Link


def temporary_name(root: Path) -> Path:
    """A new path for a directory that is not yet, or no longer, a checkpoint."""
    return root / f".tmp-{uuid.uuid4().hex}"


def make_root(files: RealFiles, root: Path) -> None:
    """Make the directory of a run's checkpoints, but not the run's own: if that is missing, it was moved."""
    if not is_folder(root.parent, root.name):
        files.make_dir(root)
        files.fsync_dir(root.parent)


def fill(files: RealFiles, folder: Path, blobs: Iterable[tuple[str, Blob]], blank: Manifest) -> tuple[Manifest, int]:
    """Write all files into a new directory, the manifest last; returns the manifest and the bytes written."""
    files.make_dir(folder)
    made = {folder}
    entries: dict[str, FileEntry] = {}
    written = 0
    for name, blob in blobs:
        if not valid_name(name) or name in entries:
            raise ValueError(f"{name!r} is not a file name for a checkpoint, or appears twice")
        _make_parents(files, folder, name, made)
        entries[name], new_bytes = _put(files, folder / name, blob)
        written += new_bytes
    manifest = Manifest(blank.step, entries, blank.meta)
    raw = write_manifest(manifest)
    _store(files, folder / MANIFEST_NAME, raw)
    for place in sorted(made, reverse=True):
        files.fsync_dir(place)
    return manifest, written + len(raw)


def publish(files: RealFiles, temporary: Path, path: Path) -> None:
    """Give a finished directory its name; from now on the checkpoint exists."""
    old = path.with_name(f".old-{path.name}")
    replaces = is_folder(path.parent, path.name)
    try:
        if replaces:
            discard(files, old)
            files.rename(path, old)
        files.rename(temporary, path)
    except BaseException:
        if replaces:
            with suppress(OSError):
                files.rename(old, path)
        raise
    files.fsync_dir(path.parent)
    if replaces:
        discard(files, old)


def delete_checkpoint(files: RealFiles, path: Path) -> None:
    """Delete a checkpoint so that a crash leaves no part of it behind as a checkpoint."""
    doomed = temporary_name(path.parent)
    files.rename(path, doomed)
    files.fsync_dir(path.parent)
    discard(files, doomed)


def discard(files: RealFiles, folder: Path) -> None:
    """Delete a directory; if that fails, the next start deletes it."""
    with suppress(OSError):
        files.remove(folder)


def recover(files: RealFiles, root: Path) -> int:
    """Clean up after a crashed writer, interrupted replacements first; returns the number of directories removed."""
    names = list_inside(root.parent, root.name)
    for old in (root / name for name in names if name.startswith(".old-step_") and is_folder(root, name)):
        path = root / old.name.removeprefix(".old-")
        with suppress(OSError):
            if is_folder(root, path.name):
                delete_checkpoint(files, old)
            else:
                files.rename(old, path)
                files.fsync_dir(root)
    leftovers = [root / name for name in names if name.startswith(".tmp-") and is_folder(root, name)]
    for leftover in leftovers:
        discard(files, leftover)
    return len(leftovers)


def _put(files: RealFiles, path: Path, blob: Blob) -> tuple[FileEntry, int]:
    if isinstance(blob, Link):
        return FileEntry(blob.bytes, blob.sha256), _link(files, path, blob)
    _store(files, path, blob)
    size = memoryview(blob).nbytes
    return FileEntry(size, hashlib.sha256(blob).hexdigest()), size


def _link(files: RealFiles, path: Path, link: Link) -> int:
    """Hard-link the file, or copy it where the filesystem has no links; returns the bytes written."""
    try:
        files.link(link.path, path)
        same = path.stat(follow_symlinks=False).st_size == link.bytes
        written = 0
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        data = read_inside(link.path.parent, link.path.name, link.bytes)
        same = hashlib.sha256(data).hexdigest() == link.sha256
        written = len(data)
        _store(files, path, data)
    if not same:
        raise StorageError(
            f"{link.path} has changed since it was committed.",
            "Checkpoints share files that did not change between them, and this one did.",
            "Run `qfleet verify RUN` to see which checkpoints are whole, and check the health of the disk.",
        )
    return written


def _store(files: RealFiles, path: Path, data: Data) -> None:
    files.write(path, data)
    files.fsync(path)


def _make_parents(files: RealFiles, folder: Path, name: str, made: set[Path]) -> None:
    parents = [place for place in (folder / name).parents if place.is_relative_to(folder) and place not in made]
    for place in reversed(parents):
        files.make_dir(place)
        made.add(place)
