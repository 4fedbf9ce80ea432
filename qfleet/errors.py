"""Errors that a user can act on: each names the problem, its cause and the fix, and has an exit code."""

HIDDEN = "(hidden)"
SHORTEST_SECRET = 4  # characters; a shorter text also occurs in ordinary text
_secrets: set[str] = set()


def register_secret(value: str) -> None:
    """Hide this text in all later errors of this process."""
    if len(value) >= SHORTEST_SECRET:
        _secrets.add(value)


def redacted(text: str) -> str:
    """The text with secrets hidden."""
    for value in _secrets:
        text = text.replace(value, HIDDEN)
    return text


def redact_error(error: BaseException) -> None:
    """Hide secrets in an exception of an environment, which logs show with its traceback."""
    if _secrets:
        error.args = tuple(redacted(part) if isinstance(part, str) else part for part in error.args)


class QfleetError(Exception):
    """A problem that the user can fix: shown as three sentences (what, why, fix) without a traceback."""

    exit_code = 1

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        self.what = redacted(what)
        self.why = redacted(why)
        self.fix = redacted(fix)
        super().__init__(self.what, self.why, self.fix)
        self.log: str | None = None  # the file with the whole traceback, if there is one

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.fix) if part)


class UsageError(QfleetError):
    """The command line or the plan requests something impossible."""

    exit_code = 2


class DivergedError(QfleetError):
    """Loss or weights became infinite or NaN, and rolling back did not help."""

    exit_code = 3


class EnvError(QfleetError):
    """The environment failed or returned something outside its own spaces."""

    exit_code = 4


class StorageError(QfleetError):
    """A file could not be read or written, or another process holds the run's lock."""

    exit_code = 5


class NoCheckpointError(QfleetError):
    """There is no usable checkpoint to resume from."""

    exit_code = 6
