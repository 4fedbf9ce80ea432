"""Stored runs: list, show, compare and remove them."""

import fcntl
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qfleet.errors import QfleetError, StorageError, UsageError
from qfleet.files import is_file, list_inside, remove_file, remove_tree
from qfleet.plan import read_tables_in
from qfleet.plan.local_paths import local_path
from qfleet.plan.secrets import redacted_options
from qfleet.watch.provenance import resume_command
from qfleet.watch.read_files import count_lines, last_rows, read_json
from qfleet.watch.run_directory import GROUP_FILE, is_group, is_run, last_active, member_dirs, run_dirs, run_label
from qfleet.watch.run_files import open_plain

STEP = re.compile(r"step_[0-9]{12}")
# The files of a group's folder besides its members.
GROUP_FILES = (GROUP_FILE, "plan.toml", "plot.png", "trust.json")


def read_tables(run_dir: Path) -> dict[str, Any]:
    """The tables of run.toml for display, valid for this version or not, with secrets hidden."""
    tables = read_tables_in(run_dir, "run.toml")
    env = tables.get("env")
    if isinstance(env, dict) and isinstance(env.get("options"), dict):
        env["options"] = redacted_options(env["options"])
    return tables


def list_runs(out: Path | str = "runs") -> list[dict[str, Any]]:
    """One dict per run, the most recently active first: name, path, env, state, steps, best, score, age_seconds."""
    now = datetime.now(UTC).timestamp()  # compared with file times, for display only
    return [{**_listed(path), "age_seconds": max(0.0, now - last_active(path))} for path in run_dirs(local_path(out))]


def _listed(path: Path) -> dict[str, Any]:
    try:
        return _described(path)
    except (QfleetError, OSError, ValueError, TypeError, ArithmeticError) as error:
        # One unreadable run must not hide the others.
        known = {"name": run_label(path), "path": str(path), "env": "?", "state": "unreadable", "why": str(error)}
        return {**known, "steps": 0, "best": None, "score": None}


def _described(path: Path) -> dict[str, Any]:
    status = read_json(path / "status.json")
    try:
        env = read_tables(path).get("env")
    except UsageError:
        env = None
    return {
        "name": run_label(path),
        "path": str(path),
        "env": str(env.get("id", "?")) if isinstance(env, Mapping) else "?",
        "state": run_state(path, status),
        "steps": steps if isinstance(steps := status.get("env_steps"), int) else 0,
        "best": _mean(read_json(path / "best.json")),
        "score": _mean(status.get("score")),
    }


def _mean(row: Any) -> float | None:
    value = row.get("mean", row.get("score")) if isinstance(row, Mapping) else row
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def run_state(path: Path, status: Mapping[str, Any] | None = None) -> str:
    """The state in status.json; "killed" if that is "running" but no process holds the lock."""
    status = read_json(path / "status.json") if status is None else status
    state = str(status.get("state", "new"))
    return "killed" if state == "running" and not is_locked(path) else state


def is_locked(path: Path) -> bool:
    """Does a running process hold this run's lock?"""
    try:
        file = open_plain(path / "run.lock")
    except OSError:
        return False
    try:
        # Shared, so that two processes checking at once do not mistake each other for the writer.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


@contextmanager
def _exclusive_lock(path: Path) -> Iterator[None]:
    file = open_plain(path / "run.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def remove_run(path: Path | str) -> None:
    """Delete a run directory that no process writes to; a group is removed with its last run."""
    path = Path(path)
    if path.is_symlink() or not is_run(path):
        raise UsageError(
            f"{path} is not a run directory",
            "there is no run.toml in it, or it is a link",
            "list them with: qfleet runs",
        )
    try:
        with _exclusive_lock(path):
            remove_tree(path.parent, path.name)
        _remove_if_empty(path.parent)
    except BlockingIOError:
        raise StorageError(
            f"{path} is in use", "a process is still writing to this run", "stop it with Ctrl-C first"
        ) from None
    except OSError as error:
        raise StorageError(
            f"cannot remove {path}",
            f"the system said: {error.strerror or error}",
            "check who owns the folder, then retry",
        ) from error


def remove_group(path: Path | str) -> None:
    """Delete a group with all its runs, none of which may be in use."""
    path = Path(path)
    if path.is_symlink() or not is_group(path):
        raise UsageError(
            f"{path} is not the directory of a group",
            f"there is no {GROUP_FILE} in it, or it is a link",
            "see: qfleet runs",
        )
    members = member_dirs(path)
    for each in (path, *members):
        if is_locked(each):
            raise StorageError(
                f"{each} is in use", "a process is still writing to this group", "stop it with Ctrl-C first"
            )
    for member in members:
        remove_run(member)
    _remove_if_empty(path)  # a group without started members is still there


def _remove_if_empty(group: Path) -> None:
    """Remove a group without members; its folder stays if it holds other files."""
    if not is_group(group) or member_dirs(group) or is_locked(group):
        return
    for name in GROUP_FILES:
        remove_file(group, name)
    with suppress(OSError):
        remove_tree(group, "logs")
    with suppress(OSError):
        group.rmdir()


def show_run(path: Path | str) -> dict[str, Any]:
    """Everything about a run: state, plan, checkpoints, size, last rows, provenance."""
    path = Path(path)
    rows = last_rows(path / "metrics.jsonl")
    return {
        **_listed(path),
        "status": _status(path),
        "plan": read_tables(path),
        "best_row": read_json(path / "best.json"),
        "last_progress": _last(rows, "progress"),
        "last_eval": _last([row for row in rows if row.get("split") != "test"], "eval"),
        "checkpoints": _checkpoints(path),
        "events": count_lines(path / "events.jsonl"),
        "bytes": _size(path),
        "provenance": read_json(path / "provenance.json"),
    }


def _checkpoints(path: Path) -> list[str]:
    """The names of a run's checkpoints; links are not followed."""
    try:
        names = list_inside(path, "checkpoints")
    except OSError:
        return []
    return [name for name in names if STEP.fullmatch(name) and is_file(path, f"checkpoints/{name}/manifest.json")]


def _status(path: Path) -> dict[str, Any]:
    """status.json, with the resume command for the run's current path, which may have changed."""
    status = read_json(path / "status.json")
    return {**status, "resume": resume_command(path)} if "resume" in status else status


def _last(rows: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((row for row in reversed(rows) if row.get("kind") == kind), None)


def _size(path: Path) -> int:
    """Bytes on disk; a file that is hard-linked into several checkpoints counts once."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                stat = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            seen[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(seen.values())


def flatten_tables(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as plan paths: {"env": {"id": x}} becomes {"env.id": x}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten_tables(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def diff_runs(a: Path | str, b: Path | str) -> list[tuple[str, Any, Any]]:
    """Settings that differ between two runs: (path, value in a, value in b); None where one is absent."""
    left = flatten_tables(read_tables(Path(a)))
    right = flatten_tables(read_tables(Path(b)))
    paths = [*left, *(path for path in right if path not in left)]
    return [(path, left.get(path), right.get(path)) for path in paths if left.get(path) != right.get(path)]
