"""Run one command and return its exit code; code of environments runs in a supervised process."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from qfleet import heartbeat
from qfleet.cli.output import invocation, report_error, supervising
from qfleet.plan.schema import InlineRuntime, Plan, ProcessesRuntime

GUARDED = "QFLEET_GUARDED"  # set for the child that `guard.py` supervises: the process id of its supervisor
ENDING_ERRORS = (Exception, KeyboardInterrupt, SystemExit)  # any other BaseException is a caller's own


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        heartbeat.attach_from_environment()
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    invocation_token = invocation.set(tuple(arguments))
    # Tests and other programs that call main() may have child processes, which supervision must not adopt.
    supervising_token = supervising.set(argv is None and not debug)
    try:
        from qfleet.cli.app import app

        work = partial(app, arguments)
        code = run_in_fork(work) if runs_env_code(arguments) and may_fork() else as_exit_code(work())
    except ENDING_ERRORS as error:
        code = report_error(error, debug)
    finally:
        supervising.reset(supervising_token)
        invocation.reset(invocation_token)
    if argv is None:
        heartbeat.set_exit_code(code)
    return code


def runs_env_code(arguments: Sequence[str]) -> bool:
    """Does the whole command run code of environments? Training forks by itself, and so does a table of variants."""
    if arguments[:1] == ["eval"]:
        return not any(argument.split("=")[0] == "--variants" for argument in arguments)
    return arguments[:1] in (["record"], ["play"], ["workflow"]) or arguments[:2] in (
        ["env", "check"],
        ["data", "collect"],
    )


def exit_code_of(work: Callable[[], object]) -> int:
    """Call `work`, print any error, and return the exit code."""
    try:
        return as_exit_code(work())
    except ENDING_ERRORS as error:
        return report_error(error, debug=False)


def as_exit_code(result: object) -> int:
    """The exit code that a verb returned, after its output was written; `--help` returns none."""
    sys.stdout.flush()
    return result if isinstance(result, int) else 0


def needs_restarts(plan: Plan) -> bool:
    """Should this process supervise the run in a child? The child must not: it saves and ends with its parent."""
    if GUARDED not in os.environ:
        return isinstance(plan.runtime, ProcessesRuntime)
    from qfleet.system.descendants import die_with_parent  # most commands need nothing of qfleet.system

    die_with_parent(signal.SIGTERM, int(os.environ[GUARDED]))
    return False


def may_fork() -> bool:
    """May this process run environment code in a supervised fork: is it a command of its own?"""
    return supervising.get() and GUARDED not in os.environ


def trains_in_fork(plan: Plan) -> bool:
    """Does this command train in a supervised fork: are the environments of the run stepped in its own process?"""
    # With MPI every rank is a process that MPI started: it must not be replaced by a fork.
    return may_fork() and isinstance(plan.runtime, InlineRuntime) and plan.learners.backend != "mpi"


def run_in_fork(work: Callable[[], object]) -> int:
    """Do work that runs environment code in a supervised fork."""
    from qfleet.training.process.supervise import run_supervised

    return run_supervised(lambda: exit_code_of(work))


def run_env_code(work: Callable[[], int]) -> int:
    """Do work that runs environment code: in a supervised fork if this process is a command of its own."""
    return run_in_fork(work) if may_fork() else work()


@contextmanager
def without_collection() -> Iterator[None]:
    """Import without looking for garbage, and leave everything that is there out of later searches.

    Importing torch makes hundreds of thousands of objects that stay to the end. Python would search them for cycles
    several times during the import, while the run begins, and when the process ends. Other programs that call a command
    may have made garbage: there nothing changes.
    """
    if not supervising.get():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
