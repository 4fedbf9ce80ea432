"""logs/run-0.log: the traceback of an error that ended a run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qfleet.escape import indented
from qfleet.files import make_folder, open_log, require_regular_files
from qfleet.watch.run_files import unwritable_error

LOG_FILE = "run-0.log"


class LogFile(logging.Handler):
    """A log of the run folder, which no link can lead out of; it is made with its first record."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record."""
        with open(open_log(self.file), "a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(self.format(record) + "\n")


class EscapedFormat(logging.Formatter):
    """Lines that text from elsewhere cannot forge: control characters are escaped, lines after the first indented."""

    def format(self, record: logging.LogRecord) -> str:
        """One record, its traceback below it."""
        return indented(super().format(record))


@contextmanager
def error_log(folder: Path) -> Iterator[logging.Logger]:
    """logs/run-0.log: the traceback of an error that ended this run."""
    log = logging.getLogger(f"qfleet.{folder.name}")
    try:
        for name in ("logs", "history"):
            require_regular_files(folder, name)  # these files are opened later, some of them by children
        make_folder(folder, "logs")
    except OSError as error:
        raise unwritable_error(folder / "logs", error) from error
    handler = LogFile(folder / "logs" / LOG_FILE)
    handler.setFormatter(EscapedFormat("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.propagate = False
    try:
        yield log
    finally:
        log.removeHandler(handler)
