"""`qfleet sync`: change how the learners of a running run synchronise, and how many there are."""

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qfleet.cli.arguments import split_arguments
from qfleet.cli.output import echo
from qfleet.cli.training import Out, RunName
from qfleet.errors import UsageError
from qfleet.plan import Plan, read_plan, with_settings

APPLY_TIMEOUT_SECONDS = 60.0


def sync(
    run: RunName,
    /,
    *arguments: Annotated[
        str, Parameter(name="path=value", help="Settings of sync such as sync.type=local, or learners.num=N.")
    ],
    out: Out = "runs",
) -> int:
    """Change how the learners of a running run synchronise, or how many there are."""
    named, settings = split_arguments(arguments)
    wrong = named or next((path for path, _, _ in settings if not path.startswith(("sync.", "learners.num"))), None)
    if wrong or not settings:
        raise UsageError(
            f"{wrong} cannot be changed while a run goes on" if wrong else "no setting is given",
            "Only how learners synchronise (sync.*) and how many there are (learners.num) can be changed.",
            "Write for example: qfleet sync latest sync.type=local sync.every_updates=8",
        )
    from qfleet.training import requests
    from qfleet.watch import find_run

    folder = find_run(run, out)
    require_running(folder)
    await_applied(folder)  # an earlier request is applied first, and this one builds on it
    plan = read_plan(folder / "run.toml")
    if plan.learners.num == 1:
        raise UsageError(
            f"{folder} has one learner",
            "A single learner does not synchronise.",
            "Start a run with learners.num=2 or more.",
        )
    before = requests.current_plan(folder, plan)
    after = with_settings(before, str(folder / "run.toml"), settings, allow_single_learner=True)
    require_ranks(before, after)
    requests.write_request(folder, requests.SyncRequest(after.sync, after.learners.num))
    await_applied(folder)
    echo(f"{folder}: {sync_text(after)} from now on (before: {sync_text(before)})")
    return 0


def require_ranks(before: Plan, after: Plan) -> None:
    """Refuse more learners under MPI, which starts processes only once."""
    if before.learners.backend == "mpi" and after.learners.num > before.learners.num:
        raise UsageError(
            f"learners.num={after.learners.num} is not possible: the run has {before.learners.num}",
            "MPI starts processes only once, and a stopped one is not started again.",
            "Start the run with the largest number of learners it shall have.",
        )


def sync_text(plan: Plan) -> str:
    """How many learners a plan has and how they synchronise."""
    num = plan.learners.num
    return "one learner" if num == 1 else f"{num} learners agree by {plan.sync.__struct_config__.tag}"


def require_running(folder: Path) -> None:
    """Raise unless the run is running."""
    from qfleet.watch.run_listing import run_state

    if run_state(folder) != "running":
        raise UsageError(
            f"{folder} is not running", "Only a running run can be changed.", f"Go on with it: qfleet resume {folder}"
        )


def await_applied(folder: Path) -> None:
    """Wait until the run has applied the pending request, up to a time limit."""
    from qfleet.training import requests

    until = time.monotonic() + APPLY_TIMEOUT_SECONDS
    while requests.is_pending(folder):
        require_running(folder)
        if time.monotonic() > until:
            raise UsageError(
                f"{folder} has not answered within {APPLY_TIMEOUT_SECONDS:g} seconds",
                "It polls for requests between updates; a long evaluation delays that.",
                "Do nothing: the request stays, and the run applies it at its next poll.",
            )
        time.sleep(0.1)
