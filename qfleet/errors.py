"""Errors a user can act on. Each says what happened, why, and what to do, and knows its exit code."""

HIDDEN = "(hidden)"
SHORTEST_SECRET = 4  # shorter ones are parts of ordinary words
_secrets: set[str] = set()


def keep_secret(value: str) -> None:
    """From now on no error of ours in this process shows this text."""
    if len(value) >= SHORTEST_SECRET:
        _secrets.add(value)


def redacted(text: str) -> str:
    """The text without secrets."""
    for value in _secrets:
        text = text.replace(value, HIDDEN)
    return text


def conceal(error: BaseException) -> None:
    """Take secrets out of somebody else's exception, which logs show with its traceback."""
    if _secrets:
        error.args = tuple(redacted(part) if isinstance(part, str) else part for part in error.args)


class QfleetError(Exception):
    """Something the user can mend: shown as three sentences, without a traceback."""

    exit_code = 1

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        self.what = redacted(what)
        self.why = redacted(why)
        self.fix = redacted(fix)
        super().__init__(self.what, self.why, self.fix)
        self.log: str | None = None  # the file that has the whole traceback, if there is one

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.fix) if part)


class UsageError(QfleetError):
    """The command line or the plan asks for something that cannot be done."""

    exit_code = 2


class DivergedError(QfleetError):
    """Numbers stopped being finite and roll-backs did not help."""

    exit_code = 3


class EnvError(QfleetError):
    """The environment failed or returned something outside its own spaces."""

    exit_code = 4


class StorageError(QfleetError):
    """The disk said no, or another process holds the run."""

    exit_code = 5


class NoCheckpointError(QfleetError):
    """There is no usable checkpoint to go on from."""

    exit_code = 6
