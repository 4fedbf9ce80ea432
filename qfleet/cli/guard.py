"""Supervise the training process: when a signal kills it, resume the run from its last checkpoint.

Only where actors have their own processes; a run in one thread is one process, and killing that is deliberate.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from qfleet import heartbeat
from qfleet.cli.entry import GUARDED
from qfleet.cli.output import echo, supervising
from qfleet.system.child_process import python_command
from qfleet.system.descendants import adopt_orphans, descendants, end_descendants
from qfleet.system.oom import oom_kills
from qfleet.system.restart_budget import RestartBudget
from qfleet.training.process.forward_signals import forward_ctrl_z, forward_stop_signals
from qfleet.training.process.supervise import report, wait_for_exit
from qfleet.training.process.supervised_process import ExitVerdict, SupervisedProcess
from qfleet.watch.read_files import read_json

CHILD_CODE = "from qfleet.cli import main; sys.exit(main())"
RESTARTS = 5  # in ten minutes


def run_with_restarts(
    arguments: Sequence[str],
    out: str,
    resume_arguments: Callable[[Path], list[str]],
    *,
    to_stderr: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run a command in a child; when a signal kills it, run the command `resume_arguments` makes for its run."""
    if supervising.get():
        adopt_orphans()
    command = list(arguments)
    budget = RestartBudget(RESTARTS)
    while True:
        before = run_owners(Path(out))
        killed = oom_kills()
        code, pid, stop_requested = run_child(command)
        if code >= 0:
            return code
        folder = None if stop_requested else run_of_process(pid, Path(out), before)
        name = signal.Signals(-code).name
        if -code == signal.SIGKILL and oom_kills() > killed:
            name = f"{name}, by the kernel, for lack of memory (a smaller replay.capacity needs less)"
        if folder is None or not budget.charge(clock()):
            echo(f"the learner was ended by {name}", to_stderr=True)
            return 128 - code
        echo(f"the learner was ended by {name}: going on with {folder} from its last commit", to_stderr=to_stderr)
        command = resume_arguments(folder)


def run_child(command: Sequence[str]) -> tuple[int, int, bool]:
    """Run a qfleet command: exit code (minus the signal that ended it), process id, whether it was asked to end.

    The child has its own process group, so that Ctrl-C reaches it once, through this process.
    """
    heartbeat.open_standard_streams()
    page = heartbeat.new_page_file()
    crash_log = heartbeat.unnamed_file()
    ours, theirs = os.pipe()
    descriptors = (page, theirs, crash_log)
    environment = {
        **os.environ,
        GUARDED: str(os.getpid()),
        heartbeat.DESCRIPTORS_VARIABLE: ",".join(map(str, descriptors)),
    }
    arguments = python_command(CHILD_CODE, *command)
    other_processes = descendants(os.getpid())
    process = subprocess.Popen(arguments, env=environment, process_group=0, pass_fds=descriptors)  # noqa: S603  our own program
    os.close(theirs)
    child = SupervisedProcess(process.pid, heartbeat.Heartbeat(page), ours, crash_log, adopts=supervising.get())
    os.close(page)
    with forward_stop_signals(child, child.heartbeat) as stop_signals, forward_ctrl_z(lambda: [child.pid]):
        verdict = wait_for_exit(child, stop_signals)
    process.returncode = child.code()
    if supervising.get():
        end_descendants(keep=other_processes)
    return _exit_code_of(child, verdict), child.pid, bool(stop_signals)


def _exit_code_of(child: SupervisedProcess, verdict: ExitVerdict | None) -> int:
    """The child's exit code after draining its output; its verdict is reported, unless the run will be resumed."""
    child.drain_output()
    if verdict is None:
        return child.code()
    folder = child.heartbeat.run_info().get("folder")
    if child.code() < 0 and not child.killed_by_us and folder is not None:
        echo(f"warning: {verdict.what}", to_stderr=True)
        return child.code()  # the run is resumed from its last checkpoint
    report(verdict, folder)
    return verdict.code


def run_owners(out: Path) -> dict[Path, int | None]:
    """The process id in each run folder's status.json."""
    return {status.parent: read_json(status).get("pid") for status in out.glob("*/status.json")}


def run_of_process(pid: int, out: Path, before: dict[Path, int | None]) -> Path | None:
    """The run folder that a process took over since `before`; process ids are reused, so older entries do not count."""
    return next((run for run, owner in run_owners(out).items() if owner == pid and before.get(run) != pid), None)
