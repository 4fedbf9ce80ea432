"""The report of a workflow as one HTML page: no script, nothing loaded, every foreign text escaped."""

import json
from collections.abc import Sequence
from typing import Any

from qfleet.workflow import charts
from qfleet.workflow.page_style import POLICY, STYLE
from qfleet.workflow.page_text import details, lines, number, safe, section, table
from qfleet.workflow.progress import time_text

Row = dict[str, Any]
MOST_ACTIONS = 24
SPLITS = ("all", "train", "validation", "test")
LABELS = {
    "td_error": "one-step TD error",
    "td_loss": "its Huber loss",
    "accuracy": "greedy action as recorded",
    "precision": "macro precision",
    "recall": "macro recall",
    "recorded_return": "discounted return, as recorded",
    "fitted_q": "discounted return by fitted Q evaluation",
    "weighted_importance": "discounted return by weighted importance sampling",
}
MEANINGS = {
    "td_error": "This says how consistent the values are with the data, not how well the policy acts.",
    "cross_entropy": "This says how well recorded actions are predicted, not how well the policy acts.",
}


def html_report(report: Row) -> str:
    """The report as one HTML page."""
    title = f"Offline learning on {report['data']['environment']}"
    parts = [
        header(title, report),
        cards(report),
        f'<p class="verdict">{safe(verdict(report))}</p>',
        section("How it learned", learning_parts(report)),
        section("What was decided, and why", [decision_table(report["decisions"])]),
        section("The data", data_parts(report["data"])),
        section("The policy on recorded test episodes", on_data_parts(report.get("on_data"))),
        section("Stages", [stage_table(report["stages"])]),
        section("How to go on", next_parts(report["next"])),
        section("The workflow", plan_parts(report)),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{POLICY}'
    head += f"<title>{safe(title)}</title><style>{STYLE}</style>"
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def header(title: str, report: Row) -> str:
    """Title, date and state."""
    state = "done" if report["state"] == "done" else f"not done: {report['reason'] or report['state']}"
    kind = "good" if report["state"] == "done" else "bad"
    line = (
        f"{report['made'].replace('T', ' ').removesuffix('+00:00')} UTC · qfleet {report['qfleet']} · {report['run']}"
    )
    return f'<header><h1>{safe(title)}</h1><p>{safe(line)} <span class="state {kind}">{safe(state)}</span></p></header>'


def cards(report: Row) -> str:
    """The few numbers that count."""
    found: list[tuple[str, str, str]] = []
    test = report["test"] or {}
    whole = report["data"]["all"]
    if test:
        span = f"95 % interval {number(test['low'])} to {number(test['high'])}, {test['episodes']} episodes"
        found.append((score_name(test, "test"), number(test["mean"]), span))
    if whole:
        returns = whole["return"]
        found.append(
            ("recorded return", number(returns["mean"]), f"from {number(returns['min'])} to {number(returns['max'])}")
        )
    data = report["data"]
    found.append(("data", f"{data['steps']:,}", f"steps in {data['episodes']:,} episodes"))
    seconds = sum(stage["seconds"] for stage in report["stages"])
    learners = report["learning"]["learners"]
    found.append(("time", time_text(seconds), f"for all stages; {learners} learner{'s' * (learners != 1)}"))
    shown = "".join(
        f'<div class="card"><span class="label">{safe(label)}</span><strong>{safe(value)}</strong>'
        f"<span>{safe(more)}</span></div>"
        for label, value, more in found
    )
    return f'<div class="cards">{shown}</div>'


def score_name(row: Row, split: str) -> str:
    """What a score is."""
    if row.get("measure") == "cross_entropy":
        return f"minus the cross-entropy, {split}"
    return f"minus the TD error, {split}" if row.get("on") == "data" else f"{split} return"


def verdict(report: Row) -> str:
    """The result in a sentence or two, with what it means."""
    test = report["test"]
    if not test:
        why = report["reason"] or "the run has not ended"
        return f"There is no test result: {why}. The same command goes on where it was stopped."
    span = f"95 % interval [{number(test['low'])}, {number(test['high'])}], {test['episodes']} test episodes"
    measure = test.get("measure")
    if measure is not None:
        name = "cross-entropy" if measure == "cross_entropy" else "TD error"
        found = number(test.get(measure))
        return f"Mean {name} of the best checkpoint: {found} (scores are negative; {span}). {MEANINGS[measure]}"
    whole = report["data"]["all"] or {}
    beside = f" Recorded episodes had {number(whole['return']['mean'])} on average." if whole else ""
    return f"Mean return of the best checkpoint: {number(test['mean'])} ({span}).{beside}"


def learning_parts(report: Row) -> list[str]:
    """Settings, first parameters, and the curves of validation and loss."""
    found = report["learning"]
    facts = [f"{name.replace('_', ' ')} {value}" for name, value in found.items() if value is not None]
    validation = report["validation"]
    test = report["test"] or (validation[-1] if validation else {})
    name = score_name(test, "validation") if test else "validation score"
    marks = [(report["best"]["env_steps"], "best checkpoint")] if report["best"] else []
    adjusted = [(row["step"], "adjusted") for row in report["decisions"] if row["what"] == "adjust"]
    returns = (report["data"]["all"] or {}).get("return")
    level = (returns["mean"], "recorded mean") if returns and not test.get("on") else None
    parts = [f"<p>{safe(' · '.join(facts))}</p>", parameters_text(report["first_parameters"])]
    parts.append(
        charts.curve(
            f"{name}: mean and 95 % interval of {validation[0]['episodes'] if validation else 0} episodes",
            known(validation, "mean"),
            "steps learned from",
            name,
            band=[(row["env_steps"], row["low"], row["high"]) for row in validation if row["low"] is not None],
            marks=marks + adjusted[:8],
            level=level,
        )
    )
    parts.append(
        charts.curve(
            "loss: mean since the last progress row",
            known(report["progress"], "loss"),
            "steps learned from",
            "loss",
            marks=adjusted[:8],
        )
    )
    return parts


def known(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """The points of a curve that have a value."""
    return [(row["env_steps"], row[name]) for row in rows if row.get(name) is not None]


def parameters_text(found: Row) -> str:
    """With which parameters the learners began."""
    if not found:
        return ""
    who = "The learner" if found["learners"] == 1 else f"All {found['learners']} learners"
    return f"<p>{who} began with the parameters <code>{safe(found['sha256'])}</code> (SHA-256).</p>"


def decision_table(found: Sequence[Row]) -> str:
    """What validation decided."""
    if not found:
        return ""
    rows = [(f"{row['step']:,}" if row["step"] is not None else "", row["what"], row["reason"]) for row in found]
    return table(("step", "decision", "reason"), rows, numbers=(0,))


def data_parts(data: Row) -> list[str]:
    """Version, splits, returns and actions."""
    splits = [split_row(name, data["splits"][name]) for name in SPLITS if name in data["splits"]]
    returns = data["returns"]
    shares = (data["all"] or {}).get("action_shares", [])
    more = f"; the first {MOST_ACTIONS} of {len(shares)}" if len(shares) > MOST_ACTIONS else ""
    shown = shares[:MOST_ACTIONS]
    behaviours = f", recorded by {', '.join(filter(None, data['behaviours']))}" if any(data["behaviours"]) else ""
    return [
        f"<p>Version <code>{safe(data['version'])}</code>{safe(behaviours)}.</p>",
        table(
            ("split", "episodes", "steps", "mean return", "deviation", "mean length"), splits, numbers=(1, 2, 3, 4, 5)
        ),
        charts.histogram("returns of all recorded episodes", returns["edges"], returns["counts"], "return", "episodes"),
        charts.shares(f"how often each action was recorded{more}", [f"action {at}" for at in range(len(shown))], shown),
    ]


def split_row(name: str, each: Row) -> tuple[object, ...]:
    """A row for a split."""
    returns = each["return"]
    means = (number(returns["mean"]), number(returns["deviation"]), number(each["length"]["mean"]))
    return (name, f"{each['episodes']:,}", f"{each['steps']:,}", *means)


def on_data_parts(found: Row | None) -> list[str]:
    """What recorded test episodes say about the policy; a refused number says why."""
    if not found:
        return []
    sentence = (
        f"{found['episodes']:,} recorded episodes of split {found['split']}, discount {found['discount']:g}. "
        f"Estimates are of the policy with {found['epsilon']:.0%} random actions."
    )
    groups = found["calibration"]["groups"]
    rows = [(f"{row['steps']:,}", number(row["value"]), number(row["return"])) for row in groups]
    parts = [
        f"<p>{safe(sentence)}</p>",
        table(
            ("number", "value", "95 % interval", "note"),
            [number_row(*each) for each in found["numbers"].items()],
            numbers=(1,),
        ),
    ]
    if groups:
        points = [(row["value"], row["return"]) for row in groups]
        label = "values of recorded actions beside the discounted returns that followed; on the line both are equal"
        parts += [charts.calibration(label, points, "mean value", "mean return")]
        parts += [
            details("The same as a table", table(("steps", "mean value", "mean return"), rows, numbers=(0, 1, 2)))
        ]
    return parts


def number_row(name: str, each: Row) -> tuple[str, str, str, str]:
    """One number."""
    label = LABELS.get(name, name)
    if each["value"] is None:
        return (label, "refused", "", each["refused"])
    span = "" if each["low"] is None else f"{number(each['low'])} to {number(each['high'])}"
    support = ", ".join(f"{key.replace('_', ' ')} {number(part)}" for key, part in each["support"].items())
    return (label, number(each["value"]), span, support)


def stage_table(stages: Sequence[Row]) -> str:
    """What was done, and how long it took."""
    rows = [
        (each["stage"], "done before" if each["skipped"] else "done", f"{each['seconds']:.1f}", each["inputs"])
        for each in stages
    ]
    return table(("stage", "", "seconds", "hash of inputs"), rows, numbers=(2,))


def next_parts(found: Row) -> list[str]:
    """Commands and lines of Python."""
    return [
        "<p>The policy in Python, without the environment:</p>",
        f"<pre><code>{lines(found['python'])}</code></pre>",
        "<p>On the command line:</p>",
        f"<pre><code>{lines(found['commands'])}</code></pre>",
    ]


def plan_parts(report: Row) -> list[str]:
    """The file, what the command line added, and where the results are."""
    text = json.dumps(report["plan"], indent=1, ensure_ascii=False)
    shown = "\n".join(safe(line) for line in text.splitlines())
    given = f" with {' '.join(report['settings'])}" if report["settings"] else ""
    run = f"Run: <code>{safe(report['run_folder'])}</code>.{exact_text(report['exact'])}"
    where = f"<p>{safe(report['file'] + given)}. {run}</p>"
    return [
        where,
        details("All stages as they were given", f"<pre><code>{shown}</code></pre>"),
    ]


def exact_text(exact: bool | None) -> str:
    """Does the plan alone decide the run?"""
    if exact is None:
        return ""
    return " It is exact: plan and seed alone decide it." if exact else " It is not exact: see its status.json."
