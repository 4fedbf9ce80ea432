"""Run one command and return its exit code. Errors print as what, why and fix; tracebacks only with `--debug`."""

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from cyclopts import CycloptsError

from qfleet import heartbeat
from qfleet.cli.guard import may_fork, run_in_fork
from qfleet.cli.output import echo, echo_error, invocation, supervising
from qfleet.errors import EnvError, QfleetError, StorageError, UsageError

INTERRUPTED = 130
BROKEN_PIPE = 141  # as the shell reports a program ended by SIGPIPE
ENDING_ERRORS = (Exception, KeyboardInterrupt, SystemExit)  # any other BaseException is a caller's own
STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


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

        runs_env_code = arguments[:1] in (["eval"], ["record"]) or arguments[:2] == ["env", "check"]
        work = partial(app, arguments)
        code = run_in_fork(work) if runs_env_code and may_fork() else as_exit_code(work())
    except ENDING_ERRORS as error:
        code = report_error(error, debug)
    finally:
        supervising.reset(supervising_token)
        invocation.reset(invocation_token)
    if argv is None:
        heartbeat.set_exit_code(code)
    return code


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


def report_error(error: BaseException, debug: bool) -> int:
    """Print the error that ended a command, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _discard_stdout()
        return BROKEN_PIPE
    if isinstance(error, SystemExit) and type(error) is not SystemExit:  # user code raises plain ones, qfleet never
        return int(error.code or 0)
    if debug:
        traceback.print_exception(error)
    shown = _as_qfleet_error(error)
    try:
        echo_error(shown)
        _echo_frames(shown)
    except BrokenPipeError:
        _discard_stdout()
    return shown.exit_code


def _echo_frames(error: QfleetError) -> None:
    """Print the lines of user code that an environment's error came from, and the path of the full traceback."""
    if not isinstance(error, EnvError) or error.__cause__ is None:
        return
    from qfleet.frames import traceback_text, user_frames

    frames = user_frames(traceback_text(error.__cause__))
    for frame in frames:
        echo(f"   at: {frame}{f': {frame.source}' if frame.source else ''}", to_stderr=True)
    if frames:
        echo(f"  log: {error.log or _write_log(error, 'env')}", to_stderr=True)


def _as_qfleet_error(error: BaseException) -> QfleetError:
    if isinstance(error, QfleetError):
        return error
    if isinstance(error, CycloptsError):
        from qfleet.cli.arguments import translate

        return translate(error)
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        where = f" {error.filename}" if error.filename else ""
        return StorageError(
            f"the system refused a file operation{where}: {error.strerror}",
            "The disk is full or failing, or permission is missing.",
            "Check free space and permissions: qfleet doctor",
        )
    if isinstance(error, OSError) and str(error) == "AF_UNIX path too long":
        return UsageError(
            f"the folder for temporary files has too long a name: {tempfile.gettempdir()}",
            "Processes of a run connect through a socket in it, and a socket's path has at most 107 characters.",
            "Name a shorter one: export TMPDIR=/tmp",
        )
    return QfleetError(
        f"{type(error).__name__}: {error}",
        "This is a bug in qfleet, not a mistake of yours.",
        f"Please report it with {_write_log(error)}; --debug shows the traceback here.",
    )


def _write_log(error: BaseException, kind: str = "bug") -> str:
    try:
        with tempfile.NamedTemporaryFile("w", prefix=f"qfleet-{kind}-", suffix=".log", delete=False) as file:
            traceback.print_exception(error, file=file)
            return file.name
    except OSError:
        return "the output of --debug"


def _discard_stdout() -> None:
    # Python flushes standard output again at exit; without this, that flush would raise once more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
