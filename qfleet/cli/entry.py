"""From words to an exit code. Every error comes out in three sentences; tracebacks only with `--debug`."""

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from cyclopts import CycloptsError

from qfleet import heartbeat
from qfleet.cli.guard import watched
from qfleet.cli.say import invocation, say, say_error, supervising
from qfleet.errors import EnvError, QfleetError, StorageError, UsageError

INTERRUPTED = 130
BROKEN_PIPE = 141  # what the shell reports for any program whose reader went away
DISK_SAYS_NO = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and answer with its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        heartbeat.attach_given()
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    token = invocation.set(tuple(words))
    # Tests and other programs that call this have processes of their own to look after.
    alone = supervising.set(argv is None and not debug)
    try:
        whole = words[:1] in (["eval"], ["record"]) or words[:2] == ["env", "check"]
        work = partial(answer, partial(_run, words), debug)
        code = watched(work) if whole else work()
        if argv is None:
            heartbeat.end(code)
        return code
    finally:
        supervising.reset(alone)
        invocation.reset(token)


def answer(work: Callable[[], int], debug: bool = False) -> int:
    """The exit code of some work, with its errors told."""
    try:
        return work()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _silence()
        return BROKEN_PIPE
    except Exception as error:
        return _fail(error, debug)
    except SystemExit as error:  # of the code that a command runs: nothing of ours leaves so before it is done
        return _fail(error, debug) if type(error) is SystemExit else int(error.code or 0)


def _run(words: list[str]) -> int:
    from qfleet.cli.app import app
    from qfleet.cli.arguments import translate

    try:
        code = app(words)
    except CycloptsError as error:
        raise translate(error) from error
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _fail(error: BaseException, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    shown = _for_user(error)
    try:
        say_error(shown)
        _say_frames(shown)
    except BrokenPipeError:
        _silence()
    return shown.exit_code


def _say_frames(error: QfleetError) -> None:
    """The lines of the user's own code that an environment's error came from, and the file with all of them."""
    if not isinstance(error, EnvError) or error.__cause__ is None:
        return
    from qfleet.frames import own_frames, text_of

    frames = own_frames(text_of(error.__cause__))
    for frame in frames:
        say(f"   at: {frame}{f': {frame.source}' if frame.source else ''}", to_stderr=True)
    if frames:
        say(f"  log: {error.log or _write_log(error, 'env')}", to_stderr=True)


def _for_user(error: BaseException) -> QfleetError:
    if isinstance(error, QfleetError):
        return error
    if isinstance(error, OSError) and error.errno in DISK_SAYS_NO:
        where = f" {error.filename}" if error.filename else ""
        return StorageError(
            f"the system refused a file operation{where}: {error.strerror}",
            "The disk is full, failing or not yours to write.",
            "Check free space and permissions: qfleet doctor",
        )
    if isinstance(error, OSError) and str(error) == "AF_UNIX path too long":
        return UsageError(
            f"the folder for temporary files has too long a name: {tempfile.gettempdir()}",
            "Processes of a run meet at a socket in it, and the name of a socket has 107 characters at most.",
            "Name a shorter one: export TMPDIR=/tmp",
        )
    return QfleetError(
        f"{type(error).__name__}: {error}",
        "This is a bug in qfleet, not in what you did.",
        f"Please report it with {_write_log(error)}; --debug shows the traceback here.",
    )


def _write_log(error: BaseException, what: str = "bug") -> str:
    try:
        with tempfile.NamedTemporaryFile("w", prefix=f"qfleet-{what}-", suffix=".log", delete=False) as file:
            traceback.print_exception(error, file=file)
            return file.name
    except OSError:
        return "the output of --debug"


def _silence() -> None:
    # Python flushes standard output once more at exit; without this that flush would complain again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
