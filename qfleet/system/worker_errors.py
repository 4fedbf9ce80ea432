"""What can happen to a worker in another process: one tree of errors, each with its cause."""

import msgspec

from qfleet.errors import UsageError


class FinalError(msgspec.Struct, tag=True):
    """Why a worker ended by itself: the parts of the error and its exit code; a log may have the traceback."""

    what: str
    why: str = ""
    fix: str = ""
    exit_code: int = 1


class WorkerLost(Exception):
    """A worker is lost; the text is the cause."""


class WorkerDied(WorkerLost):
    """Its process has ended, or nothing can be sent to it any more."""


class WorkerHung(WorkerLost):
    """It runs, but does not start, move or reply in time."""


class WorkerFailed(WorkerLost):
    """It reported the error that ended it."""

    def __init__(self, report: FinalError) -> None:
        super().__init__(report.what)
        self.report = report


def raise_usage_error(report: FinalError) -> None:
    """Raise the user's own mistake again, if the report is of one: a restart cannot mend it."""
    if report.exit_code == UsageError.exit_code:
        raise UsageError(report.what, report.why, report.fix)
