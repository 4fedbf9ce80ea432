"""What every benchmark needs to tell its story: the machine, tables, intervals, files."""

import json
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
PACKAGES = ("qfleet", "torch", "numpy", "gymnasium", "numba", "ale-py")


def machine(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Processor, cores, memory, system and versions: what a reader needs to judge a number."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "kind": processor.kind(),
        "flags": processor.flags(),
        "cores": processor.cores(),
        "memory_gib": round(int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := installed(name))},
    }


def today() -> str:
    """The date of a record."""
    return datetime.now(UTC).date().isoformat()


def installed(package: str) -> str | None:
    """The version of an installed package, if it is there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; floats are shown with sensible digits."""
    lines = [list(headers), ["---"] * len(headers), *([shown(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def shown(value: Any) -> str:
    """A cell's text: None is a dash, floats get one decimal (two below ten), pipes are escaped."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value).replace("|", "\\|")


def ratio(ours: float, theirs: float) -> float:
    """Ours as a fraction of theirs; below 1 is faster."""
    if theirs <= 0:
        raise ValueError(f"a ratio needs a positive figure to compare with, not {theirs}")
    return ours / theirs


def capped_median(seconds: Sequence[float | None], limit_seconds: float) -> tuple[float, bool]:
    """Median where None means "not within the limit" and counts as the limit; says whether the median is a bound."""
    if not seconds:
        raise ValueError("a median needs at least one run")
    missed = sum(value is None for value in seconds)
    middle = statistics.median(limit_seconds if value is None else value for value in seconds)
    return middle, missed * 2 >= len(seconds)


def interval(values: Sequence[float], resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """Bootstrap 95 % interval of the mean."""
    if not values:
        raise ValueError("an interval needs at least one value")
    data = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(data), (resamples, len(data)))
    low, high = np.quantile(data[draws].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def save(name: str, record: dict[str, Any], markdown: str, folder: Path = RESULTS) -> Path:
    """Write `name.json` (with machine and date) and `name.md` beside it; answers the JSON file."""
    folder.mkdir(parents=True, exist_ok=True)
    full = {"benchmark": name, "date": today(), "machine": machine(), **record}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(full, indent=2) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(f"# {name}\n\n{caption(full)}\n\n{markdown}", encoding="utf-8")
    return path


def caption(record: dict[str, Any]) -> str:
    """One line under a heading: when and on what."""
    facts = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{record['date']}, {facts['cores']} cores of {facts['cpu']}, Python {facts['python']}, {versions}."


def publish(name: str, title: str, command: str, *, results: Path = RESULTS, page: Path = PAGE) -> None:
    """Show a saved benchmark on the results page, under its title and with the command that made it."""
    table = (results / f"{name}.md").read_text(encoding="utf-8").partition("\n\n")[2]
    replace_section(page, name, f"## {title}\n\n`{command}`: {table}")


def replace_section(path: Path, name: str, body: str) -> None:
    """Put `body` between the markers `<!-- bench:name -->` and `<!-- /bench:name -->`; adds them when missing."""
    start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    text = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    section = f"{start}\n{body.strip()}\n{end}"
    if start in text and end in text:
        before, rest = text.split(start, 1)
        text = before + section + rest.split(end, 1)[1]
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)
