"""What a data set needs of the place where its files are."""

from typing import Protocol


class Place(Protocol):
    """A folder of files, wherever it is. Names are relative, with `/` between their parts.

    Every error that a user can act on is a StorageError: the file is missing, too large, no regular file, or the place
    cannot be reached.
    """

    url: str  # how messages and run directories name it: without credentials

    def exists(self, name: str) -> bool:
        """Is there a file of this name?"""

    def size(self, name: str) -> int:
        """The number of its bytes."""

    def read(self, name: str, max_bytes: int) -> bytes:
        """The whole file; a larger one is refused without being read."""

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of a file; fewer if it ends before."""

    def names(self) -> list[str]:
        """The names of all files, sorted; none if there is no such folder."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all; an existing one is replaced."""

    def write_new(self, name: str, data: bytes) -> bool:
        """Write a file, whole or not at all, unless there is one of this name; was it written?"""
