"""A run, a group and a comparison in a notebook: a line of text, and HTML. Files of a run may come from a stranger."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qfleet.plan.display.html import heading, html_table
from qfleet.watch.compare import Comparison
from qfleet.watch.notebook.curve import evaluations, run_curve, svg
from qfleet.watch.plot import COLOURS
from qfleet.watch.read_files import read_json
from qfleet.watch.run_directory import GROUP_FILE, run_label
from qfleet.watch.run_listing import run_state
from qfleet.watch.statistics import Estimate
from qfleet.watch.text import duration, interval, number

MOST_MEMBERS = 100
Status = Mapping[str, Any]


def run_line(path: Path) -> str:
    """The state of a run in a line: done, score 500.0 [500.0, 500.0], 6,000 steps."""
    status = read_json(path / "status.json")
    parts = [run_state(path, status), _score_text(status), f"{_count(status, 'env_steps')} steps"]
    return ", ".join(part for part in parts if part)


def _score_text(status: Status) -> str:
    score = _finite_fields(status.get("score"))
    return f"score {interval(score)}" if score.get("mean") is not None else ""


def _finite_fields(row: Any) -> dict[str, float | None]:
    """The mean and the bounds of an evaluation; None for what is not a number."""
    fields = row if isinstance(row, Mapping) else {}
    return {name: _finite(fields.get(name)) for name in ("mean", "low", "high")}


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _count(status: Status, name: str) -> str:
    value = status.get(name)
    return number(value) if isinstance(value, int) else "–"


def run_html(path: Path, env: str, algorithm: str) -> str:
    """A run: how it stands, its score, whether it is exact, and its curve."""
    status = read_json(path / "status.json")
    rows = [(name, text) for name, text in run_facts(path, status) if text]
    return f"{heading('Run', f'{run_label(path)} · {env} · {algorithm}')}{html_table(rows)}{run_curve(path)}"


def run_facts(path: Path, status: Status) -> list[tuple[str, str]]:
    """What is shown of a run, as names and texts; empty ones are left out."""
    reason = str(status.get("reason") or "")
    score = _finite_fields(status.get("score"))
    best = _finite_fields(status.get("best"))
    ended = bool(status.get("exit_code"))
    return [
        ("state", ": ".join(part for part in (run_state(path, status), reason) if part)),
        ("score", f"{interval(score)} on test episodes, 95 % interval" if score["mean"] is not None else ""),
        ("best evaluation", interval(best) if best["mean"] is not None else ""),
        ("steps", f"{_count(status, 'env_steps')}, {_count(status, 'updates')} updates"),
        ("time", duration(_finite(status.get("seconds")))),
        ("exact", exactness_text(status)),
        ("folder", str(path)),
        ("to go on", str(status.get("resume") or "") if ended else ""),
    ]


def exactness_text(status: Status) -> str:
    """Whether the plan and its seed decide the run, and why not."""
    if status.get("exact") is True:
        return "yes: the plan and its seed decide it to the bit"
    reasons = status.get("not_exact")
    listed = "; ".join(str(reason) for reason in reasons) if isinstance(reasons, list) else ""
    return f"no: {listed}" if listed else ""


# --- groups ---


def group_line(path: Path) -> str:
    """The state of a group in a line."""
    status = read_json(path / GROUP_FILE)
    return ", ".join(str(part) for part in (status.get("state"), status.get("reason")) if part)


def group_html(path: Path, members: Sequence[Path]) -> str:
    """A group: its members with their scores, and their evaluations as curves."""
    status = read_json(path / GROUP_FILE)
    listed = [each for each in status.get("members") or () if isinstance(each, Mapping)][:MOST_MEMBERS]
    begun = {member.name: member for member in members}
    rows = [_member_row(each, begun.get(str(each.get("name")))) for each in listed]
    title = heading("Group", f"{path} · {status.get('env', '')} · {group_line(path)}")
    return f"{title}{html_table(rows, ('member', 'state', 'score', 'steps', 'time'))}{_group_curve(members)}"


def _member_row(entry: Status, path: Path | None) -> tuple[str, ...]:
    status = {} if path is None else read_json(path / "status.json")
    score = _finite_fields(status.get("score"))
    state = ": ".join(str(part) for part in (entry.get("state"), entry.get("reason")) if part)
    shown = interval(score) if score["mean"] is not None else "–"
    return str(entry.get("name")), state, shown, _count(status, "env_steps"), duration(_finite(status.get("seconds")))


def _group_curve(members: Sequence[Path]) -> str:
    return svg([evaluations(member) for member in members[: len(COLOURS)]], "evaluations of the members")


# --- comparisons ---


def comparison_html(found: Comparison) -> str:
    """Aggregates of each side with intervals, and how probable it is that one beats another."""
    names = list(next(iter(found.aggregates.values()), {}))
    rows = [
        (side.name, len(side.runs), *(_estimate_text(found.aggregates[side.name][name]) for name in names))
        for side in found.sides
    ]
    better = [(f"P({a} > {b})", _estimate_text(value)) for (a, b), value in found.improvements.items()]
    notes = html_table([(note,) for note in found.notes]) if found.notes else ""
    table = html_table(rows, ("side", "runs", *names))
    return f"{heading('Comparison', ', '.join(found.envs))}{table}{html_table(better) if better else ''}{notes}"


def _estimate_text(value: Estimate) -> str:
    return f"{number(value.value)} [{number(value.low)}, {number(value.high)}]"
