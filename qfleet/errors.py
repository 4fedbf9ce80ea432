"""Errors a user can act on. Each says what happened, why, and what to do, and knows its exit code."""


class QfleetError(Exception):
    """Something the user can mend: shown as three sentences, without a traceback."""

    exit_code = 1

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.what, self.why, self.fix = what, why, fix
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
