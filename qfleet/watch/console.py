"""What a person or a program sees while a run goes on. A watcher never raises into training."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import IO, Any, Literal, Protocol

from qfleet.errors import UsageError
from qfleet.escape import escaped
from qfleet.watch.run_files import json_line
from qfleet.watch.safe_stream import SafeStream, simplify
from qfleet.watch.text import end_lines, evaluation_line, machine, progress_line, remark_line, time_line

Mode = Literal["live", "plain", "json", "quiet"]
Clock = Callable[[], float]

PLAIN_EVERY_SECONDS = 30.0


class Watcher(Protocol):
    """Sees a run. `every_seconds` is how often `live` is worth calling; more often does no harm."""

    every_seconds: float

    def start(self, info: Mapping[str, Any]) -> None:
        """The run begins: run, env, algorithm, device, threads, notes."""
        ...

    def row(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl was written."""
        ...

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """How things stand at this moment."""
        ...

    def stop(self, status: Mapping[str, Any]) -> None:
        """The run has ended: the contents of status.json, and the score if there is one."""
        ...


class Lines:
    """Writes lines of text to a stream, cleaned and in characters it knows."""

    def __init__(self, stream: SafeStream) -> None:
        self._stream = stream

    def say(self, text: str) -> None:
        """One line."""
        text = escaped(text)
        self._stream.line(simplify(text) if self._stream.simple else text)


class Warnings:
    """Passes each warning on once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = set[str]()

    def hear(self, snapshot: Mapping[str, Any]) -> None:
        """Pass on those that are new."""
        for warning in snapshot.get("warnings") or ():
            if warning not in self._said:
                self._said.add(warning)
                self._say(warning)


def say_aside(warning: str) -> None:
    """A warning beside rows that a program reads: on standard error."""
    Lines(SafeStream(sys.stderr)).say(f"warning: {warning}")


class PlainWatcher:
    """One line every 30 seconds, one for each evaluation, for each change made on the way and each new warning."""

    def __init__(self, stream: SafeStream, clock: Clock = time.monotonic) -> None:
        self.every_seconds = PLAIN_EVERY_SECONDS
        self._lines = Lines(stream)
        self._clock = clock
        self._next = clock() + self.every_seconds
        self._warnings = Warnings(lambda warning: self._lines.say(f"warning: {warning}"))

    def note(self, text: str) -> None:
        """Say what takes a while before a run begins."""
        self._lines.say(text)

    def start(self, info: Mapping[str, Any]) -> None:
        """Say what runs, where and how."""
        parts = (info.get("env"), info.get("algorithm"), machine(info), info.get("run"))
        self._lines.say(" · ".join(str(part) for part in parts if part))
        for note in info.get("notes") or ():
            self._lines.say(f"note: {note}")
        self._next = self._clock() + self.every_seconds

    def row(self, row: Mapping[str, Any]) -> None:
        """Show an evaluation, and what a row says in words; the others are shown by `live`."""
        if row.get("kind") == "eval":
            self._lines.say(evaluation_line(row))
        elif row.get("text"):
            self._lines.say(remark_line(row))

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """A line, if the last one is 30 seconds old; a warning at once, and once."""
        self._warnings.hear(snapshot)
        if self._clock() >= self._next:
            self._next = self._clock() + self.every_seconds
            self._lines.say(progress_line(snapshot))

    def stop(self, status: Mapping[str, Any]) -> None:
        """Say how it ended and where the time went."""
        for line in end_lines(status):
            self._lines.say(line)
        if status.get("profile"):
            self._lines.say(f"time: {time_line(status['profile'])}")


class JsonWatcher:
    """Every row as a line of JSON, and nothing else; warnings go elsewhere."""

    def __init__(self, stream: SafeStream, warn: Callable[[str], None] = say_aside) -> None:
        self.every_seconds = float("inf")
        self._stream = stream
        self._warnings = Warnings(warn)

    def note(self, text: str) -> None:
        """What takes a while before a run begins, beside the rows."""
        Lines(SafeStream(sys.stderr)).say(text)

    def start(self, info: Mapping[str, Any]) -> None:
        """Rows only."""

    def row(self, row: Mapping[str, Any]) -> None:
        """The row as it stands in metrics.jsonl."""
        self._stream.line(json_line(row))

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """Rows only; but damage is not kept silent."""
        self._warnings.hear(snapshot)

    def stop(self, status: Mapping[str, Any]) -> None:
        """The last row, kind "end", has said it."""


class QuietWatcher:
    """Only how it ended; warnings go elsewhere."""

    def __init__(self, stream: SafeStream, warn: Callable[[str], None] = say_aside) -> None:
        self.every_seconds = float("inf")
        self._lines = Lines(stream)
        self._warnings = Warnings(warn)

    def start(self, info: Mapping[str, Any]) -> None:
        """Nothing yet."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Nothing yet."""

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """Nothing yet; but damage is not kept silent."""
        self._warnings.hear(snapshot)

    def stop(self, status: Mapping[str, Any]) -> None:
        """One line."""
        self._lines.say(" · ".join(end_lines(status)))


def make_watcher(mode: Mode, stream: IO[str] | None = None, *, clock: Clock = time.monotonic) -> Watcher:
    """The watcher for a mode; the stream is standard output unless given. Quiet or JSON, warnings go to stderr."""
    out = SafeStream(stream if stream is not None else sys.stdout)
    if mode == "plain":
        return PlainWatcher(out, clock)
    if mode == "json":
        return JsonWatcher(out)
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


def auto_mode(stream: IO[str] | None = None, json: bool = False, quiet: bool = False) -> Mode:
    """The mode that suits the stream: live for a person at a terminal or notebook, plain lines otherwise."""
    if json:
        return "json"
    if quiet:
        return "quiet"
    terminal = SafeStream(stream if stream is not None else sys.stdout).isatty() and os.environ.get("TERM") != "dumb"
    return "live" if terminal or (stream is None and _in_notebook()) else "plain"


def _in_notebook() -> bool:
    """Are we in a notebook that can redraw its output?"""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell" and find_spec("ipywidgets") is not None
