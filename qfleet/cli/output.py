"""Output for the user: without control characters, aligned, on the right stream; errors as what, why and fix."""

import errno
import json
import math
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from cyclopts import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from qfleet.errors import EnvError, QfleetError, StorageError, UsageError
from qfleet.escape import escaped, indented
from qfleet.plan.paths import index
from qfleet.plan.setting_text import nearest

INTERRUPTED = 130
BROKEN_PIPE = 141  # as the shell reports a program ended by SIGPIPE
STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}

# The arguments of the current command, for provenance.
invocation: ContextVar[tuple[str, ...]] = ContextVar("invocation", default=())
# May the current command do its work in a fork that it supervises?
supervising: ContextVar[bool] = ContextVar("supervising", default=False)


def echo(*lines: str, to_stderr: bool = False) -> None:
    """Print one line per argument; with JSON on standard output, text for people goes to standard error."""
    for line in lines or ("",):
        print(escaped(line), file=sys.stderr if to_stderr else sys.stdout)


def echo_json(value: Any) -> None:
    """Print one JSON value; numbers that are not finite become null."""
    print(json.dumps(_finite(value), indent=2, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def echo_table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> None:
    """Print rows in aligned columns, never truncated, so that they can be searched and piped."""
    for line in table_lines(rows, header):
        echo(line)


def table_lines(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> list[str]:
    """Rows in aligned columns, as lines."""
    table = [tuple(map(escaped, row)) for row in ([header] if header else []) + list(rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def echo_error(error: QfleetError) -> None:
    """Print what happened, why, and what to do."""
    why = indented(error.why, by="       | ")  # may have several lines: an environment's output, several runs
    parts = (("error: ", escaped(error.what)), ("  why: ", why), ("   do: ", escaped(error.fix)))
    print("\n".join(label + text for label, text in parts if text), file=sys.stderr)


@contextmanager
def echo_warnings() -> Iterator[None]:
    """Print Python's warnings as one line each on standard error, without the source line they came from."""
    with warnings.catch_warnings():
        warnings.showwarning = _echo_warning
        yield


def _echo_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    echo("warning: " + " ".join(str(message).split()), to_stderr=True)


def size(count: float) -> str:
    """A number of bytes with a unit: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


# --- the error that ended a command ---


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


# --- errors of the parser ---


def translate(error: CycloptsError) -> UsageError:
    """A parser error as a UsageError with what, why and fix."""
    verb = " ".join(("qfleet", *(error.command_chain or ())))
    match error:
        case UnknownOptionError():
            return _unknown_option(error, verb)
        case UnknownCommandError():
            return _unknown_command((error.unused_tokens or [""])[0], _commands(error.app), verb)
        case UnusedCliTokensError():
            return _unexpected(error, verb)
        case MissingArgumentError():
            return _missing(error, verb)
        case RepeatArgumentError():
            name = error.token.keyword
            return UsageError(f"{name} is given twice", "It can have one value only.", "Leave one of them out.")
        case CoercionError() if error.token is not None:
            name = error.token.keyword or verb
            return UsageError(
                f"{name}={error.token.value} is not valid",
                f"{name} is a switch: it takes no value.",
                f"Write {name} alone, or leave it out.",
            )
    return UsageError(" ".join(str(error).split()), f"{verb} could not be understood.", f"See {verb} --help")


def _commands(app: Any) -> list[str]:
    return [name for name in app if not name.startswith("-")] if app is not None else []


def _unknown_command(token: str, names: list[str], verb: str) -> UsageError:
    if token.startswith("-"):
        near = nearest(token, ["--help", "--version", "--install-completion", "--debug"])
        fix = f"Did you mean {near}?" if near else f"See {verb} --help"
        return UsageError(f"unknown option {token}", f"{verb} has --help, --version, --install-completion.", fix)
    near = nearest(token, names)
    fix = f"Did you mean {verb} {near}?" if near else f"See {verb} --help"
    return UsageError(f"unknown command {token}", f"{verb} has {', '.join(names)}.", fix)


def _unexpected(error: UnusedCliTokensError, verb: str) -> UsageError:
    token = (error.unused_tokens or [""])[0]
    if names := _commands(error.app):
        return _unknown_command(token, names, verb)
    return UsageError(
        f"unexpected argument {token!r}", f"{verb} takes no more arguments.", f"Leave it out; see {verb} --help"
    )


def _unknown_option(error: UnknownOptionError, verb: str) -> UsageError:
    token = (error.token.keyword or error.token.value).split("=")[0]
    names = [name for argument in error.argument_collection for name in argument.names if name.startswith("--")]
    path = token.lstrip("-").replace("-", "_")
    near = nearest(token, names)
    if path in index().paths() and token not in names:
        fix = f"Settings of the plan have no dashes: {path}=VALUE"
    else:
        fix = f"Did you mean {near}?" if near else f"See {verb} --help"
    why = f"{verb} has {', '.join(names)}." if names else f"{verb} has no options."
    return UsageError(f"unknown option {token}", why, fix)


def _missing(error: MissingArgumentError, verb: str) -> UsageError:
    name = error.keyword or (error.argument.name if error.argument else "an argument")
    if name.startswith("-"):
        return UsageError(f"{name} needs a value", f"Nothing follows {name}.", f"See {verb} --help")
    return UsageError(f"{verb} needs {name}", f"The argument {name} is missing.", f"See {verb} --help")
