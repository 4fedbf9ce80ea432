"""Watchers: what a person or a program sees while a run goes on. A watcher never raises into training."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, Literal, Protocol

from qfleet.errors import UsageError
from qfleet.escape import escaped
from qfleet.watch.run_files import json_line
from qfleet.watch.text import device_text, end_lines, evaluation_line, progress_line, remark_line, time_line

Mode = Literal["live", "plain", "json", "quiet"]
Clock = Callable[[], float]

PLAIN_EVERY_SECONDS = 30.0
STANDARD_DESCRIPTORS = (1, 2)
_ASCII = str.maketrans({"·": "|", "…": "...", "–": "-", "█": "#", "░": ".", "±": "+/-"})


class Watcher(Protocol):
    """Shows a run; `live` may be called as often as the caller likes."""

    def start(self, info: Mapping[str, Any]) -> None:
        """The run begins; `info` has run, env, algorithm, device, threads, notes."""

    def row(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl was written."""

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """The current state of the run."""

    def stop(self, status: Mapping[str, Any]) -> None:
        """The run has ended; `status` is the contents of status.json."""


def to_ascii(text: str) -> str:
    """The text in ASCII."""
    return text.translate(_ASCII)


class SafeStream:
    """A text stream that never raises. Once its reader has closed it, `broken` is set and output is discarded."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.broken = False

    @property
    def encoding(self) -> str:
        """The stream's character encoding."""
        return getattr(self._file, "encoding", None) or "utf-8"

    @property
    def ascii_only(self) -> bool:
        """Can the stream encode ASCII only?"""
        return not self.encoding.lower().replace("_", "-").startswith("utf")

    def write(self, text: str) -> int:
        """Write, or discard if the stream is broken."""
        if self.broken:
            return len(text)
        try:
            self._file.write(self._encodable(text))
        except (OSError, ValueError):
            self._mark_broken()
        return len(text)

    def _encodable(self, text: str) -> str:
        """The text in characters that the stream can encode."""
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return to_ascii(text).encode(self.encoding, "replace").decode(self.encoding)
        return text

    def flush(self) -> None:
        """Flush, or mark the stream as broken."""
        if self.broken:
            return
        try:
            self._file.flush()
        except (OSError, ValueError):
            self._mark_broken()

    def write_line(self, text: str) -> None:
        """Write one line and flush it."""
        self.write(text + "\n")
        self.flush()

    def write_escaped(self, text: str) -> None:
        """Write one line of text, without control characters and in the stream's encoding."""
        text = escaped(text)
        self.write_line(to_ascii(text) if self.ascii_only else text)

    def isatty(self) -> bool:
        """Is the stream a terminal?"""
        try:
            return self._file.isatty()
        except (OSError, ValueError, AttributeError):
            return False

    def fileno(self) -> int:
        """The file descriptor, by which rich asks for the terminal's size."""
        return self._file.fileno()

    def _mark_broken(self) -> None:
        """A standard stream is redirected to nowhere: else Python's flush at exit prints an error."""
        self.broken = True
        with suppress(OSError, ValueError, AttributeError):
            if self._file.fileno() in STANDARD_DESCRIPTORS:
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self._file.fileno())
                os.close(nothing)


class NewWarnings:
    """Forwards each warning once."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._seen = set[str]()

    def forward(self, snapshot: Mapping[str, Any]) -> None:
        """Forward the new warnings of a snapshot."""
        for warning in snapshot.get("warnings") or ():
            if warning not in self._seen:
                self._seen.add(warning)
                self._warn(warning)


def warn_on_stderr(warning: str) -> None:
    """Write a warning to standard error, so that it does not mix with rows for a program."""
    SafeStream(sys.stderr).write_escaped(f"warning: {warning}")


class PlainWatcher:
    """One line every 30 seconds, and one for each evaluation, change of settings and new warning.

    `in_script`: nobody asked for it, so damage is a Python warning as well, which a script can catch.
    """

    def __init__(self, stream: SafeStream, clock: Clock = time.monotonic, in_script: bool = False) -> None:
        self.in_script = in_script
        self._stream = stream
        self._clock = clock
        self._next = clock() + PLAIN_EVERY_SECONDS
        self._warnings = NewWarnings(lambda warning: self._stream.write_escaped(f"warning: {warning}"))

    def note(self, text: str) -> None:
        """Print what takes a while before a run begins."""
        self._stream.write_escaped(text)

    def start(self, info: Mapping[str, Any]) -> None:
        """Print the environment, the algorithm, the device and the run."""
        parts = (info.get("env"), info.get("algorithm"), device_text(info), info.get("run"))
        self._stream.write_escaped(" · ".join(str(part) for part in parts if part))
        for note in info.get("notes") or ():
            self._stream.write_escaped(f"note: {note}")
        self._next = self._clock() + PLAIN_EVERY_SECONDS

    def row(self, row: Mapping[str, Any]) -> None:
        """Print evaluations and rows with a text; `live` shows the others."""
        if row.get("kind") == "eval":
            self._stream.write_escaped(evaluation_line(row))
        elif row.get("text"):
            self._stream.write_escaped(remark_line(row))

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """Print new warnings, and a progress line if the last one is 30 seconds old."""
        self._warnings.forward(snapshot)
        if self._clock() >= self._next:
            self._next = self._clock() + PLAIN_EVERY_SECONDS
            self._stream.write_escaped(progress_line(snapshot))

    def stop(self, status: Mapping[str, Any]) -> None:
        """Print how the run ended and where the time went."""
        for line in end_lines(status):
            self._stream.write_escaped(line)
        if status.get("profile"):
            self._stream.write_escaped(f"time: {time_line(status['profile'])}")


class RowWatcher:
    """Every row to `write_row`, for a program, and nothing else; warnings go to `warn`."""

    def __init__(
        self, write_row: Callable[[Mapping[str, Any]], None], warn: Callable[[str], None] = warn_on_stderr
    ) -> None:
        self._write_row = write_row
        self._warnings = NewWarnings(warn)

    def note(self, text: str) -> None:
        """Print what takes a while before a run begins, on standard error."""
        SafeStream(sys.stderr).write_escaped(text)

    def start(self, info: Mapping[str, Any]) -> None:
        """Nothing."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Write the row, with the fields that it has in metrics.jsonl."""
        self._write_row(row)

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """Forward new warnings."""
        self._warnings.forward(snapshot)

    def stop(self, status: Mapping[str, Any]) -> None:
        """Nothing: the last row, of kind "end", has the result."""


class QuietWatcher:
    """Only how the run ended; warnings go to `warn`."""

    def __init__(self, stream: SafeStream, warn: Callable[[str], None] = warn_on_stderr) -> None:
        self._stream = stream
        self._warnings = NewWarnings(warn)

    def start(self, info: Mapping[str, Any]) -> None:
        """Nothing."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Nothing."""

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """Forward new warnings."""
        self._warnings.forward(snapshot)

    def stop(self, status: Mapping[str, Any]) -> None:
        """Print how the run ended, in one line."""
        self._stream.write_escaped(" · ".join(end_lines(status)))


def make_watcher(mode: Mode, stream: IO[str] | None = None, *, clock: Clock = time.monotonic) -> Watcher:
    """The watcher for a mode, by default on standard output; warnings of quiet and JSON modes go to stderr."""
    out = SafeStream(stream if stream is not None else sys.stdout)
    if mode == "plain":
        return PlainWatcher(out, clock)
    if mode == "json":
        return RowWatcher(lambda row: out.write_line(json_line(row)))
    if mode == "quiet":
        return QuietWatcher(out)
    if mode == "live":
        from qfleet.watch.live_screen import LiveWatcher

        return LiveWatcher(out, clock)
    raise UsageError(
        f"there is no display mode {mode!r}",
        "a run can be watched live, plain, json or quiet",
        "choose one of live, plain, json, quiet",
    )


def default_watcher(progress: bool = True) -> Watcher | None:
    """What shows a run if nobody chose a watcher: a screen in a terminal or a notebook, else sparse lines on stderr.

    Standard output may be the data of a script, so lines that nobody asked for do not go there.
    """
    if not progress:
        return None
    if in_notebook():
        from qfleet.watch.notebook.screen import NotebookWatcher

        return NotebookWatcher()
    if auto_mode() == "live":
        return make_watcher("live")
    return None if sys.stderr is None else PlainWatcher(SafeStream(sys.stderr), in_script=True)


def auto_mode(stream: IO[str] | None = None, json: bool = False, quiet: bool = False) -> Mode:
    """The mode that suits the stream: live for a person at a terminal, plain lines otherwise."""
    if json:
        return "json"
    if quiet:
        return "quiet"
    terminal = SafeStream(stream if stream is not None else sys.stdout).isatty() and os.environ.get("TERM") != "dumb"
    return "live" if terminal else "plain"


def in_notebook() -> bool:
    """Is this process the kernel of a notebook? Its standard output is no terminal, but its cells show HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
