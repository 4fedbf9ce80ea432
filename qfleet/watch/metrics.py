"""The files a run leaves for its readers: rows, events, and small JSON documents."""

import errno
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np

from qfleet.errors import StorageError, UsageError

Row = dict[str, Any]

MOST_JSON_BYTES = 4 << 20
MOST_ROW_BYTES = 1 << 30
# A run directory may come from a stranger: links are not followed, and a pipe does not keep its reader waiting.
_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# Two runs of one plan and seed agree on every field of every row but these.
CLOCK_FIELDS = frozenset(
    {
        "seconds",
        "steps_per_second",
        "updates_per_second",
        "eval_seconds",
        "save_seconds",
        "checkpoint_age_seconds",
        "stages",
        "actor_stages",
        "profile",
    }
)


def without_clock(row: Mapping[str, Any]) -> Row:
    """The row without the fields that depend on the clock: what two equal runs must agree on."""
    return {name: value for name, value in row.items() if name not in CLOCK_FIELDS}


def plain(value: Any) -> Any:
    """The value as JSON can hold it: NumPy becomes Python, what is not finite becomes null."""
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def json_line(row: Mapping[str, Any]) -> str:
    """One row as one line of JSON, fields in the order they were given, without the line end."""
    return json.dumps(plain(row), allow_nan=False, separators=(",", ":"), ensure_ascii=False)


class NotPlain(OSError):
    """It is not a regular file: a link, a pipe, a folder or a device."""


def open_plain(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """A descriptor of a regular file, and of nothing else."""
    try:
        file = os.open(path, flags | _CAREFUL, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise NotPlain(error.errno, "it is not a regular file") from error
        raise
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise NotPlain(errno.EINVAL, "it is not a regular file")


def _refused(path: Path, error: OSError) -> StorageError:
    if isinstance(error, NotPlain):
        return StorageError(
            f"cannot write {path}",
            "something that is not a regular file has taken its name: a link, a pipe, a folder or a device",
            "remove it, then resume the run",
        )
    return StorageError(
        f"cannot write {path}",
        f"the system said: {error.strerror or error}",
        "free some space or choose another folder with --out, then resume the run",
    )


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


class RowLog:
    """metrics.jsonl: one row per line, each handed to the system at once; may be cut back to a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._file = open_plain(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise _refused(self.path, error) from error
        self.cut(self._size())

    def _size(self) -> int:
        return os.fstat(self._file).st_size

    def row(self, row: Mapping[str, Any]) -> None:
        """Append one row; a row that does not fit on the disk leaves no trace."""
        before = self._size()
        try:
            _write_all(self._file, json_line(row).encode() + b"\n")
        except OSError as error:
            os.ftruncate(self._file, before)
            raise _refused(self.path, error) from error

    __call__ = row

    def position(self) -> int:
        """Bytes written so far, and safe on the disk: a checkpoint may point at them."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _refused(self.path, error) from error
        return self._size()

    def cut(self, position: int) -> int:
        """Drop what follows `position` and any torn row before it; the answer is how many bytes were missing."""
        end = self._last_line_end(min(position, self._size()))
        os.ftruncate(self._file, end)
        return position - end

    def _last_line_end(self, end: int) -> int:
        while end > 0:
            begin = max(0, end - 65536)
            found = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0

    def close(self) -> None:
        """Let go of the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class EventLog:
    """events.jsonl: faults, saves and what was done about them; only ever grows."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            os.close(open_plain(self.path))
        except NotPlain as error:
            raise _refused(self.path, error) from error
        except OSError:
            pass  # not there yet, or a fault that `event` reports

    def event(self, kind: str, **fields: Any) -> bool:
        """Append one event, safe on the disk; False when the disk refuses, so that no fault hides another."""
        line = json_line({"kind": kind, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields})
        try:
            file = open_plain(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                _write_all(file, self._mend(file) + line.encode() + b"\n")
                os.fsync(file)
            finally:
                os.close(file)
        except OSError:
            return False
        return True

    @staticmethod
    def _mend(file: int) -> bytes:
        """A line end, if a power cut left the last line without one."""
        size = os.fstat(file).st_size
        return b"\n" if size and os.pread(file, 1, size - 1) != b"\n" else b""


def _rows_of(lines: Iterable[bytes]) -> Iterator[Row]:
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


@contextmanager
def _reading(path: Path, most_bytes: int) -> Iterator[IO[bytes]]:
    with os.fdopen(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and {most_bytes:,} are the most")
        yield file


def read_rows(path: Path) -> list[Row]:
    """All whole rows of a JSON-lines file; none when there is no such file. A torn line is passed over."""
    try:
        with _reading(path, MOST_ROW_BYTES) as file:
            return list(_rows_of(file))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"cannot read {path}",
            f"the system said: {error.strerror or error}",
            "name the directory of a run that qfleet wrote; list them with: qfleet runs",
        ) from error


def read_json(path: Path) -> Row:
    """A JSON object from a file; empty when the file is missing, too large, or is not one."""
    try:
        with _reading(path, MOST_JSON_BYTES) as file:
            value = json.loads(file.read(MOST_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a small JSON file in one step: readers see the old one or the new one, never a half."""
    text = json.dumps(plain(document), allow_nan=False, indent=2, ensure_ascii=False) + "\n"
    write_file(path, text.encode())


def write_file(path: Path, data: bytes) -> None:
    """Replace a small file in one step, safe on the disk when this returns."""
    path = Path(path)
    # One fixed name: whatever a killed writer left behind, or somebody put there, makes way for the next.
    draft = path.with_name(f".{path.name}.tmp")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(open_plain(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise _refused(path, error) from error


def sync_folder(path: Path) -> None:
    """Make the names in a folder safe on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
