"""`qfleet workflow`: from an environment or a data set to a policy and its report."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qfleet.cli.output import echo, echo_json
from qfleet.plan.local_paths import local_path


def workflow(
    plan: Annotated[str, Parameter(name="PLAN.toml", help="The stages and their settings (see docs/workflow.md).")],
    /,
    *,
    out: Annotated[
        str | None, Parameter(help="Folder of the workflow; workflows/PLAN otherwise.", metavar="FOLDER")
    ] = None,
    json: Annotated[bool, Parameter(help="Print the report as JSON.", show_default=False)] = False,
) -> int:
    """Collect, validate, prepare, learn, judge and report. What is done already is skipped."""
    from qfleet.workflow.plan import read_workflow
    from qfleet.workflow.stages import run_workflow

    folder = local_path(out if out is not None else Path("workflows", Path(plan).stem))
    report = run_workflow(read_workflow(plan), folder, lambda text: echo(text, to_stderr=json))
    if json:
        echo_json(report)
    else:
        echo(f"report {folder / 'report.html'}", f"       {folder / 'report.json'}")
    return int(report["exit_code"])
