"""Memory that several processes see. It has no name, so the kernel frees it with the last process that holds it."""

import fcntl
import mmap
import os
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any

# Constants of Linux, which other systems' modules lack.
# no more seals, no shrinking, no growing
_ADD_SEALS = 1033
_SEALS = 0x0001 | 0x0002 | 0x0004

LINE = 128  # bytes that no two writers share: a cache line, and its neighbour that is fetched along


def lines(size: int) -> int:
    """So many bytes, rounded up to whole lines."""
    return -(-size // LINE) * LINE


class SharedMemory:
    """`size` bytes of shared memory, zeros at first; given to a child as an argument of its process."""

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
        """The bytes themselves; what was made from this view must be dropped before the memory is given back."""
        return self._view

    def fileno(self) -> int:
        """The descriptor behind it, as long as it is open."""
        return self._fd

    def close(self) -> None:
        """Let go. Arrays that still look at the memory keep it alive until they are dropped themselves."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        try:
            self._view.release()
            self._memory.close()
        except BufferError:
            pass  # freed when the last array is

    def __reduce__(self) -> tuple[Any, ...]:
        if self._fd < 0:
            raise ValueError("a closed region cannot be handed on")
        return _received, (DupFd(self._fd), self.size)

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
    if not hasattr(os, "memfd_create"):
        return _unlinked(size)
    fd = os.memfd_create("qfleet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    # A process that made the memory smaller would kill all others with SIGBUS.
    fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    return fd


def _unlinked(size: int) -> int:
    with tempfile.TemporaryFile(buffering=0) as file:
        file.truncate(size)
        return os.dup(file.fileno())


def _received(handle: Any, size: int) -> SharedMemory:
    return region_of(handle.detach(), size)


def region_of(fd: int, size: int) -> SharedMemory:
    """Memory that another process has handed over as a descriptor."""
    region = SharedMemory.__new__(SharedMemory)
    region._map(fd, size)
    return region
