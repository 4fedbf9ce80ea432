"""The files that a run writes for readers: rows, events, and small JSON documents."""

import errno
import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from qfleet.errors import StorageError
from qfleet.files import HardLinked, NotRegularFile, open_inside, overwrite_inside, replace_inside

Row = dict[str, Any]

MOST_LINE_BYTES = 4 << 20


def json_value(value: Any) -> Any:
    """The value as JSON data: NumPy becomes Python, numbers that are not finite become null."""
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return json_value(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return str(value)


def json_line(row: Mapping[str, Any]) -> str:
    """One row as one line of JSON without its line end; the order of fields is kept."""
    return json.dumps(json_value(row), allow_nan=False, separators=(",", ":")).replace("\x7f", "\\u007f")


def open_plain(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor; links inside its folder are refused."""
    return open_inside(path.parent, path.name, flags, mode)


def unwritable_error(path: Path, error: OSError) -> StorageError:
    """The error for a file of the run that could not be written."""
    if isinstance(error, HardLinked):
        return StorageError(
            f"cannot write {path}",
            "it has a second name (a hard link), and writing to it would change that file too",
            f"replace it by a copy of its own: cp {path} {path}.new && mv {path}.new {path}",
        )
    if isinstance(error, NotRegularFile):
        return StorageError(
            f"cannot write {path}",
            "it is not a regular file but a link, a pipe, a folder or a device",
            "remove it, then resume the run",
        )
    return StorageError(
        f"cannot write {path}",
        f"the system said: {error.strerror or error}",
        "free some space or choose another folder with --out, then resume the run",
    )


def as_bytes(text: str) -> bytes:
    """JSON text as UTF-8; lone surrogates, from file names that are not text, become JSON escapes."""
    return text.encode(errors="backslashreplace")


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


class RowLog:
    """metrics.jsonl: one row per line, written unbuffered; can be truncated to the state of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._file = open_plain(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise unwritable_error(self.path, error) from error
        try:
            self.cut(self._size())
        except StorageError:
            self.close()
            raise

    def _size(self) -> int:
        return os.fstat(self._file).st_size

    def row(self, row: Mapping[str, Any]) -> None:
        """Append one row; after a failed write no part of it is left."""
        before = self._size()
        try:
            _write_all(self._file, as_bytes(json_line(row)) + b"\n")
        except OSError as error:
            os.ftruncate(self._file, before)
            raise unwritable_error(self.path, error) from error

    __call__ = row

    def position(self) -> int:
        """Bytes written so far, synced to disk, so that a checkpoint may record them."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise unwritable_error(self.path, error) from error
        return self._size()

    def cut(self, position: int) -> int:
        """Truncate to `position`, and before it to the last whole row; returns how many bytes were missing."""
        end = self._last_line_end(min(position, self._size()))
        os.ftruncate(self._file, end)
        return position - end

    def _last_line_end(self, end: int) -> int:
        least = max(0, end - 2 * MOST_LINE_BYTES)
        while end > least:
            begin = max(least, end - 65536)
            found = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        if least:
            raise unwritable_error(
                self.path, OSError(errno.EINVAL, f"its last {2 * MOST_LINE_BYTES:,} bytes hold no row")
            )
        return 0

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class EventLog:
    """events.jsonl: faults, saves and recoveries; append only."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            os.close(open_plain(self.path))
        except NotRegularFile as error:
            raise unwritable_error(self.path, error) from error
        except OSError:
            pass  # missing, or a fault that `event` reports

    def event(self, kind: str, **fields: Any) -> bool:
        """Append one event and sync it; False if that fails, so that it does not hide the reported fault."""
        line = json_line({"kind": kind, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields})
        try:
            file = open_plain(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                _write_all(file, self._missing_line_end(file) + as_bytes(line) + b"\n")
                os.fsync(file)
            finally:
                os.close(file)
        except OSError:
            return False
        return True

    @staticmethod
    def _missing_line_end(file: int) -> bytes:
        """A line end if the last line lacks one after a power cut, else nothing."""
        size = os.fstat(file).st_size
        return b"\n" if size and os.pread(file, 1, size - 1) != b"\n" else b""


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a small JSON file atomically."""
    text = json.dumps(json_value(document), allow_nan=False, indent=2, ensure_ascii=False) + "\n"
    write_file(path, as_bytes(text))


def overwrite_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write over a small JSON file in its place, for a disk that is full."""
    text = json.dumps(json_value(document), allow_nan=False, ensure_ascii=False) + "\n"
    try:
        overwrite_inside(path.parent, path.name, as_bytes(text))
    except OSError as error:
        raise unwritable_error(path, error) from error


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace a small file atomically and sync it to disk."""
    try:
        replace_inside(path.parent, path.name, data, mode)
    except OSError as error:
        raise unwritable_error(path, error) from error
