"""Shared memory without a name: the kernel frees it when the last process that maps it ends."""

import fcntl
import mmap
import os
from multiprocessing.reduction import DupFd
from typing import Any

from qfleet.heartbeat import unnamed_file

# Constants of Linux, which the fcntl modules of other systems lack.
_ADD_SEALS = 1033
_SEALS = 0x0001 | 0x0002 | 0x0004  # no more seals, no shrinking, no growing

CACHE_LINE_BYTES = 128  # no two writers share these: a cache line and the neighbour that is prefetched with it


def round_to_cache_lines(size: int) -> int:
    """A number of bytes, rounded up to whole cache lines."""
    return -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


class SharedMemory:
    """`size` bytes of shared memory, initially zero; passed to a child as an argument of its process."""

    size: int
    _fd: int
    _memory: mmap.mmap
    _view: memoryview

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a region needs at least one byte, not {size}")
        self._map(_create(size), size)

    @property
    def view(self) -> memoryview:
        """The bytes; objects made from this view must be dropped before the memory can be freed."""
        return self._view

    def fileno(self) -> int:
        """The file descriptor, valid until `close`."""
        return self._fd

    def close(self) -> None:
        """Unmap the memory; arrays that still use it keep it mapped until they are dropped."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        try:
            self._view.release()
            self._memory.close()
        except BufferError:
            pass  # freed with the last array

    def __reduce__(self) -> tuple[Any, ...]:
        if self._fd < 0:
            raise ValueError("a closed region cannot be sent to another process")
        return _from_duplicate, (DupFd(self._fd), self.size)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def _map(self, fd: int, size: int) -> None:
        try:
            if os.fstat(fd).st_size < size:
                raise ValueError(f"a region of {size} bytes has only {os.fstat(fd).st_size}")
            self._memory = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self.size = size
        self._view = memoryview(self._memory)


def _create(size: int) -> int:
    fd = unnamed_file(size)
    if hasattr(os, "memfd_create"):
        # A process that shrank the memory would kill all others with SIGBUS.
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    return fd


def _from_duplicate(duplicate: Any, size: int) -> SharedMemory:
    return shared_memory_from_descriptor(duplicate.detach(), size)


def shared_memory_from_descriptor(fd: int, size: int) -> SharedMemory:
    """Map memory whose descriptor another process sent."""
    region = SharedMemory.__new__(SharedMemory)
    region._map(fd, size)
    return region
