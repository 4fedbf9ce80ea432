"""Supervising the process that runs environments: they may hang, crash, leave, print without end or start processes.

The work is done in a fork of this process. This one passes signals on, limits what environments print, ends the work
when a call of an environment hangs, ends what environments have started, and reports how the work ended.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from qfleet.errors import QfleetError
from qfleet.files import list_inside
from qfleet.heartbeat import Heartbeat, attach, open_standard_streams, unnamed_file
from qfleet.system.descendants import adopt_orphans, descendants, die_with_parent, end_descendants
from qfleet.training.process.forward_signals import forward_ctrl_z, forward_stop_signals
from qfleet.training.process.hang_watch import ENV_FAILED, POLL_SECONDS, HangWatch
from qfleet.training.process.supervised_process import ExitVerdict, SupervisedProcess, print_error

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


class WorkDone(SystemExit):
    """The work of a supervised process is done: it has nothing left to do but to leave, with this exit code."""


def run_supervised(work: Callable[[], int], is_new_request: Callable[[], bool] = lambda: True) -> int:
    """Do the work in a fork and return its exit code; in the fork this raises `WorkDone`.

    `is_new_request` is called for each signal after the first: is it another request, to end at once?
    """
    from qfleet.system.oom import oom_kills  # most commands do not need it

    adopt_orphans()
    not_ours = descendants(os.getpid())
    num_oom = oom_kills()
    child = start(work)
    with forward_stop_signals(child, child.heartbeat, is_new_request) as received, forward_ctrl_z(lambda: [child.pid]):
        verdict = wait_for_exit(child, received)
        end_descendants(keep=not_ours)
        child.drain_output()
        if verdict is None and child.code() == -signal.SIGKILL:
            verdict = killed(out_of_memory=oom_kills() > num_oom)
        if verdict is not None:
            report(verdict, child.heartbeat.run_info().get("folder"))
            return verdict.code
    return child.code() if child.code() >= 0 else end_by_signal(-child.code())


def killed(out_of_memory: bool) -> ExitVerdict:
    """The verdict on work that another process, or the kernel, has killed; its run can be resumed."""
    why = ", by the kernel, for lack of memory (a smaller replay.capacity needs less)" if out_of_memory else ""
    return ExitVerdict(128 + signal.SIGKILL, None, f"killed by SIGKILL{why}")


def end_by_signal(number: int) -> int:
    """End this process by the signal that ended the work; a crash is reported instead."""
    if number in CRASHES:
        print_error(f"error: the process was ended by {signal.Signals(number).name}")
        return 128 + number
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


def start(work: Callable[[], int]) -> SupervisedProcess:
    """Fork; the fork does the work and raises `WorkDone`."""
    open_standard_streams()
    heartbeat = Heartbeat()
    crash_log = unnamed_file()  # both processes have it
    ours, theirs = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if pid := os.fork():
        os.close(theirs)
        with suppress(OSError):
            os.setpgid(pid, pid)
        return SupervisedProcess(pid, heartbeat, ours, crash_log, adopts=True)
    os.close(ours)
    with suppress(OSError):
        os.setpgid(0, 0)  # Ctrl-C reaches it through the supervisor alone, and once
    die_with_parent(parent=parent)
    attach(heartbeat, theirs, crash_log)
    os.close(theirs)
    code = work()
    heartbeat.set_exit_code(code)
    raise WorkDone(code)


def wait_for_exit(child: SupervisedProcess, stop_signals: list[int]) -> ExitVerdict | None:
    """Wait until the child has ended, or end it; a verdict if it did not end by itself."""
    watch = HangWatch(child, stop_signals)
    while not child.poll():
        child.forward_output(POLL_SECONDS)
        if (verdict := watch.poll()) is not None:
            child.kill()
            return verdict
    return exit_verdict(child, watch)


def exit_verdict(child: SupervisedProcess, watch: HangWatch) -> ExitVerdict | None:
    """The verdict on a child that has ended inside a call of an environment, if it has."""
    watch.call = child.heartbeat.call()
    code = child.code()
    if child.heartbeat.exit_code() is not None or (watch.call is None and code != 0):
        return None
    call = watch.call_name()
    if code >= 0:
        return ExitVerdict(ENV_FAILED, "failed", f"{call} ended the process with exit code {code} (os._exit)")
    if -code not in CRASHES:
        return None
    what = f"{call} crashed the process ({signal.Signals(-code).name})"
    return ExitVerdict(ENV_FAILED, "failed", what, child.logged_frames())


def report(verdict: ExitVerdict, folder: str | None) -> None:
    """Print how the work ended, and write it into the run's folder."""
    failed = verdict.state in (None, "failed")
    print_error(f"{'error: ' if failed else ''}{verdict.what}")
    for frame in verdict.frames:
        print_error(f"   at: {frame}")
    if folder is None:
        return
    with suppress(OSError, QfleetError):  # the folder may have been removed
        write_verdict(verdict, Path(folder))
    saved = any(name.startswith("step_") for name in list_inside(Path(folder), "checkpoints"))
    print_error(f"  run: {folder} ({'its last checkpoint is whole' if saved else 'nothing was saved yet'})")


def write_verdict(verdict: ExitVerdict, folder: Path) -> None:
    """Write how the work ended into the run's status and events, unless the run has done so itself."""
    from qfleet.watch.read_files import read_json
    from qfleet.watch.run_files import EventLog, write_json

    ending = {"state": verdict.state, "exit_code": verdict.code, "reason": verdict.what, "pid": None}
    status = read_json(folder / "status.json")
    if status.get("exit_code") is None:
        write_json(folder / "status.json", {**status, **(ending if verdict.state else {"reason": verdict.what})})
        EventLog(folder / "events.jsonl").event("failed", what=verdict.what, exit_code=verdict.code)
