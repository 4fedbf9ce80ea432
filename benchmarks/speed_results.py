"""The saved lines of `benchmarks.speed`: a file and a section of the page for each kind of machine."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import processor, report, speed_table
from benchmarks.contestants import LOADS, OURS

PAGE = report.ROOT / "docs" / "speed.md"
COMMAND = "scripts/bench speed --peers"
CACHES = report.ROOT / "runs" / "bench"
Line = dict[str, Any]
Key = tuple[str, str]


def name_of(kind: str) -> str:
    """What the results of a kind of machine are called."""
    return f"speed-{kind}"


def key_of(line: Line) -> Key:
    """Row and load."""
    return line["name"], speed_table.load_of(line)


def code(root: Path = report.ROOT) -> str:
    """A name for the code that is measured and the code that measures."""
    digest = hashlib.sha256()
    for path in sorted([*(root / "qfleet").rglob("*.py"), *(root / "benchmarks").glob("*.py")]):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def own_cache() -> dict[str, str]:
    """The environment variable that names a cache of this code alone; caches of older code are removed."""
    cache = CACHES / f"cache-{code()}"
    for other in CACHES.glob("cache-*"):
        if other != cache:
            shutil.rmtree(other, ignore_errors=True)
    return {"XDG_CACHE_HOME": str(cache)}


def read(folder: Path, kind: str) -> dict[Key, Line]:
    """The lines that are saved."""
    path = folder / f"{name_of(kind)}.json"
    lines = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return {key_of(line): line for line in lines}


def stamped(line: Line, asked: Mapping[str, Any]) -> Line:
    """A line with the date, the machine, the code and what was asked for."""
    machine = report.machine()
    facts = {name: machine[name] for name in ("cpu", "kind", "flags", "cores")}
    return {**line, "date": report.today(), "machine": facts, "code": code(), "asked": dict(asked)}


def is_kept(line: Line | None, asked: Mapping[str, Any]) -> bool:
    """Was this line measured by the same code in the same way? Then a run that goes on does not measure it again."""
    if line is None or line["medians"].get(OURS) is None:
        return False
    return line.get("code") == code() and line.get("asked") == dict(asked)


def save(lines: Mapping[Key, Line], order: Iterable[str], folder: Path, installed: Mapping[str, str] | None) -> Path:
    """Write all lines of this kind of machine, in the order of the contests: quiet, then busy."""
    kind = processor.kind()
    names = list(order)
    rows = sorted(lines.values(), key=lambda line: place(key_of(line), names))
    text = speed_table.markdown(rows) + speed_table.versions(installed or {})
    record = {"command": COMMAND, "peers": installed, "rows": rows}
    return report.save(name_of(kind), record, text, folder)


def place(key: Key, names: list[str]) -> tuple[int, int]:
    """Where a line stands; rows that there are no more come last."""
    name, load = key
    return LOADS.index(load), names.index(name) if name in names else len(names)


def publish(kind: str, results: Path = report.RESULTS, page: Path = PAGE) -> None:
    """The tables of a kind of machine in their section of the page."""
    report.publish(name_of(kind), f"One machine: {kind}", COMMAND, results=results, page=page)
