"""A user's own keys of episodes: a CSV file with the columns `id` and `key`."""

import csv
import hashlib
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path

from qfleet.datasets.format import IndexRow
from qfleet.errors import StorageError, UsageError

MAX_FILE_BYTES = 1 << 30
MAX_KEY_BYTES = 4_096
COLUMNS = ["id", "key"]


def read_keys(file: str) -> tuple[dict[str, str], str]:
    """The key of every id in a file, and the hash of the file."""
    data = _read(Path(file))
    try:
        rows = csv.reader(StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        if (header := next(rows, None)) != COLUMNS:
            raise ValueError(f"its first line is {','.join(header or [])[:100]!r} and not 'id,key'")
        found: dict[str, str] = {}
        for row in rows:
            _add(found, row, rows.line_num)
    except (ValueError, csv.Error) as error:
        raise UsageError(
            f"--keys {file} cannot be used: {error}",
            "It is a CSV file with the columns id and key, and one line for each episode.",
            "Write it anew, for example with Python's csv.writer.",
        ) from error
    return found, hashlib.sha256(data).hexdigest()


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise StorageError(
            f"--keys {file} cannot be read", f"{error.strerror}.", "Check the path and its permissions."
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(
            f"--keys {file} has more than {MAX_FILE_BYTES:,} bytes", "It has an id and a key per line.", ""
        )
    return data


def _add(found: dict[str, str], row: list[str], line: int) -> None:
    if len(row) != len(COLUMNS):
        raise ValueError(f"line {line:,} has {len(row):,} values")
    if max(len(each.encode()) for each in row) > MAX_KEY_BYTES:
        raise ValueError(f"line {line:,} has a text of more than {MAX_KEY_BYTES:,} bytes")
    if found.setdefault(row[0], row[1]) != row[1]:
        raise ValueError(f"line {line:,} gives the id {row[0][:100]!r} another key than a line before")


def require_keys(keys: Mapping[str, str], rows: Iterable[IndexRow]) -> None:
    """Refuse keys that leave an episode out; those of other episodes do not matter."""
    missing = [row.id for row in rows if row.id not in keys]
    if missing:
        raise UsageError(
            f"--keys has no key of {len(missing):,} episodes, the first is {missing[0][:100]!r}",
            "Every episode of the data set needs one, because it decides the split.",
            "Add the missing lines; a key may be empty.",
        )
