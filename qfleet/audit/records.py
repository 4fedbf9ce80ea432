"""The records of a history in a folder, and what a check of them finds."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from qfleet.audit.history import MAX_LINE_BYTES, NEEDED, Record
from qfleet.files import list_inside, open_inside


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: the rule's short name, and what was found."""

    rule: str
    text: str


def read_history(folder: Path) -> Iterator[tuple[str, int, Record | None]]:
    """Every record with its file's name and line number, None if malformed; an incomplete last line is left out."""
    for name in list_inside(folder):
        if name.endswith(".jsonl"):
            with open(open_inside(folder, name), "rb") as lines:
                for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b""), 1):
                    if line.endswith(b"\n"):
                        yield name, number, parse_record(line)


def parse_record(line: bytes) -> Record | None:
    """The record in a line, if it is well-formed."""
    try:
        found = msgspec.json.decode(line, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    needed = NEEDED.get((str(found.get("role")), str(found.get("op"))))
    return found if found.get("op") == "full" or (needed is not None and needed <= found.keys()) else None
