"""The tables of `benchmarks.speed`, from saved lines alone: a line may be older than the contest that is there now."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.contestants import ALONE, BUSY, CEILING, LOADS, OURS, QUIET

Line = dict[str, Any]
TITLES = {QUIET: "Nothing else runs:", BUSY: "Another process keeps one core busy:"}
HEADS = ("row", "what", "qfleet", "best peer", "qfleet / it", "beside", "qfleet / it", "bar", "met")


def markdown(lines: Sequence[Line]) -> str:
    """The verdicts quiet and busy, every peer, the conditions, and what was not measured."""
    parts = [
        f"{TITLES[load]}\n\n" + report.table(HEADS, [cells(line) for line in lines if load_of(line) == load])
        for load in LOADS
        if any(load_of(line) == load for line in lines)
    ]
    return "\n".join([*parts, *(part for part in (peers(lines), circumstances(lines), missing(lines)) if part)])


def load_of(line: Line) -> str:
    """Quiet or busy."""
    return str(line.get("load", QUIET))


def cells(line: Line) -> tuple[Any, ...]:
    """One line of the table of verdicts."""
    medians, ratios, best = line["medians"], line["ratios"], line["best_peer"]
    top = medians.get(CEILING)
    return (
        line["name"],
        line["what"],
        None if medians.get(OURS) is None else f"{report.shown(medians[OURS])} {line['unit']}",
        None if best is None else f"{report.shown(medians[best])} ({best})",
        None if best is None else ratios[best],
        None if top is None else f"{report.shown(top)} ({line['ceiling_is']})",
        ratios.get(CEILING),
        bars(line),
        {True: "yes", False: "**no**", None: None}[line["met"]],
    )


def bars(line: Line) -> str | None:
    """What was asked for."""
    sign = "<=" if line["less"] else ">="
    beside = "x itself" if line["ceiling_is"] == ALONE else "x ceiling"
    names = (("peer", "x peer"), ("ceiling", beside), ("limit", line["unit"]))
    return ", ".join(f"{sign} {line['bars'][key]:g} {unit}" for key, unit in names if line["bars"][key]) or None


def peers(lines: Sequence[Line]) -> str:
    """Every peer that took part, and in how many rounds."""
    seen = [
        (line["name"], load_of(line), name, line["medians"][name], line["ratios"][name], len(line["rounds"][name]))
        for line in lines
        for name in line["medians"]
        if name not in (OURS, CEILING)
    ]
    heads = ("row", "machine", "peer", "its figure", "qfleet / it", "rounds")
    return f"Every peer, and in how many rounds it took part:\n\n{report.table(heads, seen)}" if seen else ""


def circumstances(lines: Sequence[Line]) -> str:
    """How each line was measured."""
    known = [line for line in lines if line.get("conditions", {}).get(OURS)]
    heads = ("row", "machine", "qfleet's update", "best peer's", "load average before", "burner's share", "measured")
    body = []
    for line in known:
        found = line["conditions"]
        loads = [value for each in found.values() for value in each["load_average"] if value is not None]
        shares = [value for each in found.values() for value in each["burner_share"] if value is not None]
        best = found.get(line["best_peer"])
        named = (line["name"], load_of(line), update(found[OURS]), None if best is None else update(best))
        body.append((*named, span(loads), span(shares), line.get("date")))
    return f"How it was measured:\n\n{report.table(heads, body)}" if body else ""


def update(found: Mapping[str, Any]) -> str | None:
    """Precision and threads in words."""
    threads = found.get("threads")
    if threads is None:
        return found.get("precision")
    compiled = ", compiled" if found.get("compile") else ""
    return f"{found.get('precision')}, {threads} thread{'s' * (threads != 1)}{compiled}"


def span(values: Sequence[float]) -> str | None:
    """From the least to the most."""
    return f"{min(values):.2f} to {max(values):.2f}" if values else None


def missing(lines: Sequence[Line]) -> str:
    """What was not measured, and turns that do not count."""
    failed = [
        f"- {line['name']}, {load_of(line)}, {name}: {why}" for line in lines for name, why in line["errors"].items()
    ]
    hollow = [
        f"- {line['name']}, {name}: {each['hollow']} turns do not count, because the burner had too little of a core"
        for line in lines
        for name, each in line.get("conditions", {}).items()
        if each["hollow"]
    ]
    return "Not measured:\n\n" + "\n".join([*failed, *hollow]) + "\n" if failed or hollow else ""


def versions(installed: Mapping[str, str]) -> str:
    """Which peers these were."""
    named = ", ".join(f"{name} {version}" for name, version in installed.items())
    return f"\nPeers: {named}.\n" if named else ""
