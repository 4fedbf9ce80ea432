"""Output for the user: without control characters, aligned, on the right stream."""

import json
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from qfleet.errors import QfleetError
from qfleet.escape import escaped, indented

# The arguments of the current command, for provenance.
invocation: ContextVar[tuple[str, ...]] = ContextVar("invocation", default=())
# May the current command do its work in a fork that it supervises?
supervising: ContextVar[bool] = ContextVar("supervising", default=False)


def echo(*lines: str, to_stderr: bool = False) -> None:
    """Print one line per argument; with JSON on standard output, text for people goes to standard error."""
    for line in lines or ("",):
        print(escaped(line), file=sys.stderr if to_stderr else sys.stdout)


def echo_json(value: Any) -> None:
    """Print one JSON value; numbers that are not finite become null."""
    print(json.dumps(_finite(value), indent=2, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def echo_table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> None:
    """Print rows in aligned columns, never truncated, so that they can be searched and piped."""
    table = [tuple(map(escaped, row)) for row in ([header] if header else []) + list(rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def echo_error(error: QfleetError) -> None:
    """Print what happened, why, and what to do."""
    why = indented(error.why, by="       | ")  # may have several lines: an environment's output, several runs
    parts = (("error: ", escaped(error.what)), ("  why: ", why), ("   do: ", escaped(error.fix)))
    print("\n".join(label + text for label, text in parts if text), file=sys.stderr)


@contextmanager
def echo_warnings() -> Iterator[None]:
    """Print Python's warnings as one line each on standard error, without the source line they came from."""
    with warnings.catch_warnings():
        warnings.showwarning = _echo_warning
        yield


def _echo_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    echo("warning: " + " ".join(str(message).split()), to_stderr=True)


def size(count: float) -> str:
    """A number of bytes with a unit: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
