"""A guard over the process that learns: when it is killed, its run goes on from the last commit.

Only where actors live in processes of their own; a run in one thread is one process, and whoever kills that means it.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from qfleet import heartbeat
from qfleet.cli.output import echo, supervising
from qfleet.plan.schema import InlineRuntime, Plan, ProcessesRuntime
from qfleet.system.descendants import adopt_orphans, descendants, end_descendants
from qfleet.training.process.supervise import (
    ExitVerdict,
    SupervisedProcess,
    drain,
    forwarding,
    report,
    stopping,
    supervised,
    wait,
)

GUARDED = "QFLEET_GUARDED"  # set for the process under guard
START = "from qfleet.cli import main; sys.exit(main())"
RESTARTS = 5  # in ten minutes


def needs_restarts(plan: Plan) -> bool:
    """Is this run to be guarded, and by us? The process under guard ends with its guard, after saving."""
    if GUARDED not in os.environ:
        return isinstance(plan.runtime, ProcessesRuntime)
    from qfleet.system.child_process import die_with_parent  # most commands need none of that room

    die_with_parent(signal.SIGTERM, int(os.environ[GUARDED]))
    return False


def steps_in_this_process(plan: Plan) -> bool:
    """Are the environments of this run stepped in this process?"""
    return (
        isinstance(plan.runtime, InlineRuntime) and plan.learners.backend != "mpi"
    )  # MPI knows the processes it started


def run_supervised(work: Callable[[], int]) -> int:
    """Do work that runs environments: where this is a command of its own, in a fork that is supervised."""
    if not supervising.get() or GUARDED in os.environ:
        return work()
    from qfleet.cli.entry import exit_code_of

    return supervised(lambda: exit_code_of(work))


def run_with_restarts(
    arguments: Sequence[str],
    out: str,
    resume_arguments: Callable[[Path], list[str]],
    *,
    to_stderr: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the command `arguments` in a process of its own; `resume_arguments` makes the command that goes on with its run."""
    from qfleet.system.oom import oom_kills
    from qfleet.system.restart_budget import RestartBudget  # most commands need none of that room

    if supervising.get():
        adopt_orphans()
    command = list(arguments)
    budget = RestartBudget(RESTARTS)
    while True:
        before = run_owners(Path(out))
        killed = oom_kills()
        code, pid, asked = run_child(command)
        if code >= 0:
            return code
        folder = None if asked else run_of_process(pid, Path(out), before)
        name = signal.Signals(-code).name
        if -code == signal.SIGKILL and oom_kills() > killed:
            name = f"{name}, by the kernel, for lack of memory (a smaller replay.capacity needs less)"
        if folder is None or not budget.charge(clock()):
            echo(f"the learner was ended by {name}", to_stderr=True)
            return 128 - code
        echo(f"the learner was ended by {name}: going on with {folder} from its last commit", to_stderr=to_stderr)
        command = resume_arguments(folder)


def run_child(command: Sequence[str]) -> tuple[int, int, bool]:
    """Run a command line of ours: its exit code (minus the signal that ended it), its process id, was it asked to end?

    The child has a process group of its own, so that Ctrl-C reaches it through us alone, and once.
    """
    from qfleet.system.child_process import python_command

    heartbeat.open_standard_streams()
    page = heartbeat.new_page_file()
    crash_log = heartbeat.unnamed_file()
    ours, theirs = os.pipe()
    given = (page, theirs, crash_log)
    known = {**os.environ, GUARDED: str(os.getpid()), heartbeat.DESCRIPTORS_VARIABLE: ",".join(map(str, given))}
    arguments = python_command(START, *command)
    not_ours = descendants(os.getpid())
    process = subprocess.Popen(arguments, env=known, process_group=0, pass_fds=given)  # noqa: S603  our own program
    os.close(theirs)
    child = SupervisedProcess(process.pid, heartbeat.Heartbeat(page), ours, crash_log, adopts=supervising.get())
    os.close(page)
    with forwarding(child, child.heartbeat) as asked, stopping(lambda: [child.pid]):
        verdict = wait(child, asked)
    process.returncode = child.code()
    if supervising.get():
        end_descendants(keep=not_ours)
    return _exit_code_of(child, verdict), child.pid, bool(asked)


def _exit_code_of(child: SupervisedProcess, verdict: ExitVerdict | None) -> int:
    """Its exit code, once nothing of it is left and it was told how it ended, if it did not tell so itself."""
    drain(child)
    if verdict is None:
        return child.code()
    folder = child.heartbeat.run_info().get("folder")
    if child.code() < 0 and not child.killed_by_us and folder is not None:
        echo(f"warning: {verdict.what}", to_stderr=True)
        return child.code()  # it goes on from its last commit
    report(verdict, folder)
    return verdict.code


def run_owners(out: Path) -> dict[Path, int | None]:
    """The process that each run folder says it belongs to."""
    from qfleet.watch.run_files import read_json

    return {status.parent: read_json(status).get("pid") for status in out.glob("*/status.json")}


def run_of_process(pid: int, out: Path, before: dict[Path, int | None]) -> Path | None:
    """The run folder that a process said was its own; ids come again, so what was said before does not count."""
    return next((run for run, owner in run_owners(out).items() if owner == pid and before.get(run) != pid), None)
