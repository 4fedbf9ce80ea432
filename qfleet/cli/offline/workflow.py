"""`qfleet workflow`: from an environment, files or a data set to a policy and its report."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qfleet.cli.arguments import refuse_json_with_quiet, split_arguments
from qfleet.cli.output import INTERRUPTED, echo, echo_json, invocation
from qfleet.errors import UsageError
from qfleet.plan.local_paths import local_path


def workflow(
    plan: Annotated[str, Parameter(name="PLAN.toml", help="The stages and their settings (see docs/workflow.md).")],
    /,
    *settings: Annotated[
        str, Parameter(name="PATH=VALUE", help="Settings of its tables: collect.episodes=500, learn.runtime.type=ray.")
    ],
    out: Annotated[
        str | None, Parameter(help="Folder of the workflow; workflows/PLAN otherwise.", metavar="FOLDER")
    ] = None,
    store: Annotated[
        str | None, Parameter(help="Where its data sets are written; in its folder otherwise.", metavar="URL")
    ] = None,
    json: Annotated[bool, Parameter(help="Print the report as JSON.", show_default=False)] = False,
    quiet: Annotated[bool, Parameter(help="Print errors and the result only.", show_default=False)] = False,
) -> int:
    """Collect or import, validate, prepare, learn, judge and report. What is done already is skipped."""
    refuse_json_with_quiet(json, quiet)
    more, given = split_arguments(settings)
    if more is not None:
        raise UsageError(
            f"unexpected argument {more!r}",
            "After the file come settings of its tables, written path=value without spaces.",
            "Example: learn.seed=2",
        )
    from qfleet.watch import auto_mode, make_watcher, program
    from qfleet.workflow.plan import read_workflow
    from qfleet.workflow.stages import Console, run_workflow

    def note(text: str) -> None:
        echo(f"note: {text}", to_stderr=True)

    stream = sys.stderr if json else sys.stdout
    mode = "quiet" if quiet else auto_mode(stream, False, False)
    say = (lambda text: None) if quiet else (lambda text: echo(text, to_stderr=json))
    console = Console(say, note, lambda: make_watcher(mode, stream))
    folder = local_path(out if out is not None else Path("workflows", Path(plan).stem))
    command = ["qfleet", *invocation.get()]
    try:
        found = read_workflow(plan, [(path, text) for path, text, _ in given])
        report = run_workflow(found, folder, console, store=store, command=command)
    except KeyboardInterrupt:
        echo(f"stopped; the same command goes on: {program()} {' '.join(invocation.get())}", to_stderr=True)
        return INTERRUPTED
    if json:
        echo_json(report)
    else:
        echo(f"report {folder / 'report.html'}", f"       {folder / 'report.json'}")
    return int(report["exit_code"])
