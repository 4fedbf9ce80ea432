"""Run directories, alone or in a group, and how they are found by name."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from qfleet.errors import UsageError
from qfleet.files import is_file, is_folder
from qfleet.plan.local_paths import local_path
from qfleet.watch.new_run_dir import LATEST, NAME
from qfleet.watch.read_files import read_json

GROUP_FILE = "group.json"


def is_run(path: Path) -> bool:
    """Is this the directory of a run? A link in a group's folder is not: the group may come from a stranger."""
    member = is_file(path.parent, GROUP_FILE)
    return is_file(path, "run.toml") and (not member or is_folder(path.parent, path.name))


def is_group(path: Path) -> bool:
    """Is this the directory of a group of runs?"""
    return is_file(path, GROUP_FILE)


def member_dirs(group: Path) -> list[Path]:
    """The members of a group that have started, in the group's own order."""
    listed = read_json(group / GROUP_FILE).get("members")
    names = [str(each.get("name")) for each in listed or () if isinstance(each, Mapping)]
    plain = [name for name in names if NAME.fullmatch(name) and name[0] != "." and is_folder(group, name)]
    return [group / name for name in plain if is_run(group / name)]


def run_label(path: Path) -> str:
    """A run's name; a member's with its group: cartpole-double-0007/seed-0."""
    return f"{path.parent.name}/{path.name}" if is_group(path.parent) else path.name


def runs_in(entry: Path) -> list[Path]:
    """The run itself, or the members of a group that have started."""
    return member_dirs(entry) if is_group(entry) else [entry]


def find_run(name: str | Path, out: Path | str = "runs") -> Path:
    """Find a run by path, name, unique prefix of a name, or "latest"; a member as GROUP/MEMBER."""
    text = str(name)
    parent = local_path(out)
    if text == LATEST:
        return _latest(parent)
    found = [path for path in _candidate_paths(text, parent) if is_run(path)]
    if found:
        return found[0]
    groups = [path for path in _candidate_paths(text, parent) if is_group(path)]
    if groups:
        raise _group_error(groups[0])
    return _single_match(text, _with_prefix(text, run_dirs(parent)), parent)


def find_run_or_group(name: str | Path, out: Path | str = "runs") -> Path:
    """Find a run or a group by path, name, unique prefix, or "latest", which for a member is its group."""
    text = str(name)
    parent = local_path(out)
    if text == LATEST:
        run = _latest(parent)
        return run.parent if is_group(run.parent) else run
    found = [path for path in _candidate_paths(text, parent) if is_run(path) or is_group(path)]
    if found:
        return found[0]
    matches = _with_prefix(text, _entries(parent)) or _with_prefix(text, run_dirs(parent))
    return _single_match(text, matches, parent)


def _candidate_paths(text: str, parent: Path) -> list[Path]:
    """The paths that a name may mean: inside the folder of runs, or a path of its own."""
    parts = text.split("/")
    plain = len(parts) <= 2 and all(NAME.fullmatch(part) and part not in (".", "..") for part in parts)
    return [*([parent / text] if plain else []), local_path(text)]


def _with_prefix(text: str, paths: list[Path]) -> list[Path]:
    """Runs or groups whose name begins with `text`; a member's name counts with and without its group."""
    return [path for path in paths if text and (run_label(path).startswith(text) or path.name.startswith(text))]


def _single_match(text: str, matches: list[Path], parent: Path) -> Path:
    if len(matches) == 1:
        return matches[0]
    if not matches and (broken := [path for path in _candidate_paths(text, parent) if _looks_like_run(path)]):
        raise _no_plan_error(broken[0])
    raise _ambiguous_error(text, matches) if matches else _unknown_error(text, parent)


def _looks_like_run(path: Path) -> bool:
    """Does a folder hold files that only runs have?"""
    return any(os.path.lexists(path / name) for name in ("status.json", "metrics.jsonl", "checkpoints", "run.toml"))


def _no_plan_error(path: Path) -> UsageError:
    return UsageError(
        f"{path} has no run.toml",
        "it looks like a run, but its plan is missing or is not a regular file",
        "put run.toml back from a copy of the run directory; without it the run can be neither resumed nor loaded",
    )


def _group_error(group: Path) -> UsageError:
    members = [run_label(path) for path in member_dirs(group)]
    return UsageError(
        f"{group} is a group of runs, not a run",
        f"its members are {', '.join(members[:5])}{', ...' if len(members) > 5 else ''}" if members else "it is empty",
        f"name a member, or see all of them: qfleet compare {group}",
    )


def _latest(parent: Path) -> Path:
    runs = run_dirs(parent)
    if not runs:
        raise UsageError(
            f"there is no run in {parent}",
            "'latest' means the run in that folder that was active last",
            "start one: qfleet train CartPole-v1, or name its folder with --out",
        )
    return runs[0]


def _ambiguous_error(text: str, matches: list[Path]) -> UsageError:
    names = ", ".join(sorted(map(run_label, matches))[:5]) + (", ..." if len(matches) > 5 else "")
    return UsageError(f"{text!r} could be {len(matches)} runs", f"these begin so: {names}", "give more of the name")


def _unknown_error(text: str, parent: Path) -> UsageError:
    names = [path.name for path in _entries(parent)]
    near = difflib.get_close_matches(Path(text).name, names, n=3, cutoff=0.4) or names[:3]
    why = f"{parent} holds " + (f"for example {', '.join(near)}" if near else "no runs")
    return UsageError(
        f"there is no run {text!r}", why, "list them with: qfleet runs, or give the path of a run directory"
    )


def run_dirs(parent: Path) -> list[Path]:
    """Runs in a folder, including members of groups, the most recently active first."""
    found = [path for entry in _entries(parent) for path in (member_dirs(entry) if is_group(entry) else [entry])]
    return sorted(found, key=lambda path: (last_active(path), run_label(path)), reverse=True)


def _entries(parent: Path) -> list[Path]:
    """Groups, and runs outside of groups, the most recently active first."""
    try:
        found = [path for path in parent.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
    found = [path for path in found if is_run(path) or is_group(path)]
    return sorted(found, key=lambda path: (last_active(path), path.name), reverse=True)


def last_active(path: Path) -> float:
    """When the status of a run or group was last written."""
    for name in ("status.json", "run.toml", GROUP_FILE):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0
