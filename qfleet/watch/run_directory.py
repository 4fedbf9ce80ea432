"""Run directories, alone or in a group: making, finding, listing, comparing and removing them."""

import difflib
import fcntl
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qfleet.errors import QfleetError, StorageError, UsageError
from qfleet.files import is_file, is_folder, names_inside, remove_file, remove_tree, sync_folder
from qfleet.plan import read_tables_in
from qfleet.plan.local_paths import local_path
from qfleet.plan.secrets import hidden
from qfleet.watch.provenance import program
from qfleet.watch.run_files import count_lines, last_rows, open_plain, read_json

NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
STEP = re.compile(r"step_[0-9]{12}")
LATEST = "latest"
NEXT = "-#"  # a name that ends so gets the next free number instead
MOST_TRIES = 1000
GROUP_FILE = "group.json"
# What a group's folder holds besides its members.
GROUP_FILES = (GROUP_FILE, "plan.toml", "plot.png", "trust.json")


def is_run(path: Path) -> bool:
    """Is this the directory of a run? A link in a group's folder is not: the group may be a stranger's."""
    member = is_file(path.parent, GROUP_FILE)
    return is_file(path, "run.toml") and (not member or is_folder(path.parent, path.name))


def is_group(path: Path) -> bool:
    """Is this the directory of a group of runs?"""
    return is_file(path, GROUP_FILE)


def member_dirs(group: Path) -> list[Path]:
    """The members of a group that have begun, in the group's own order."""
    listed = read_json(group / GROUP_FILE).get("members")
    names = [str(each.get("name")) for each in listed or () if isinstance(each, Mapping)]
    plain = [name for name in names if NAME.fullmatch(name) and name[0] != "." and is_folder(group, name)]
    return [group / name for name in plain if is_run(group / name)]


def label(path: Path) -> str:
    """A run's name; a member's with its group: cartpole-double-0007/seed-0."""
    return f"{path.parent.name}/{path.name}" if is_group(path.parent) else path.name


def runs_of(entry: Path) -> list[Path]:
    """A run as it is; of a group, the members that have begun."""
    return member_dirs(entry) if is_group(entry) else [entry]


def next_name(env_id: str, algorithm: str = "dqn") -> str:
    """The name of a new run that nobody named: cartpole-rainbow-#."""
    return f"{_slug(env_id)}-{_slug(algorithm)}{NEXT}"


def new_run_dir(out: Path | str, env_id: str, name: str | None = None) -> Path:
    """Make the directory of a new run: the given name, or for cartpole-dqn-# the next free one, cartpole-dqn-0007."""
    parent = local_path(out)
    name = next_name(env_id) if name is None else name
    check_name(name)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        path = _numbered(parent, name.removesuffix(NEXT)) if name.endswith(NEXT) else _named(parent, name)
        sync_folder(parent)  # else a power cut could take the run away, checkpoints and all
        return path
    except OSError as error:
        raise StorageError(
            f"cannot make a run directory in {parent}",
            f"the system said: {error.strerror or error}",
            "choose another folder with --out",
        ) from error


def _named(parent: Path, name: str) -> Path:
    try:
        (parent / name).mkdir()
    except FileExistsError:
        raise UsageError(
            f"there is already a run called {name!r} in {parent}",
            "a new run never writes into the directory of an old one",
            f"choose another --name, or go on with it: qfleet resume {parent / name}",
        ) from None
    return parent / name


def _numbered(parent: Path, stem: str) -> Path:
    taken = [int(path.name[len(stem) + 1 :]) for path in parent.iterdir() if _is_numbered(path.name, stem)]
    first = max(taken, default=0) + 1
    for number in range(first, first + MOST_TRIES):
        path = parent / f"{stem}-{number:04}"
        try:
            path.mkdir()
        except FileExistsError:  # another run took this number a moment ago
            continue
        return path
    raise StorageError(f"no free run number after {stem}-{first:04} in {parent}", "", "choose a name with --name")


def _is_numbered(name: str, stem: str) -> bool:
    return re.fullmatch(re.escape(stem) + r"-[0-9]{1,9}", name) is not None


def _slug(text: str) -> str:
    """CartPole-v1 becomes cartpole, ALE/Pong-v5 pong, maze.py:Maze maze."""
    text = re.sub(r"-v\d+$", "", text.rpartition(":")[2])
    text = re.sub(r"[^a-z0-9]+", "-", text.removeprefix("ALE/").lower()).strip("-")
    return text[:40].strip("-") or "run"


def check_name(name: str) -> None:
    """Refuse a run name that could leave its folder or be taken for something else."""
    plain = f"{name.removesuffix(NEXT)}-0001" if name.endswith(NEXT) else name
    if NAME.fullmatch(plain) is None or plain[0] in ".-" or plain == LATEST:
        raise UsageError(
            f"{name!r} cannot be the name of a run",
            "a name has 1 to 100 of the characters A-Z a-z 0-9 . _ -, starts with a letter or digit or _,"
            f" and is not {LATEST!r}",
            "choose another --name, for example cartpole-first-try",
        )


def find_run(name: str | Path, out: Path | str = "runs") -> Path:
    """A run by path, name, unique beginning of a name, or "latest"; a member as GROUP/MEMBER."""
    text = str(name)
    parent = local_path(out)
    if text == LATEST:
        return _latest(parent)
    found = [path for path in _places(text, parent) if is_run(path)]
    if found:
        return found[0]
    groups = [path for path in _places(text, parent) if is_group(path)]
    if groups:
        raise _not_one(groups[0])
    return _only(text, _beginning(text, _run_dirs(parent)), parent)


def find_entry(name: str | Path, out: Path | str = "runs") -> Path:
    """A run or a group by path, name, unique beginning of a name, or "latest", which is the group of a member."""
    text = str(name)
    parent = local_path(out)
    if text == LATEST:
        run = _latest(parent)
        return run.parent if is_group(run.parent) else run
    found = [path for path in _places(text, parent) if is_run(path) or is_group(path)]
    if found:
        return found[0]
    matches = _beginning(text, _entries(parent)) or _beginning(text, _run_dirs(parent))
    return _only(text, matches, parent)


def _places(text: str, parent: Path) -> list[Path]:
    """Where a name may lead: into the folder of runs, or a path of its own."""
    parts = text.split("/")
    plain = len(parts) <= 2 and all(NAME.fullmatch(part) and part not in (".", "..") for part in parts)
    return [*([parent / text] if plain else []), local_path(text)]


def _beginning(text: str, paths: list[Path]) -> list[Path]:
    """The runs or groups whose name begins so; a member's is its own or that with its group."""
    return [path for path in paths if text and (label(path).startswith(text) or path.name.startswith(text))]


def _only(text: str, matches: list[Path], parent: Path) -> Path:
    if len(matches) == 1:
        return matches[0]
    if not matches and (broken := [path for path in _places(text, parent) if _was_run(path)]):
        raise _without_plan(broken[0])
    raise _ambiguous(text, matches) if matches else _unknown(text, parent)


def _was_run(path: Path) -> bool:
    """Does a folder without run.toml hold what only runs hold?"""
    return any(os.path.lexists(path / name) for name in ("status.json", "metrics.jsonl", "checkpoints", "run.toml"))


def _without_plan(path: Path) -> UsageError:
    return UsageError(
        f"{path} has no run.toml",
        "it looks like a run, but the plan that it was begun with is missing or is not a plain file",
        "put run.toml back from a copy of the run directory; without it the run can be neither resumed nor loaded",
    )


def _not_one(group: Path) -> UsageError:
    members = [label(path) for path in member_dirs(group)]
    return UsageError(
        f"{group} is a group of runs, not a run",
        f"its members are {', '.join(members[:5])}{', ...' if len(members) > 5 else ''}" if members else "it is empty",
        f"name a member, or see all of them: qfleet compare {group}",
    )


def _latest(parent: Path) -> Path:
    runs = _run_dirs(parent)
    if not runs:
        raise UsageError(
            f"there is no run in {parent}",
            "'latest' means the run in that folder that was active last",
            "start one: qfleet train CartPole-v1, or name its folder with --out",
        )
    return runs[0]


def _ambiguous(text: str, matches: list[Path]) -> UsageError:
    names = ", ".join(sorted(map(label, matches))[:5]) + (", ..." if len(matches) > 5 else "")
    return UsageError(f"{text!r} could be {len(matches)} runs", f"these begin so: {names}", "give more of the name")


def _unknown(text: str, parent: Path) -> UsageError:
    names = [path.name for path in _entries(parent)]
    near = difflib.get_close_matches(Path(text).name, names, n=3, cutoff=0.4) or names[:3]
    why = f"{parent} holds " + (f"for example {', '.join(near)}" if near else "no runs")
    return UsageError(
        f"there is no run {text!r}", why, "list them with: qfleet runs, or give the path of a run directory"
    )


def _run_dirs(parent: Path) -> list[Path]:
    """Runs in a folder, members of groups among them, the one active last first."""
    found = [path for entry in _entries(parent) for path in (member_dirs(entry) if is_group(entry) else [entry])]
    return sorted(found, key=lambda path: (_touched(path), label(path)), reverse=True)


def _entries(parent: Path) -> list[Path]:
    """Groups, and runs outside of groups, the one active last first."""
    try:
        found = [path for path in parent.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
    found = [path for path in found if is_run(path) or is_group(path)]
    return sorted(found, key=lambda path: (_touched(path), path.name), reverse=True)


def _touched(path: Path) -> float:
    """When the run, or the group, last said something about itself."""
    for name in ("status.json", "run.toml", GROUP_FILE):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def read_tables(run_dir: Path) -> dict[str, Any]:
    """run.toml as the tables it holds, be they a plan of this version or not."""
    tables = read_tables_in(run_dir, "run.toml")
    env = tables.get("env")
    if isinstance(env, dict) and isinstance(env.get("options"), dict):
        env["options"] = hidden(env["options"])  # they are read to be shown
    return tables


def list_runs(out: Path | str = "runs") -> list[dict[str, Any]]:
    """One dict per run, the one active last first: name, path, env, state, steps, best, score, age_seconds."""
    now = datetime.now(UTC).timestamp()  # compared with file times, for display only
    return [{**_listed(path), "age_seconds": max(0.0, now - _touched(path))} for path in _run_dirs(local_path(out))]


def _listed(path: Path) -> dict[str, Any]:
    try:
        return _described(path)
    except (QfleetError, OSError, ValueError, TypeError, ArithmeticError) as error:
        # One run that cannot be read must not hide the others.
        known = {"name": label(path), "path": str(path), "env": "?", "state": "unreadable", "why": str(error)}
        return {**known, "steps": 0, "best": None, "score": None}


def _described(path: Path) -> dict[str, Any]:
    status = read_json(path / "status.json")
    try:
        env = read_tables(path).get("env")
    except UsageError:
        env = None
    return {
        "name": label(path),
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
    """The state in status.json; a run that says "running" but whose writer is gone was "killed"."""
    status = read_json(path / "status.json") if status is None else status
    state = str(status.get("state", "new"))
    return "killed" if state == "running" and not is_locked(path) else state


def is_locked(path: Path) -> bool:
    """Does a living process write to this run?"""
    try:
        file = open_plain(path / "run.lock")
    except OSError:
        return False
    try:
        # Shared, so that two who look at the same moment do not take each other for the writer.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


@contextmanager
def _held(path: Path) -> Iterator[None]:
    file = open_plain(path / "run.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def remove_run(path: Path | str) -> None:
    """Delete a run directory, unless it is not one or a process still writes to it; a group goes with its last run."""
    path = Path(path)
    if path.is_symlink() or not is_run(path):
        raise UsageError(
            f"{path} is not a run directory",
            "there is no run.toml in it, or it is a link",
            "list them with: qfleet runs",
        )
    try:
        with _held(path):
            remove_tree(path.parent, path.name)
        _leave_group(path.parent)
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
    """Delete a group with all its runs, unless it is a link or a process still writes to any of them."""
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
    _leave_group(path)  # of which no member has begun


def _leave_group(group: Path) -> None:
    """A group without members is removed, unless somebody keeps something of their own there."""
    if not is_group(group) or member_dirs(group) or is_locked(group):
        return
    for name in GROUP_FILES:
        remove_file(group, name)
    with suppress(OSError):
        remove_tree(group, "logs")
    with suppress(OSError):
        group.rmdir()


def show_run(path: Path | str) -> dict[str, Any]:
    """All there is to know about a run: state, plan, checkpoints, size, last rows, provenance."""
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
    """The names of a run's checkpoints; a folder that is a link has none."""
    try:
        names = names_inside(path, "checkpoints")
    except OSError:
        return []
    return [name for name in names if STEP.fullmatch(name) and is_file(path, f"checkpoints/{name}/manifest.json")]


def _status(path: Path) -> dict[str, Any]:
    """status.json; the command that goes on names where the run is now, not where it was written."""
    status = read_json(path / "status.json")
    return {**status, "resume": resume_command(path)} if "resume" in status else status


def resume_command(path: Path) -> str:
    """What to type to go on with a run or a group."""
    return f"{program()} resume {shlex.quote(str(path))}"


def _last(rows: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((row for row in reversed(rows) if row.get("kind") == kind), None)


def _size(path: Path) -> int:
    """Bytes on the disk; a file linked into several checkpoints counts once."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                stat = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            seen[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(seen.values())


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as plan paths: {"env": {"id": x}} becomes {"env.id": x}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= dotted(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def diff_runs(a: Path | str, b: Path | str) -> list[tuple[str, Any, Any]]:
    """Where two plans differ: (path, value in a, value in b); None where one has no such setting."""
    left = dotted(read_tables(Path(a)))
    right = dotted(read_tables(Path(b)))
    paths = [*left, *(path for path in right if path not in left)]
    return [(path, left.get(path), right.get(path)) for path in paths if left.get(path) != right.get(path)]
