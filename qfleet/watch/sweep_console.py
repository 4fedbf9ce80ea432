"""Watchers of a group: what a person or a program sees while its members train."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Protocol, cast

from qfleet.escape import escaped
from qfleet.watch.console import PLAIN_EVERY_SECONDS, Mode, SafeStream, auto_mode, in_notebook, warn_on_stderr
from qfleet.watch.run_files import json_line
from qfleet.watch.text import duration, interval, number

Member = Mapping[str, Any]  # name, state, exit_code, reason, and fields of its newest rows
REDRAW_EVERY_SECONDS = 0.5


class GroupWatcher(Protocol):
    """Shows a group of runs."""

    def start(self, info: Mapping[str, Any]) -> None:
        """The group begins; `info` has group, env, members, jobs, threads, notes."""

    def row(self, member: str, row: Mapping[str, Any]) -> None:
        """A member wrote a row."""

    def warn(self, member: str, text: str) -> None:
        """A member has sent a warning."""

    def live(self, members: Sequence[Member]) -> None:
        """The current state of all members."""

    def finished(self, member: Member) -> None:
        """A member has ended."""

    def stop(self, end: Mapping[str, Any]) -> None:
        """All members have ended; `end` is the group's own last row."""


class PlainGroup:
    """A line for each member that ends, and every 30 seconds one for all running members."""

    def __init__(self, stream: SafeStream, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._next = clock() + PLAIN_EVERY_SECONDS

    def start(self, info: Mapping[str, Any]) -> None:
        """Print the environment, the number of members and the group."""
        self._stream.write_escaped(introduction(info))
        for note in info.get("notes") or ():
            self._stream.write_escaped(f"note: {note}")

    def row(self, member: str, row: Mapping[str, Any]) -> None:
        """Nothing: `live` shows it."""

    def warn(self, member: str, text: str) -> None:
        """Print one line."""
        self._stream.write_escaped(f"{member} warning: {text}")

    def live(self, members: Sequence[Member]) -> None:
        """Print one line, if the last one is 30 seconds old."""
        if self._clock() >= self._next:
            self._next = self._clock() + PLAIN_EVERY_SECONDS
            self._stream.write_escaped(overview(members))

    def finished(self, member: Member) -> None:
        """Print one line."""
        self._stream.write_escaped(ending(member))

    def stop(self, end: Mapping[str, Any]) -> None:
        """Nothing: a table follows."""


class JsonGroup:
    """Every row of every member as a line of JSON that names the member, and the group's own at the end."""

    def __init__(self, stream: SafeStream) -> None:
        self._stream = stream

    def start(self, info: Mapping[str, Any]) -> None:
        """Nothing."""

    def row(self, member: str, row: Mapping[str, Any]) -> None:
        """Print the member's row with its name."""
        self._stream.write_line(json_line({"member": member, **row}))

    def warn(self, member: str, text: str) -> None:
        """Print it on standard error."""
        warn_on_stderr(f"{member}: {text}")

    def live(self, members: Sequence[Member]) -> None:
        """Nothing."""

    def finished(self, member: Member) -> None:
        """Nothing: the member's row of kind "end" has the result."""

    def stop(self, end: Mapping[str, Any]) -> None:
        """Print the group's own row of kind "end"."""
        self._stream.write_line(json_line(end))


class QuietGroup:
    """Only how the group ended."""

    def __init__(self, stream: SafeStream) -> None:
        self._stream = stream

    def start(self, info: Mapping[str, Any]) -> None:
        """Nothing."""

    def row(self, member: str, row: Mapping[str, Any]) -> None:
        """Nothing."""

    def warn(self, member: str, text: str) -> None:
        """Print it on standard error."""
        warn_on_stderr(f"{member}: {text}")

    def live(self, members: Sequence[Member]) -> None:
        """Nothing."""

    def finished(self, member: Member) -> None:
        """Nothing."""

    def stop(self, end: Mapping[str, Any]) -> None:
        """Print one line."""
        self._stream.write_escaped(f"{end['state']}: {end['reason']} ({end['group']})")


class LiveGroup:
    """A table redrawn in place; for each member that ends a line is printed above it."""

    draws_in_place = True

    def __init__(self, stream: SafeStream, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=cast(IO[str], stream), highlight=False, emoji=False, markup=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._clock = clock
        self._next = 0.0

    def start(self, info: Mapping[str, Any]) -> None:
        """Print the introduction, then open the table."""
        self._console.print(introduction(info), soft_wrap=True)
        for note in info.get("notes") or ():
            self._console.print(f"note: {note}", soft_wrap=True)
        self._live.start()
        self._console.show_cursor(True)  # a killed program could not show it again

    def row(self, member: str, row: Mapping[str, Any]) -> None:
        """Nothing: `live` shows it."""

    def warn(self, member: str, text: str) -> None:
        """Print one line above the table."""
        self._live.console.print(escaped(f"{member} warning: {text}"), soft_wrap=True)

    def live(self, members: Sequence[Member]) -> None:
        """Redraw, if the last drawing is half a second old."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + REDRAW_EVERY_SECONDS
        self._live.update(table(members), refresh=True)

    def finished(self, member: Member) -> None:
        """Print one line above the table."""
        self._live.console.print(ending(member), soft_wrap=True)

    def stop(self, end: Mapping[str, Any]) -> None:
        """Remove the table."""
        self._live.stop()


def make_group_watcher(mode: Mode, stream: IO[str] | None = None) -> GroupWatcher:
    """The watcher of a group for a mode, by default on standard output."""
    out = SafeStream(stream if stream is not None else sys.stdout)
    kinds: dict[str, Callable[[SafeStream], GroupWatcher]] = {
        "live": LiveGroup,
        "plain": PlainGroup,
        "json": JsonGroup,
        "quiet": QuietGroup,
    }
    return kinds[mode](out)


def default_group_watcher(progress: bool = True) -> GroupWatcher | None:
    """What shows a group if nobody chose a watcher: a table in a terminal or a notebook, else lines on stderr."""
    if not progress:
        return None
    if in_notebook():
        from qfleet.watch.notebook.screen import NotebookGroup

        return NotebookGroup()
    if auto_mode() == "live":
        return make_group_watcher("live")
    return None if sys.stderr is None else PlainGroup(SafeStream(sys.stderr))


# --- text ---


def introduction(info: Mapping[str, Any]) -> str:
    """The group in one line: environment, seeds, members at once, threads, name."""
    threads = info["threads"]
    num = len(info["members"])
    how = f"{num} seed{'s' * (num != 1)}, {info['jobs']} at once, {threads} thread{'s' * (threads != 1)} each"
    return f"{info['env']} · {how} · {info['group']}"


def ending(member: Member) -> str:
    """How one member ended."""
    text = f"{member['name']} {member['state']}"
    if member.get("score"):
        text += f": score {interval(member['score'])}"
    elif member.get("reason"):
        text += f": {member['reason']}"
    seconds = f" · {duration(member['seconds'])}" if member.get("seconds") else ""
    return f"{text} · {number(member.get('env_steps') or 0)} steps{seconds}"


def overview(members: Sequence[Member]) -> str:
    """All members in one line."""
    running = [member for member in members if member["state"] == "running"]
    ended = sum(member["exit_code"] is not None for member in members)
    shown = [
        f"{member['name']} {number(member.get('env_steps') or 0)} steps, return {number(member.get('return_mean'))}"
        for member in running
    ]
    return " · ".join([f"{ended} of {len(members)} ended", *shown])


def table(members: Sequence[Member]) -> Any:
    """All members as a rich table."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bright_black")
    for name in ("member", "state", "steps", "return", "evaluation", "steps/s"):
        shown.add_column(name, justify="left" if name in ("member", "state") else "right", no_wrap=True)
    for member in members:
        steps = member.get("env_steps")
        until = member.get("until_steps")
        shown.add_row(
            member["name"],
            member["state"],
            f"{number(steps or 0)} / {number(until)}",
            number(member.get("return_mean")),
            number(member.get("evaluation")),
            number(member.get("steps_per_second")) if member["state"] == "running" else "",
        )
    shown.add_row()  # the cursor rests here, so that output of a signal does not break the table
    return shown
