"""The report of a workflow: `report.json`, and the same as one HTML file that loads nothing."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from qfleet.files import replace_inside

WIDTH = 640
HEIGHT = 200
STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { text-align: left; padding: 0.2rem 1rem 0.2rem 0; border-bottom: 1px solid #ccc }
svg { max-width: 100%; height: auto } polyline { fill: none; stroke: #1a5fb4; stroke-width: 2 }
code { overflow-wrap: anywhere }"""


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write both files."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
    replace_inside(folder, "report.json", text)
    replace_inside(folder, "report.html", html_report(report).encode())


def html_report(report: dict[str, Any]) -> str:
    """The report as one HTML page."""
    data = report["data"]
    title = f"Offline learning on {data['environment']}"
    test = report["test"] or {}
    curves = curve("loss", [(row["env_steps"], row.get("loss")) for row in report["progress"]])
    curves += curve(score_name(test), [(row["env_steps"], row.get("mean")) for row in report["validation"]])
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(test_sentence(test))}</p>",
        "<h2>Data</h2>",
        f"<p>Version <code>{escape(data['version'])}</code></p>",
        table(("split", "episodes", "steps", "mean return", "mean length"), split_rows(data["splits"])),
        "<h2>Stages</h2>",
        table(("stage", "inputs", "done before", "seconds"), [tuple(each.values()) for each in report["stages"]]),
        "<h2>Learning</h2>",
        curves,
        *on_data_parts(report.get("on_data")),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def on_data_parts(found: dict[str, Any] | None) -> list[str]:
    """What recorded test episodes say about the policy; a refused number says why."""
    if not found:
        return []
    sentence = (
        f"{found['episodes']:,} recorded episodes of split {found['split']}, discount {found['discount']:g}. "
        f"Estimates are of the policy with {found['epsilon']:.0%} random actions."
    )
    groups = [(row["steps"], f"{row['value']:.4g}", f"{row['return']:.4g}") for row in found["calibration"]["groups"]]
    return [
        "<h2>The policy on recorded episodes</h2>",
        f"<p>{escape(sentence)}</p>",
        table(("number", "value", "95 %", "note"), [number_row(*each) for each in found["numbers"].items()]),
        table(("steps", "mean value", "mean return that followed"), groups),
    ]


def number_row(name: str, each: dict[str, Any]) -> tuple[str, str, str, str]:
    """One number."""
    if each["value"] is None:
        return (name, "refused", "", each["refused"])
    span = "" if each["low"] is None else f"{each['low']:.4g} to {each['high']:.4g}"
    return (name, f"{each['value']:.4g}", span, ", ".join(f"{key} {part:.3g}" for key, part in each["support"].items()))


def score_name(test: dict[str, Any]) -> str:
    """What the scores are."""
    if test.get("measure") == "cross_entropy":
        return "minus the mean cross-entropy of validation episodes"
    return "minus the mean TD error of validation episodes" if test.get("on") == "data" else "mean validation return"


def test_sentence(test: dict[str, Any]) -> str:
    """The result in a sentence, with what it means."""
    if not test:
        return "There is no test result."
    span = f"95 % interval [{test['low']:.4g}, {test['high']:.4g}], {test['episodes']} test episodes"
    if test.get("measure") == "cross_entropy":
        return (
            f"Mean cross-entropy of the best checkpoint: {test['cross_entropy']:.4g} (scores are negative; {span}). "
            "This says how well recorded actions are predicted, not how well the policy acts."
        )
    if test.get("on") == "data":
        return (
            f"Mean TD error of the best checkpoint: {test['td_error']:.4g} (scores are negative; {span}). "
            "This says how consistent the values are with the data, not how well the policy acts."
        )
    return f"Mean return of the best checkpoint: {test['mean']:.4g} ({span})."


def split_rows(splits: dict[str, Any]) -> list[tuple[object, ...]]:
    """A row for each split."""
    means = ((name, each, each["return"]["mean"], each["length"]["mean"]) for name, each in splits.items())
    return [(name, each["episodes"], each["steps"], f"{ret:.4g}", f"{length:.4g}") for name, each, ret, length in means]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def curve(name: str, points: Sequence[tuple[float, float | None]]) -> str:
    """A curve over the steps learned from, with the range of its values."""
    known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    if len(known) < 2:
        return f"<p>{escape(name)}: fewer than two points.</p>"
    low = min(y for _, y in known)
    high = max(y for _, y in known)
    last = known[-1][0]
    drawn = " ".join(
        f"{x / last * WIDTH:.1f},{HEIGHT - (y - low) / max(high - low, 1e-12) * HEIGHT:.1f}" for x, y in known
    )
    text = f"{name}: from {low:.4g} to {high:.4g} over {last:,} steps learned from"
    label = escape(text)
    return (
        f'<figure><svg viewBox="0 -4 {WIDTH} {HEIGHT + 8}" role="img" aria-label="{label}">'
        f'<polyline points="{drawn}"/></svg><figcaption>{label}</figcaption></figure>'
    )
