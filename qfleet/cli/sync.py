"""`qfleet sync`: how the learners of a run agree, and how many they are, changed while it goes on."""

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qfleet.cli.arguments import split_words
from qfleet.cli.say import say
from qfleet.cli.training import Out, RunName
from qfleet.errors import UsageError
from qfleet.plan import Plan, changed, read_plan

HEARD_SECONDS = 60.0


def sync(
    run: RunName,
    /,
    *words: Annotated[
        str, Parameter(name="path=value", help="Settings of sync such as sync.type=local, or learners.num=N.")
    ],
    out: Out = "runs",
) -> int:
    """Have the learners of a run agree in another way, or be more or fewer, while it goes on."""
    named, settings = split_words(words)
    wrong = named or next((path for path, _, _ in settings if not path.startswith(("sync.", "learners.num"))), None)
    if wrong or not settings:
        raise UsageError(
            f"{wrong} cannot be changed while a run goes on" if wrong else "no setting is given",
            "How learners agree (sync.*) and how many they are (learners.num) can.",
            "Write for example: qfleet sync latest sync.type=local sync.every_updates=8",
        )
    from qfleet.training import requests
    from qfleet.watch import find_run

    folder = find_run(run, out)
    require_running(folder)
    await_heeded(folder)  # what somebody else has asked for comes first, and counts
    plan = read_plan(folder / "run.toml")
    if plan.learners.num == 1:
        raise UsageError(
            f"{folder} has one learner", "There is nobody to agree with.", "Start a run with learners.num=2 or more."
        )
    before = requests.now(folder, plan)
    after = changed(before, str(folder / "run.toml"), settings, alone=True)
    require_ranks(before, after)
    requests.ask(folder, requests.SyncRequest(after.sync, after.learners.num))
    await_heeded(folder)
    say(f"{folder}: {described(after)} from now on (before: {described(before)})")
    return 0


def require_ranks(before: Plan, after: Plan) -> None:
    """MPI starts processes once."""
    if before.learners.backend == "mpi" and after.learners.num > before.learners.num:
        raise UsageError(
            f"learners.num={after.learners.num} cannot be had: the run has {before.learners.num}",
            "MPI starts processes once, and one that was let go does not come back.",
            "Start the run with as many as it shall have at most.",
        )


def described(plan: Plan) -> str:
    """How the learners of a plan agree, in a few words."""
    num = plan.learners.num
    return "one learner" if num == 1 else f"{num} learners agree by {plan.sync.__struct_config__.tag}"


def require_running(folder: Path) -> None:
    """Only a run that is under way can be asked for something."""
    from qfleet.watch import run_state

    if run_state(folder) != "running":
        raise UsageError(
            f"{folder} is not running", "Nobody is there to agree.", f"Go on with it: qfleet resume {folder}"
        )


def await_heeded(folder: Path) -> None:
    """Wait until the run has taken what was asked, but not for ever."""
    from qfleet.training import requests

    until = time.monotonic() + HEARD_SECONDS
    while requests.is_asked(folder):
        require_running(folder)
        if time.monotonic() > until:
            raise UsageError(
                f"{folder} has not answered within {HEARD_SECONDS:g} seconds",
                "It looks for wishes between updates; a long evaluation keeps it from that.",
                "Leave it be: it will heed this one when it can.",
            )
        time.sleep(0.1)
