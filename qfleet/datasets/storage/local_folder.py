"""A folder on this machine. Links below it are not followed, and only regular files are opened."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from qfleet.errors import StorageError
from qfleet.files import (
    is_file,
    is_folder,
    list_inside,
    make_folder,
    open_inside,
    read_inside,
    replace_inside,
    write_new_inside,
)


class LocalFolder:
    """The files below a folder; the folder is made by the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder.absolute())

    def exists(self, name: str) -> bool:
        """Is there a regular file of this name?"""
        return is_file(self.folder, name)

    def size(self, name: str) -> int:
        """The number of its bytes."""
        with self._clear_errors(name, "read"), open(open_inside(self.folder, name), "rb") as file:
            return os.fstat(file.fileno()).st_size

    def read(self, name: str, max_bytes: int) -> bytes:
        """The whole file."""
        with self._clear_errors(name, "read"):
            return read_inside(self.folder, name, max_bytes)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of a file."""
        with self._clear_errors(name, "read"), open(open_inside(self.folder, name), "rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    def names(self) -> list[str]:
        """The names of all files; unfinished files of a killed writer are left out."""
        with self._clear_errors("", "read"):
            return sorted(self._walk(""))

    def _walk(self, folder: str) -> Iterator[str]:
        for entry in list_inside(self.folder, folder or "."):
            name = f"{folder}{entry}"
            if is_folder(self.folder, name):
                yield from self._walk(f"{name}/")
            elif not entry.startswith("."):
                yield name

    def write(self, name: str, data: bytes) -> None:
        """Write a file durably; an existing one is replaced."""
        with self._clear_errors(name, "written"):
            self._make_parent(name)
            replace_inside(self.folder, name, data)

    def write_new(self, name: str, data: bytes) -> bool:
        """Write a file durably, unless there is one of this name."""
        with self._clear_errors(name, "written"):
            self._make_parent(name)
            return write_new_inside(self.folder, name, data)

    def _make_parent(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        parent = PurePosixPath(name).parent
        make_folder(self.folder, parent)  # type: ignore[arg-type]

    @contextmanager
    def _clear_errors(self, name: str, done: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise StorageError(
                f"{self.folder / name} cannot be {done}",
                f"{reason[:1].upper()}{reason[1:]}.",
                "Check the path and its permissions; `qfleet data validate` says whether a data set is whole.",
            ) from error
