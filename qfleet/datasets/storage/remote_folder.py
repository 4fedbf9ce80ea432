"""A folder of a store that is reached over a network, through fsspec: `s3://bucket/folder`, `hdfs://namenode/folder`.

A request that fails for a passing reason is repeated, at most `ATTEMPTS` times and at most for `TOTAL_SECONDS`; one
that writes many bytes has a second more for each `SLOWEST_BYTES`. Files are read in pieces, each a request. A body is
whole or an error: its length is compared with that of the object. Credentials are found by the store's own library
in its own places (environment, profile, instance); qfleet neither prints nor stores them.
"""

import io
import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from qfleet.errors import QfleetError, StorageError, redacted

ATTEMPTS = 6
TOTAL_SECONDS = 120.0
REQUEST_SECONDS = 30.0
FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 10.0
SLOWEST_BYTES = 1 << 20  # written per second
PIECE_BYTES = 16 << 20  # read by one request
LASTING = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_UNSAFE = re.compile(r"[\x00-\x1f\x7f?#:\\]")  # a library may take these for something else than a name
Result = TypeVar("Result")


class ObjectStore(Protocol):
    """What is used of an fsspec file system; every method may raise OSError."""

    def info(self, path: str) -> dict[str, Any]:
        """`type` and `size` of an object."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Its bytes, or a range of them."""

    def find(self, path: str) -> list[str]:
        """All objects below a path."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> object:
        """Write an object; with mode `create`, only if there is none."""

    def invalidate_cache(self) -> None:
        """Forget listings."""


class ShortBody(OSError):
    """Fewer or more bytes arrived than the object has."""


class RemoteFolder:
    """The objects below a prefix."""

    def __init__(self, url: str, path: str, connect: Callable[[], ObjectStore]) -> None:
        self.url = url
        self._path = path
        self._connect = connect
        self._store: ObjectStore | None = None
        self._owner = 0  # the process that connected: a fork has none of the library's threads

    def exists(self, name: str) -> bool:
        """Is there an object of this name?"""
        try:
            found = self._retried(name, "read", lambda store: store.info(self._full(name)))
            return bool(found["type"] == "file")
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise

    def size(self, name: str) -> int:
        """The number of its bytes."""
        found = self._retried(name, "read", lambda store: store.info(self._full(name)))
        if found["type"] != "file":
            raise self._error(name, "read", "It is a folder.")
        return int(found["size"])

    def read(self, name: str, max_bytes: int) -> bytes:
        """The whole object; a larger one is refused without being read."""
        size = self.size(name)
        if size > max_bytes:
            raise self._error(name, "read", f"It has {size:,} bytes, and {max_bytes:,} are the most.")
        return self._read(name, 0, size)

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of an object."""
        return self._read(name, begin, min(end, self.size(name)))

    def _read(self, name: str, begin: int, end: int) -> bytes:
        body = io.BytesIO()  # its bytes are handed over without a copy
        for start in range(begin, end, PIECE_BYTES):
            body.write(self._read_piece(name, start, min(start + PIECE_BYTES, end)))
        return body.getvalue()

    def _read_piece(self, name: str, begin: int, end: int) -> bytes:
        def read(store: ObjectStore) -> bytes:
            data = store.cat_file(self._full(name), start=begin, end=end)
            if len(data) != end - begin:
                raise ShortBody(f"{len(data):,} bytes arrived instead of {end - begin:,}")
            return data

        return self._retried(name, "read", read)

    def names(self) -> list[str]:
        """The names of all objects."""

        def find(store: ObjectStore) -> list[str]:
            store.invalidate_cache()
            return store.find(self._path)

        start = f"{self._path}/"
        found = self._retried("", "listed", find)
        return sorted(path.removeprefix(start) for path in found if path.startswith(start))

    def write(self, name: str, data: bytes) -> None:
        """Write an object: it is visible when it is whole."""
        self._retried(name, "written", lambda store: store.pipe_file(self._full(name), data), len(data))
        if self.size(name) != len(data):
            raise self._error(name, "written", "The store has another number of bytes than were sent.")

    def write_new(self, name: str, data: bytes) -> bool:
        """Write an object, unless there is one of this name.

        After an attempt whose answer was lost, an object of the same content is the one that was written.
        """
        attempts = 0

        def create(store: ObjectStore) -> object:
            nonlocal attempts
            attempts += 1
            return store.pipe_file(self._full(name), data, mode="create")

        try:
            self._retried(name, "written", create, len(data))
        except StorageError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
            return attempts > 1 and self.size(name) == len(data) and self.read(name, len(data)) == data
        return True

    def _full(self, name: str) -> str:
        parts = name.split("/")
        if not all(parts) or {".", ".."} & set(parts) or _UNSAFE.search(name):
            raise self._error(name, "used", "Such a name does not stay inside its folder.")
        return f"{self._path}/{name}"

    def _retried(self, name: str, done: str, call: Callable[[ObjectStore], Result], num_bytes: int = 0) -> Result:
        longer = num_bytes / SLOWEST_BYTES
        limit = time.monotonic() + TOTAL_SECONDS + longer
        wait = FIRST_WAIT_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                seconds = min(REQUEST_SECONDS + longer, limit - time.monotonic())
                return in_time(lambda: call(self._connected()), seconds)
            except QfleetError:
                raise
            except Exception as error:
                pause = min(wait * random.uniform(0.5, 1.5), LONGEST_WAIT_SECONDS)
                if not passing(error) or attempt == ATTEMPTS or time.monotonic() + pause > limit:
                    raise self._error(name, done, f"{reason(error)} (attempt {attempt} of {ATTEMPTS}).") from error
                time.sleep(pause)
                wait *= 2
        raise AssertionError("the last attempt returns or raises")

    def _connected(self) -> ObjectStore:
        store = self._store
        if store is None or self._owner != os.getpid():
            store = self._store = self._connect()
            self._owner = os.getpid()
        return store

    def _error(self, name: str, done: str, why: str) -> StorageError:
        return StorageError(
            f"{self.url}/{name}".rstrip("/") + f" cannot be {done}",
            why,
            "Check the address, the network, and that your credentials for the store are valid and may do this.",
        )


def in_time(call: Callable[[], Result], limit_seconds: float) -> Result:
    """The result of a call; TimeoutError if it takes longer.

    The call itself goes on in a thread of its own, for which the end of the process does not wait.
    """
    done: queue.SimpleQueue[Callable[[], Result]] = queue.SimpleQueue()

    def run() -> None:
        try:
            result = call()
            done.put(lambda: result)
        except BaseException as error:
            done.put(partial(_raise, error))

    threading.Thread(target=run, name="qfleet-storage", daemon=True).start()
    try:
        return done.get(timeout=max(0.01, limit_seconds))()
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit_seconds:.0f} s") from None


def _raise(error: BaseException) -> NoReturn:
    raise error


def passing(error: Exception) -> bool:
    """May the same request succeed a moment later?"""
    if isinstance(error, LASTING):
        return False
    name = type(error).__name__
    return isinstance(error, OSError | TimeoutError) or "Connection" in name or "Timeout" in name or "Payload" in name


def reason(error: Exception) -> str:
    """Why a request failed, in a line without secrets: a store may repeat what it was sent."""
    text = redacted(" ".join(str(error).split()))[:300].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
