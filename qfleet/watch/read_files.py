"""Reading the files that a run wrote: rows and small JSON documents, which may come from a stranger."""

import errno
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from qfleet.errors import UsageError
from qfleet.files import TooLarge, read_inside
from qfleet.watch.run_files import MOST_LINE_BYTES, Row, open_plain

MOST_JSON_BYTES = 4 << 20
MOST_ROW_BYTES = 1 << 30
# A run of 1e9 steps that logs every 1,000 has a million rows of about a kilobyte.
MOST_ROWS = 2_000_000
TAIL_BYTES = 4 << 20
MOST_LEVELS = 50
MOST_DIGITS = 20  # of a whole number: 64 bits have no more

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
    """The row without the fields that depend on the clock: equal in two runs of one plan and seed."""
    return {name: value for name, value in row.items() if name not in CLOCK_FIELDS}


def parse_json(text: bytes) -> Any:
    """Parse a JSON value; NaN and Infinity become None.

    ValueError for values that qfleet never writes: integers of many digits, deep nesting.
    """
    try:
        value = json.loads(text, parse_int=_whole_number, parse_constant=lambda name: None)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if _is_deep(value):
        raise ValueError("it is nested too deeply")
    return value


def _is_deep(value: Any) -> bool:
    """Is it nested deeper than anything qfleet writes? Checked without recursion."""
    level = [value]
    for _ in range(MOST_LEVELS):
        below = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [each for items in below for each in items if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def each_row(path: Path, from_byte: int = 0) -> Iterator[Row]:
    """The rows of a JSON-lines file, one at a time; none if there is no such file.

    Lines that are not JSON objects are skipped. A file with more bytes or lines than any run's is refused.
    """
    try:
        with _reading(path, from_byte + MOST_ROW_BYTES) as file:
            file.seek(from_byte)
            for number in itertools.count():
                line = file.readline(MOST_LINE_BYTES)
                if not line:
                    return
                if number == MOST_ROWS:
                    raise OSError(errno.EFBIG, f"it has more than {MOST_ROWS:,} lines")
                if (row := _row_of(line)) is not None:
                    yield row
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(
            f"cannot read {path}",
            f"the system said: {error.strerror or error}",
            "name the directory of a run that qfleet wrote; list them with: qfleet runs",
        ) from error


def _row_of(line: bytes) -> Row | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


@contextmanager
def _reading(path: Path, most_bytes: int) -> Iterator[IO[bytes]]:
    with os.fdopen(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise TooLarge(path, size, most_bytes)
        yield file


def read_rows(path: Path) -> list[Row]:
    """All whole rows of a JSON-lines file."""
    return list(each_row(path))


def last_rows(path: Path) -> list[Row]:
    """The rows in the last few megabytes of a JSON-lines file, without reading the rest."""
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
    except OSError:
        size = 0  # `each_row` raises the error
    return list(each_row(path, max(0, size - TAIL_BYTES)))


def count_lines(path: Path) -> int:
    """The number of lines of a file; 0 if it cannot be read."""
    try:
        with _reading(path, MOST_ROW_BYTES) as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


def read_json(path: Path) -> Row:
    """A JSON object from a file; empty if the file is missing, too large, or holds something else."""
    try:
        value = parse_json(read_inside(path.parent, path.name, MOST_JSON_BYTES))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
