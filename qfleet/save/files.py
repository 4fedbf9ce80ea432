"""The few file operations a commit is made of, behind a seam so that tests can stop between any two of them."""

import os
import shutil
from pathlib import Path
from typing import Protocol, TypeAlias

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
    """The operating system's files."""

    def make_dir(self, path: Path) -> None:
        """Make one directory that does not exist yet."""
        path.mkdir()

    def write(self, path: Path, data: Data) -> None:
        """Make a new file with these bytes."""
        with open(path, "xb") as file:
            file.write(data)

    def fsync(self, path: Path) -> None:
        """Make the bytes of a file safe."""
        _fsync(path, os.O_RDWR)

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory safe."""
        _fsync(path, os.O_RDONLY | os.O_DIRECTORY)

    def link(self, source: Path, path: Path) -> None:
        """Give a file a second name."""
        os.link(source, path, follow_symlinks=False)

    def rename(self, source: Path, path: Path) -> None:
        """Move a file or directory within one filesystem."""
        os.rename(source, path)

    def remove(self, path: Path) -> None:
        """Delete a directory and all in it."""
        shutil.rmtree(path)

    def free_bytes(self, path: Path) -> int:
        """How much an ordinary user may still write."""
        return shutil.disk_usage(path).free


REAL = RealFiles()


def _fsync(path: Path, flags: int) -> None:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
