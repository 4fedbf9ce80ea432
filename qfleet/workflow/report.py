"""The report of a workflow as data: `report.json`, and the same as one HTML file that loads nothing."""

import shlex
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qfleet.datasets.format import Dataset
from qfleet.datasets.inspect import summarize_dataset
from qfleet.files import replace_inside
from qfleet.plan.naming import algorithm_name
from qfleet.plan.schema import Plan
from qfleet.run_object import Run
from qfleet.watch.run_files import json_value
from qfleet.workflow.learning import decisions, first_parameters
from qfleet.workflow.page import html_report
from qfleet.workflow.plan import GivenWorkflow

FORMAT = 1
BINS = 20
Row = dict[str, Any]


def make_report(
    given: GivenWorkflow, stages: list[Row], dataset: Dataset, run: Run, judged: Row | None
) -> dict[str, Any]:
    """Everything that a workflow has to say."""
    rows = run.metrics
    status = run.status
    return {
        "format": FORMAT,
        "qfleet": version("qfleet"),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "file": given.file,
        "plan": msgspec.to_builtins(given.plan),
        "settings": [f"learn.{path}={text}" for path, text in given.learn_settings],
        "stages": stages,
        "data": {**summarize_dataset(dataset), "returns": return_histogram(dataset)},
        "run": run.path.name,
        "run_folder": str(run.path),
        "learning": learning_summary(run.plan),
        "state": status.get("state"),
        "exit_code": run.exit_code,
        "reason": status.get("reason"),
        "seconds": status.get("seconds"),
        "exact": status.get("exact"),
        "first_parameters": first_parameters(run),
        "validation": [row for row in rows if row.get("kind") == "eval" and row.get("split") == "validation"],
        "progress": [row for row in rows if row.get("kind") == "progress"],
        "decisions": decisions(rows, status),
        "best": status.get("best"),
        "test": run.result(),
        "on_data": judged,
        "next": next_steps(run),
    }


def learning_summary(plan: Plan) -> Row:
    """The settings of the run that a reader wants to see first."""
    return {
        "algorithm": algorithm_name(plan),
        "runtime": plan.runtime.__struct_config__.tag,
        "learners": plan.learners.num,
        "batch_size": plan.algo.batch_size,
        "learning_rate": plan.optim.learning_rate,
        "epochs": plan.until.epochs,
        "steps": plan.until.steps,
        "seed": plan.seed,
        "evaluated": plan.eval.on,
    }


def return_histogram(dataset: Dataset) -> Row:
    """How often which return was recorded, of all episodes."""
    returns = np.array([row.undiscounted_return for row in dataset.index], np.float64)
    finite = returns[np.isfinite(returns)]
    if not len(finite):
        return {"edges": [], "counts": []}
    low = float(finite.min())
    high = float(finite.max())
    if not high - low > 1e-9 * max(abs(high), abs(low), 1.0):
        low -= 0.5
        high += 0.5
    counts, edges = np.histogram(finite, BINS, (low, high))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def next_steps(run: Run) -> Row:
    """How to go on: commands, and lines of Python."""
    where = shlex.quote(str(run.path))
    python = [
        "import qfleet",
        "",
        f"policy = qfleet.Policy.load({str(run.path)!r})",
        "action, _ = policy.predict(observation)",
    ]
    return {
        "commands": [f"qfleet eval {where}", f"qfleet plot {where}", f"qfleet data judge {where} DATA --split test"],
        "python": python,
    }


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write both files; numbers that are not finite become null."""
    plain: dict[str, Any] = json_value(report)
    text = msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n"
    replace_inside(folder, "report.json", text)
    replace_inside(folder, "report.html", html_report(plain).encode(errors="replace"))
