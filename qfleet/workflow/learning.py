"""The stage that learns: a run that is begun, resumed or done, and what its files say about it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qfleet.api import load, resume, train
from qfleet.errors import QfleetError
from qfleet.files import is_file, is_folder, list_inside, remove_tree
from qfleet.plan.schema import Plan
from qfleet.run_object import Run
from qfleet.watch import Watcher, read_json, read_rows

Row = dict[str, Any]


def learn(plan: Plan, folder: Path, name: str, watcher: Watcher | None, command: list[str]) -> tuple[Run, bool]:
    """The run of this name, trained to its end; was it at its end already?"""
    status = read_json(folder / name / "status.json") if is_file(folder, f"{name}/status.json") else {}
    if status.get("state") == "done":
        return load(folder / name), True
    if has_checkpoint(folder, name):
        return resume(folder / name, watcher=watcher), False
    if is_folder(folder, name):  # killed before anything was saved
        remove_tree(folder, name)
    return train(plan, out=folder, name=name, watcher=watcher, command=command), False


def has_checkpoint(folder: Path, name: str) -> bool:
    """Did the run save anything?"""
    return is_folder(folder, name) and any(
        each.startswith("step_") for each in list_inside(folder / name, "checkpoints")
    )


def first_parameters(run: Run) -> Row:
    """The hash of the parameters that all learners of a run began with; an error if they were not the same."""
    events = read_rows(run.path / "events.jsonl")
    own = next((row for row in events if row["kind"] == "first_parameters"), None)
    formed = next((row for row in events if row["kind"] == "group_formed" and row.get("updates") == 0), None)
    if own is None:
        return {}
    reported = [own["sha256"], *(formed["parameters"] if formed is not None else [])]
    if len(set(reported)) > 1:
        raise QfleetError(
            f"the learners of {run.path} did not begin with the same parameters",
            f"They reported the hashes {', '.join(each[:12] for each in reported)}.",
            "This is a mistake of qfleet: report it with this folder, and begin again in another one.",
        )
    return {"sha256": own["sha256"], "learners": len(formed["parameters"]) if formed is not None else 1}


def decisions(rows: Sequence[Row], status: Row) -> list[Row]:
    """What validation decided, in order: to keep a checkpoint, to go on, to adjust a setting, to stop."""
    found: list[Row] = []
    best: float | None = None
    for row in rows:
        if row.get("kind") == "eval" and row.get("split") == "validation":
            better = best is None or row["mean"] > best
            best = row["mean"] if better else best
            what = "go on, new best" if better else "go on"
            found.append({"step": row["env_steps"], "what": what, "reason": score_text(row, better)})
        elif row.get("kind") == "steer":
            found.append({"step": row["env_steps"], "what": "adjust", "reason": row["text"]})
    if status.get("exit_code") is not None:
        found.append({"step": status.get("env_steps"), "what": "stop", "reason": status.get("reason")})
    return found


def score_text(row: Row, better: bool) -> str:
    """The score of a validation, and whether it is the best one so far."""
    span = f"{row['mean']:.4g} [{row['low']:.4g}, {row['high']:.4g}]"
    return f"validation score {span}: {'the best so far' if better else 'not better than before'}"
