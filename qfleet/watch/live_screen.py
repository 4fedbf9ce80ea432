"""The live screen: one panel, redrawn twice a second by the training loop itself (no thread)."""

import math
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, cast

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from qfleet.escape import escaped
from qfleet.watch.console import NewWarnings, SafeStream, to_ascii
from qfleet.watch.text import (
    ASCII_RAMP,
    RAMP,
    device_text,
    duration,
    end_lines,
    number,
    remark_line,
    seconds_left,
    share,
    sparkline,
    time_line,
)

REDRAW_EVERY_SECONDS = 0.5
WIDEST = 108  # wider lines are hard to read
MOST_POINTS = 2048
MOST_WARNINGS = 3
QUIET = "bright_black"
STRONG = "bold"
ACCENT = "cyan"
ALARM = "yellow"


class Trend:
    """One number over the whole run; when it grows long, pairs of values are averaged."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._pairs = 1
        self._sum = 0.0
        self._count = 0

    def add(self, value: float | None) -> None:
        """Add a value; None and NaN are skipped."""
        if value is None or value != value:
            return
        self._sum = self._sum + float(value)
        self._count = self._count + 1
        if self._count < self._pairs:
            return
        self.values.append(self._sum / self._count)
        self._sum = 0.0
        self._count = 0
        if len(self.values) >= MOST_POINTS:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._pairs *= 2


class Screen:
    """The contents of the panel; a rich renderable that fits its console."""

    def __init__(self) -> None:
        self.info: Mapping[str, Any] = {}
        self.snapshot: Mapping[str, Any] = {}
        self.returns = Trend()
        self.losses = Trend()
        self.scores = Trend()
        self.evaluation: Mapping[str, Any] | None = None
        self.hint = "Ctrl-C saves and leaves"
        self.ended = False

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Take from a row what the trends and the evaluation line show."""
        if row.get("kind") == "progress":
            self.returns.add(row.get("return_mean"))
            self.losses.add(row.get("loss"))
        elif row.get("kind") == "eval" and row.get("split") != "test":
            self.scores.add(row.get("mean"))
            self.evaluation = row

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        roomy = (options.height or console.height) >= 22
        blocks = self._blocks(width - 6, roomy, options.ascii_only)
        body = Group(*([piece for block in blocks for piece in (block, Text(""))][:-1] if roomy else blocks))
        yield Panel(
            Padding(body, (1 if roomy else 0, 2)),
            title=self._title(options.ascii_only, width),
            title_align="left",
            subtitle=None if self.ended else Text(self.hint, style=QUIET),
            subtitle_align="right",
            border_style=QUIET,
            box=box.ROUNDED,
            width=width,
        )
        if not self.ended:
            # The cursor rests on a line of its own, so that output of a terminal or signal moves nothing.
            yield _text(str(self.snapshot.get("leaving") or ""), options.ascii_only, ALARM)

    def _blocks(self, width: int, roomy: bool, ascii_only: bool) -> list[RenderableType]:
        blocks = [self._bar(ascii_only), self._learning(width, ascii_only), self._machine(width, roomy, ascii_only)]
        warnings = list(self.snapshot.get("warnings") or ())[-MOST_WARNINGS:]
        if warnings:
            blocks.append(Group(*(_text(f"! {warning}", ascii_only, ALARM) for warning in warnings)))
        return blocks

    def _title(self, ascii_only: bool, width: int) -> Text:
        subject = " · ".join(str(self.info[key]) for key in ("env", "algorithm") if self.info.get(key))
        title = Text.assemble(("qfleet ", f"{STRONG} {ACCENT}"), _text(subject, ascii_only, f"{STRONG} default"))
        run = str(self.info.get("run") or "")
        if run and len(title) + len(run) + 9 <= width:
            title.append_text(_text(f" · {run}", ascii_only, QUIET))
        return title

    def _bar(self, ascii_only: bool) -> RenderableType:
        done = self.snapshot.get("env_steps") or 0
        until = self.snapshot.get("until_steps")
        grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        steps = f"{number(done)} / {number(until)} steps" if until else f"{number(done)} steps"
        label = _text(f"{share(done, until):4.0%}  {steps}", ascii_only)
        grid.add_row(
            ProgressBar(total=until or 1, completed=done, complete_style=ACCENT, finished_style="green"), label
        )
        return grid

    def _learning(self, width: int, ascii_only: bool) -> Table:
        snapshot = self.snapshot
        grid = _three_columns()
        ramp = ASCII_RAMP if ascii_only else RAMP
        room = max(8, width - 24)
        curve = Text(sparkline(self.returns.values, room, ramp), style=ACCENT)
        grid.add_row("return", _text(number(snapshot.get("return_mean")), ascii_only, STRONG), curve)
        fall = [math.log10(max(loss, 1e-12)) for loss in self.losses.values]
        grid.add_row("loss", _text(number(snapshot.get("loss")), ascii_only), Text(sparkline(fall, room, ramp), QUIET))
        row = self.evaluation or snapshot.get("eval")
        if row:
            mean = _text(number(row.get("mean")), ascii_only, STRONG)
            grid.add_row("evaluation", mean, _evaluation_text(row, room, ascii_only))
        else:
            grid.add_row("evaluation", _text("–", ascii_only), _text("none yet", ascii_only, QUIET))
        if snapshot.get("best") is not None:
            best = snapshot["best"]
            mean = _text(number(best.get("mean") if isinstance(best, Mapping) else best), ascii_only, "bold green")
            grid.add_row("best", mean, Text(sparkline(self.scores.values, room, ramp), style="green"))
        return grid

    def _machine(self, width: int, roomy: bool, ascii_only: bool) -> Table:
        facts = self._state()
        pairs = list(zip(facts[::2], facts[1::2], strict=True))
        least = sum(max(len(each[side][part]) for each in pairs) for side in (0, 1) for part in (0, 1)) + 6
        wide = width >= 70
        grid = Table.grid(padding=(0, 2, 0, 0))
        if least > width and roomy:  # one column, so that no value is truncated
            pairs = [(fact, ("", "")) for fact in facts]
        for column in range(2):
            grid.add_column(style=QUIET, no_wrap=True, min_width=10 if wide else 0)
            grid.add_column(no_wrap=True, min_width=22 if wide and column == 0 else 0)
        for (a, b), (c, d) in pairs:
            grid.add_row(a, _text(b, ascii_only), _text(c, ascii_only), _text(d, ascii_only))
        return grid

    def _state(self) -> list[tuple[str, str]]:
        """Speed, time and state as names and values, filling two columns row by row."""
        snapshot = self.snapshot
        room = snapshot.get("replay_capacity")
        age = snapshot.get("checkpoint_age_seconds")
        return [
            ("speed", f"{_integer(snapshot.get('steps_per_second'))} steps/s"),
            ("epsilon", number(snapshot.get("epsilon"))),
            ("", f"{_integer(snapshot.get('updates_per_second'))} updates/s"),
            ("replay", f"{share(snapshot.get('replay_size'), room):.0%} of {number(room)}"),
            ("elapsed", duration(snapshot.get("seconds"))),
            ("checkpoint", "none yet" if age is None else f"{duration(age)} ago"),
            ("left", f"about {duration(seconds_left(snapshot))}"),
            ("device", device_text(self.info)),
            ("learner", _learner_text(snapshot)),
            ("lag · age", _ages(snapshot)),
        ]


def _three_columns() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=QUIET, no_wrap=True, min_width=10)
    grid.add_column(no_wrap=True, min_width=8)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def _evaluation_text(row: Mapping[str, Any], room: int, ascii_only: bool) -> Text:
    between = f"[{number(row.get('low'))}, {number(row.get('high'))}]"
    where = f"at {number(row.get('env_steps'))} steps"
    full = f"95 % {between} · {number(row.get('episodes'))} episodes {where}"
    fitting = [text for text in (full, f"95 % {between} {where}", f"{between} {where}") if len(text) <= room]
    return _text(fitting[0] if fitting else between, ascii_only)


def _integer(value: float | None) -> str:
    return number(value if value is None else round(value))


def _learner_text(snapshot: Mapping[str, Any]) -> str:
    """What the learner is doing, and the number of actors if there are several."""
    actors = str(snapshot.get("actors") or "")
    return str(snapshot.get("gate") or "–") + (f", {actors} actors" if actors not in ("", "1/1") else "")


def _ages(snapshot: Mapping[str, Any]) -> str:
    """The age of the acting policy in updates, and of sampled experience in steps."""
    return f"{number(snapshot.get('policy_lag'))} · {_integer(snapshot.get('replay_age'))}"


def _text(text: str, ascii_only: bool, style: str = "") -> Text:
    text = escaped(text)
    return Text(to_ascii(text) if ascii_only else text, style=style, overflow="ellipsis", no_wrap=True)


class LiveWatcher:
    """Redraws the screen in place; the last one stays."""

    draws_in_place = True

    def __init__(
        self, stream: SafeStream, clock: Callable[[], float] = time.monotonic, console: Console | None = None
    ) -> None:
        self.screen = Screen()
        self._clock = clock
        self._next = 0.0
        self._console = console or Console(file=cast(IO[str], stream), highlight=False, emoji=False, markup=False)
        self._live: Live | None = None
        self._scrolled_warnings = NewWarnings(lambda warning: self._print(f"! {warning}", ALARM))

    def note(self, text: str) -> None:
        """Print what takes a while before a run begins."""
        self._print(text, QUIET)

    def start(self, info: Mapping[str, Any]) -> None:
        """Print the notes, then open the screen."""
        self.screen.info = info
        for note in info.get("notes") or ():
            self._print(str(note), QUIET)
        self._live = Live(self.screen, console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start(refresh=True)
        # Never hide the cursor: a killed run could not show it again.
        self._console.show_cursor(True)

    def row(self, row: Mapping[str, Any]) -> None:
        """Add the row to the screen; an evaluation is shown at the next redraw."""
        self.screen.add_row(row)
        if row.get("kind") == "eval":
            self._next = 0.0
        elif row.get("text"):
            self._print(remark_line(row), QUIET)  # stays above the screen

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """Redraw, if the last drawing is half a second old."""
        now = self._clock()
        if self._live is None or (now < self._next and not snapshot.get("leaving")):
            return
        self._next = now + REDRAW_EVERY_SECONDS
        # The panel shows the newest warnings; older ones are printed above it.
        self._scrolled_warnings.forward({"warnings": list(snapshot.get("warnings") or ())[:-MOST_WARNINGS]})
        self.screen.snapshot = snapshot
        self._live.refresh()

    def stop(self, status: Mapping[str, Any]) -> None:
        """Draw the last state, close the screen, and print how the run ended."""
        if self._live is not None:
            counts = {key: status[key] for key in ("env_steps", "updates") if status.get(key) is not None}
            self.screen.snapshot = {**self.screen.snapshot, **counts}
            self.screen.ended = True
            self._live.stop()
            self._live = None
        style = STRONG if not status.get("exit_code") else f"{STRONG} {ALARM}"
        for line in end_lines(status):
            self._print(line, style)
            style = ""
        if status.get("profile"):
            self._print_wrapped(f"time: {time_line(status['profile'])}")

    def _print_wrapped(self, text: str) -> None:
        """Print a long text, wrapped between words."""
        ascii_only = self._console.options.ascii_only
        width = min(self._console.width, WIDEST)
        wrapped = textwrap.TextWrapper(width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)
        for line in wrapped.wrap(text):
            self._console.print(_text(line, ascii_only, QUIET), soft_wrap=True)

    def _print(self, text: str, style: str) -> None:
        shown = _text(text, self._console.options.ascii_only, style)
        shown.overflow = "ignore"
        self._console.print(shown, soft_wrap=True)
