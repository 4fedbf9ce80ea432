"""Arrays that took time to make, kept in files of this machine and mapped into memory.

A file has a header and its arrays, each at a multiple of `ALIGN` bytes. The header names its own key, every array, and
a checksum of all of them; it is written last, and the file gets its name when it is whole. Whoever opens a file checks
the header and the length each time, and the checksum the first time in a process. A file that fails is removed, and its
arrays are made again.

Several processes may use one cache: a file that somebody has mapped is locked (shared) and is not removed. One process
makes the arrays of a key while others wait, for `WAIT_SECONDS` at most. Nothing is written durably: what a power
failure leaves unfinished has another checksum.
"""

import fcntl
import mmap
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from qfleet.data import Array
from qfleet.files import DRAFT_SUFFIX, list_inside, open_inside, remove_file, rename_inside

FORMAT = 1
HEADER_BYTES = 4_096
ALIGN = 64
WAIT_SECONDS = 120.0
POLL_SECONDS = 0.02
SPARE_BYTES = 256 << 20  # that stay free on the disk
SUFFIX = ".arrays"
LOCK = ".lock"
ROOM = "room"  # the lock of who makes room
Size: TypeAlias = Annotated[int, Meta(ge=0, le=2**40)]


class MappedArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array in a file."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    begin: Size


class ArrayHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the first bytes of a file say."""

    format: int
    key: str
    bytes: Size  # of the whole file
    crc: int  # of all that follows the header
    arrays: tuple[MappedArray, ...]


Arrays: TypeAlias = dict[str, Array]
Shapes: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


class DamagedArrays(ValueError):
    """A file of the cache is not what its header says."""


@dataclass(eq=False)
class ArrayCache:
    """At most `max_bytes` of files in a folder; those opened longest ago go first."""

    folder: Path
    max_bytes: int
    warn: Callable[[str], object] = lambda text: None  # called once, if the cache cannot be used
    wait_seconds: float = WAIT_SECONDS
    num_made: int = 0
    _checked: set[tuple[str, int]] = field(default_factory=set)  # key and inode of files whose checksum was right
    _warned: bool = False

    def get(self, key: str, shapes: Shapes, fill: Callable[[Arrays], None]) -> Arrays | None:
        """The arrays of a key, which `fill` makes if they are not there; None if they cannot be kept on this disk.

        Errors of `fill` are raised, and leave nothing behind.
        """
        header = lay_out(key, shapes)
        if (found := self.open(header)) is not None:
            return found
        if header.bytes > self.max_bytes:
            self._without(f"{header.bytes:,} bytes are more than replay.disk_bytes={self.max_bytes}")
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked(key) as mine:
                if (found := self.open(header)) is not None:
                    return found
                if not mine:
                    return None
                self._write(header, fill)
        except OSError as error:
            self._without(error.strerror or str(error))
            return None
        self.num_made += 1
        return self.open(header)

    def open(self, wanted: ArrayHeader) -> Arrays | None:
        """The arrays of a layout, if they are there and whole."""
        name = wanted.key + SUFFIX
        try:
            file = open_inside(self.folder, name)
        except (OSError, ValueError):
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found = self._mapped(file, wanted)
            with suppress(OSError):
                os.utime(file)
            return found
        except DamagedArrays:
            with suppress(OSError):
                remove_file(self.folder, name)
            return None
        except OSError:
            return None  # somebody is removing it
        finally:
            os.close(file)  # the map keeps the lock

    def _mapped(self, file: int, wanted: ArrayHeader) -> Arrays:
        status = os.fstat(file)
        header = read_header(os.pread(file, HEADER_BYTES, 0), wanted, status.st_size)
        # A private map: nothing that is written into the arrays gets into the file.
        memory = mmap.mmap(file, header.bytes, access=mmap.ACCESS_COPY)
        if (header.key, status.st_ino) not in self._checked:
            with memoryview(memory) as whole, whole[HEADER_BYTES:] as content:
                if zlib.crc32(content) != header.crc:
                    raise DamagedArrays("its checksum is another one")
            self._checked.add((header.key, status.st_ino))
        return views(memory, header)

    def _write(self, header: ArrayHeader, fill: Callable[[Arrays], None]) -> None:
        draft, file = self._room_for(header)
        try:
            memory = mmap.mmap(file, header.bytes)
            fill_map(memory, header, fill)
            rename_inside(self.folder, draft, header.key + SUFFIX)
            fcntl.flock(file, fcntl.LOCK_UN)  # the map may outlive this call
        except BaseException:
            with suppress(OSError):
                remove_file(self.folder, draft)
            raise
        finally:
            os.close(file)

    def _room_for(self, header: ArrayHeader) -> tuple[str, int]:
        """A new file of the size of the header; one process at a time makes room, so that the bound is kept."""
        with self._locked(ROOM):
            self._make_room(header.bytes)
            draft, file = self._new_draft(header.key)
            try:
                os.posix_fallocate(file, 0, header.bytes)  # a full disk is noticed here, not when the map is written to
            except OSError:
                remove_file(self.folder, draft)
                os.close(file)
                raise
        return draft, file

    def _new_draft(self, key: str) -> tuple[str, int]:
        """The name and the descriptor of a new file, locked so that nobody takes it for that of a killed process."""
        while True:
            draft = f".{key}.{secrets.token_hex(8)}{DRAFT_SUFFIX}"
            file = open_inside(self.folder, draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return draft, file
            os.close(file)  # it was removed before it was locked

    @contextmanager
    def _locked(self, key: str) -> Iterator[bool]:
        """Is it this process that makes the arrays of a key? The others wait here until it is done."""
        name = key + LOCK
        file = open_inside(self.folder, name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            mine = self._lock_in_time(file)
            yield mine
            if mine and key != ROOM:
                with suppress(OSError):
                    remove_file(self.folder, name)
        finally:
            os.close(file)

    def _lock_in_time(self, file: int) -> bool:
        limit = time.monotonic() + self.wait_seconds
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() > limit:
                return False
            time.sleep(POLL_SECONDS)

    def _make_room(self, num_bytes: int) -> None:
        """Remove what nobody uses, until as much fits; OSError if it does not."""
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, name in sorted(files):
            full = total + num_bytes > self.max_bytes or free_bytes(self.folder) < num_bytes + SPARE_BYTES
            draft = name.startswith(".")
            if (full or draft) and self._remove_unused(name):
                total -= size
        if total + num_bytes > self.max_bytes:
            raise OSError(f"files in use fill replay.disk_bytes={self.max_bytes}")
        if free_bytes(self.folder) < num_bytes + SPARE_BYTES:
            raise OSError("there is no space left on the disk")

    def _files(self) -> list[tuple[int, int, str]]:
        found = []
        for name in list_inside(self.folder):
            if name.endswith((SUFFIX, DRAFT_SUFFIX)):
                with suppress(OSError):
                    status = os.stat(self.folder / name, follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, name))
        return found

    def _remove_unused(self, name: str) -> bool:
        try:
            file = open_inside(self.folder, name)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_file(self.folder, name)
            return True
        except OSError:
            return False
        finally:
            os.close(file)

    def _without(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            self.warn(f"decoded files are not kept in {self.folder}: {reason}; they are decoded into memory")


def lay_out(key: str, shapes: Shapes) -> ArrayHeader:
    """Where each array will be."""
    begin = HEADER_BYTES
    arrays = []
    for name, (dtype, shape) in shapes.items():
        arrays.append(MappedArray(name, np.dtype(dtype).str, shape, begin))
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        begin += -(-size // ALIGN) * ALIGN
    return ArrayHeader(FORMAT, key, begin, 0, tuple(arrays))


def fill_map(memory: mmap.mmap, header: ArrayHeader, fill: Callable[[Arrays], None]) -> None:
    """Write the arrays, and then the header."""
    fill(views(memory, header))
    with memoryview(memory) as whole, whole[HEADER_BYTES:] as content:
        crc = zlib.crc32(content)
    text = msgspec.json.encode(msgspec.structs.replace(header, crc=crc))
    if len(text) > HEADER_BYTES:
        raise OSError("the names of the arrays do not fit into a header")
    memory[: len(text)] = text


def read_header(data: bytes, wanted: ArrayHeader, num_bytes: int) -> ArrayHeader:
    """The header of a file of this length; DamagedArrays if it has another layout."""
    try:
        header = msgspec.json.decode(data.rstrip(b"\0"), type=ArrayHeader)
    except msgspec.DecodeError as error:
        raise DamagedArrays(str(error)) from error
    if msgspec.structs.replace(header, crc=0) != wanted or num_bytes != wanted.bytes:
        raise DamagedArrays("its header or its length is that of another file")
    return header


def views(memory: mmap.mmap, header: ArrayHeader) -> Arrays:
    """The arrays of a mapped file; they keep the map alive."""
    found = {}
    for each in header.arrays:
        num = int(np.prod(each.shape, dtype=np.int64))
        found[each.name] = np.frombuffer(memory, each.dtype, num, each.begin).reshape(each.shape)
    return found


def free_bytes(folder: Path) -> int:
    """Bytes of the disk that this user may still write."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
