"""The file operations of a commit behind a Protocol, so that tests can stop between any two of them."""

import os
import shutil
from pathlib import Path
from typing import Protocol, TypeAlias

from qfleet.files import open_folder, open_inside, parent_folder, remove_tree

Data: TypeAlias = bytes | bytearray | memoryview


class FileLayer(Protocol):
    """Operations that change a disk. Nothing is safe from a power cut before its fsync."""

    def make_dir(self, path: Path) -> None:
        """Make one directory that does not exist yet."""
        ...

    def write(self, path: Path, data: Data) -> None:
        """Make a new file with these bytes."""
        ...

    def fsync(self, path: Path) -> None:
        """Make the bytes of a file safe."""
        ...

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory safe."""
        ...

    def link(self, source: Path, path: Path) -> None:
        """Give a file a second name."""
        ...

    def rename(self, source: Path, path: Path) -> None:
        """Move a file or directory within one filesystem."""
        ...

    def remove(self, path: Path) -> None:
        """Delete a directory and all in it."""
        ...

    def free_bytes(self, path: Path) -> int:
        """How much an ordinary user may still write."""
        ...


class RealFiles:
    """The operating system's files below one folder; no link below it is followed, nothing outside it is touched."""

    folder = Path("/")  # the default: no part of any path may be a link

    def __init__(self, folder: Path = folder) -> None:
        self.folder = folder

    def _name(self, path: Path) -> Path:
        return path.relative_to(self.folder)

    def make_dir(self, path: Path) -> None:
        """Make one directory that does not exist yet."""
        with parent_folder(self.folder, self._name(path)) as (here, name):
            os.mkdir(name, dir_fd=here)

    def write(self, path: Path, data: Data) -> None:
        """Make a new file with these bytes."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(open_inside(self.folder, self._name(path), flags), "wb") as file:
            file.write(data)

    def fsync(self, path: Path) -> None:
        """Make the bytes of a file safe."""
        _fsync(open_inside(self.folder, self._name(path), os.O_RDWR))

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory safe."""
        with open_folder(self.folder, self._name(path)) as here:
            os.fsync(here)

    def link(self, source: Path, path: Path) -> None:
        """Give a file a second name."""
        with (
            parent_folder(self.folder, self._name(source)) as (there, old),
            parent_folder(self.folder, self._name(path)) as (here, new),
        ):
            os.link(old, new, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)

    def rename(self, source: Path, path: Path) -> None:
        """Move a file or directory within one filesystem."""
        with (
            parent_folder(self.folder, self._name(source)) as (there, old),
            parent_folder(self.folder, self._name(path)) as (here, new),
        ):
            os.rename(old, new, src_dir_fd=there, dst_dir_fd=here)

    def remove(self, path: Path) -> None:
        """Delete a directory and all in it."""
        remove_tree(self.folder, self._name(path))

    def free_bytes(self, path: Path) -> int:
        """How much an ordinary user may still write."""
        return shutil.disk_usage(path).free


def _fsync(file: int) -> None:
    try:
        os.fsync(file)
    finally:
        os.close(file)
