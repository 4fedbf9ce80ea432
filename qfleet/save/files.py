"""The file operations of a commit as methods of one class, so that tests can stop between any two of them."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from qfleet.files import open_folder, open_inside, parent_folder, remove_tree

Data: TypeAlias = bytes | bytearray | memoryview


@dataclass(eq=False)
class RealFiles:
    """The operating system's files below one folder; no link below it is followed, nothing outside it is touched.

    Nothing is safe from a power cut before its fsync.
    """

    folder: Path = Path("/")  # the default: no part of any path may be a link

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
        with open(open_inside(self.folder, self._name(path), os.O_RDWR), "rb+") as file:
            os.fsync(file.fileno())

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
