"""`qfleet runs`: list, show, diff, rm."""

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from qfleet.cli.arguments import COMMANDS, LOOK
from qfleet.cli.output import echo, echo_json, echo_table, size
from qfleet.cli.training import GroupName, Out
from qfleet.errors import UsageError
from qfleet.plan.setting_text import format_value

app = App(
    name="runs",
    help="List runs; show, compare or remove them.",
    group=LOOK,
    group_commands=COMMANDS,
    help_epilogue="Example:\n  qfleet runs",
)

Json = Annotated[bool, Parameter(help="As JSON.", show_default=False)]


def list_all(*, out: Out = "runs", json: Json = False) -> int:
    """List the runs in a folder, the newest first."""
    from qfleet.watch.run_listing import list_runs

    found = list_runs(out)
    if json:
        echo_json(found)
    elif not found:
        echo(f"There is no run in {out} yet. Start one: qfleet train CartPole-v1")
    else:
        rows = [(*_cells(each), _age(each["age_seconds"])) for each in found]
        echo_table(rows, ("run", "environment", "state", "steps", "best", "score", "age"))
    return 0


def show(run: GroupName, /, *, out: Out = "runs", json: Json = False) -> int:
    """Show one run, or every run of a group: state, scores, checkpoints, size."""
    from qfleet.watch.run_directory import find_run_or_group, is_group
    from qfleet.watch.run_listing import show_run

    entry = find_run_or_group(run, out)
    if is_group(entry):
        return _show_group(entry, json)
    found = show_run(entry)
    if json:
        echo_json(found)
        return 0
    keys = ("name", "path", "env", "state", "steps", "best", "score")
    status = found.get("status") or {}
    echo_table(
        [(key, format_value(found[key])) for key in keys if found.get(key) is not None]
        + [(key, format_value(status[key])) for key in ("reason", "exit_code", "resume") if status.get(key) is not None]
        + [("checkpoints", ", ".join(found["checkpoints"]) or "none"), ("size", size(found["bytes"]))]
    )
    return 0


def _show_group(group: Path, json: bool) -> int:
    from qfleet.watch import read_json
    from qfleet.watch.provenance import resume_command
    from qfleet.watch.run_directory import GROUP_FILE, member_dirs
    from qfleet.watch.run_listing import show_run

    status = read_json(group / GROUP_FILE)
    runs = [show_run(path) for path in member_dirs(group)]
    about: dict[str, Any] = {"name": group.name, "path": str(group)}
    about |= {key: status.get(key) for key in ("env", "state", "reason", "exit_code")}
    about |= {"resume": resume_command(group)}  # with the current path, which may have changed
    if json:
        echo_json({**about, "runs": runs})
        return 0
    echo_table([(key, format_value(value)) for key, value in about.items() if value is not None])
    echo()
    rows = [(*_cells(run), len(run["checkpoints"]), size(run["bytes"])) for run in runs]
    echo_table(rows, ("run", "environment", "state", "steps", "best", "score", "checkpoints", "size"))
    return 0


def diff(
    first: Annotated[str, Parameter(name="RUN", help="A run.")],
    second: Annotated[str, Parameter(name="OTHER", help="The run to compare it with.")],
    /,
    *,
    out: Out = "runs",
    json: Json = False,
) -> int:
    """Show the settings in which two runs differ."""
    from qfleet.watch import find_run
    from qfleet.watch.run_listing import diff_runs

    a = find_run(first, out)
    b = find_run(second, out)
    found = diff_runs(a, b)
    if json:
        echo_json([{"path": path, "a": left, "b": right} for path, left, right in found])
    elif not found:
        echo(f"{a.name} and {b.name} have equal plans.")
    else:
        echo_table(
            [(path, format_value(left), format_value(right)) for path, left, right in found],
            ("setting", a.name, b.name),
        )
    return 0


def remove(
    *runs: Annotated[str, Parameter(name="RUN", help="One or more runs or groups.")],
    out: Out = "runs",
    yes: Annotated[bool, Parameter(help="Do not ask.", show_default=False)] = False,
) -> int:
    """Delete runs or whole groups, and all their checkpoints, after asking."""
    if not runs:
        raise UsageError("qfleet runs rm needs RUN", "The argument RUN is missing.", "See: qfleet runs")
    from qfleet.watch.run_directory import find_run_or_group, is_group
    from qfleet.watch.run_listing import remove_group, remove_run

    paths = [find_run_or_group(run, out) for run in runs]
    if not yes:
        _confirm(", ".join(map(_path_text, paths)))
    for path in paths:
        (remove_group if is_group(path) else remove_run)(path)
        echo(f"removed {path}")
    return 0


def _path_text(path: Path) -> str:
    from qfleet.watch.run_directory import is_group, member_dirs

    return f"{path} (a group of {len(member_dirs(path))} runs)" if is_group(path) else str(path)


def _confirm(names: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError(
            f"{names} would be deleted",
            "Standard input is no terminal, so it cannot be confirmed.",
            "Add --yes to delete.",
        )
    if input(f"Delete {names}? Type yes: ").strip() != "yes":
        raise UsageError("nothing was deleted", "The answer was not yes.", "Type yes, or give --yes.")


def _cells(run: dict[str, Any]) -> tuple[object, ...]:
    scores = ["-" if run.get(key) is None else f"{run[key]:.1f}" for key in ("best", "score")]
    return run["name"], run["env"], run["state"], run["steps"], *scores


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


app.default(list_all)
app.command(list_all, name=("list", "ls"), help_epilogue="Example:\n  qfleet runs list --out experiments")
app.command(show, help_epilogue="Example:\n  qfleet runs show latest")
app.command(diff, help_epilogue="Example:\n  qfleet runs diff cartpole-dqn-0001 cartpole-dqn-0002")
app.command(remove, name="rm", help_epilogue="Example:\n  qfleet runs rm cartpole-dqn-0001 --yes")
