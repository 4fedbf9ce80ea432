"""The live screen: one calm panel, redrawn twice a second by the training loop itself (no thread)."""

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
from qfleet.watch.console import Warnings
from qfleet.watch.safe_stream import SafeStream, simplify
from qfleet.watch.text import (
    RAMP,
    SIMPLE_RAMP,
    duration,
    end_lines,
    machine,
    number,
    remark_line,
    seconds_left,
    share,
    sparkline,
    time_line,
)

REDRAW_EVERY_SECONDS = 0.5
WIDEST = 108  # wider lines are hard to follow with the eye
MOST_POINTS = 2048
MOST_WARNINGS = 3
QUIET = "bright_black"
STRONG = "bold"
ACCENT = "cyan"
ALARM = "yellow"


class Trend:
    """The course of one number over the whole run, thinned by pairs when it grows long."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._pairs = 1
        self._sum = 0.0
        self._count = 0

    def add(self, value: float | None) -> None:
        """One more value; what is missing is passed over."""
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
    """What the panel shows; a rich renderable that fits the console it is drawn on."""

    def __init__(self) -> None:
        self.info: Mapping[str, Any] = {}
        self.snapshot: Mapping[str, Any] = {}
        self.returns = Trend()
        self.losses = Trend()
        self.scores = Trend()
        self.evaluation: Mapping[str, Any] | None = None
        self.ended = False

    def see(self, row: Mapping[str, Any]) -> None:
        """Remember what the trends and the evaluation line need from a row."""
        if row.get("kind") == "progress":
            self.returns.add(row.get("return_mean"))
            self.losses.add(row.get("loss"))
        elif row.get("kind") == "eval" and row.get("split") != "test":
            self.scores.add(row.get("mean"))
            self.evaluation = row

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        roomy = (options.height or console.height) >= 22
        body = Group(*_spaced(self._blocks(width - 6, roomy, options.ascii_only), roomy))
        yield Panel(
            Padding(body, (1 if roomy else 0, 2)),
            title=self._title(options.ascii_only, width),
            title_align="left",
            subtitle=None if self.ended else Text("Ctrl-C saves and leaves", style=QUIET),
            subtitle_align="right",
            border_style=QUIET,
            box=box.ROUNDED,
            width=width,
        )
        if not self.ended:
            # The cursor rests on a line of its own: what a terminal or a signal writes there moves nothing.
            yield _text(str(self.snapshot.get("leaving") or ""), options.ascii_only, ALARM)

    def _blocks(self, width: int, roomy: bool, simple: bool) -> list[RenderableType]:
        blocks = [self._bar(simple), self._learning(width, simple), self._machine(width, roomy, simple)]
        warnings = list(self.snapshot.get("warnings") or ())[-MOST_WARNINGS:]
        if warnings:
            blocks.append(Group(*(_text(f"! {warning}", simple, ALARM) for warning in warnings)))
        return blocks

    def _title(self, simple: bool, width: int) -> Text:
        what = " · ".join(str(self.info[key]) for key in ("env", "algorithm") if self.info.get(key))
        title = Text.assemble(("qfleet ", f"{STRONG} {ACCENT}"), _text(what, simple, f"{STRONG} default"))
        run = str(self.info.get("run") or "")
        if run and len(title) + len(run) + 9 <= width:
            title.append_text(_text(f" · {run}", simple, QUIET))
        return title

    def _bar(self, simple: bool) -> RenderableType:
        done = self.snapshot.get("env_steps") or 0
        until = self.snapshot.get("until_steps")
        grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        steps = f"{number(done)} / {number(until)} steps" if until else f"{number(done)} steps"
        words = _text(f"{share(done, until):4.0%}  {steps}", simple)
        grid.add_row(
            ProgressBar(total=until or 1, completed=done, complete_style=ACCENT, finished_style="green"), words
        )
        return grid

    def _learning(self, width: int, simple: bool) -> Table:
        shot = self.snapshot
        grid = _facts()
        ramp = SIMPLE_RAMP if simple else RAMP
        room = max(8, width - 24)
        course = Text(sparkline(self.returns.values, room, ramp), style=ACCENT)
        grid.add_row("return", _text(number(shot.get("return_mean")), simple, STRONG), course)
        fall = [math.log10(max(loss, 1e-12)) for loss in self.losses.values]
        grid.add_row("loss", _text(number(shot.get("loss")), simple), Text(sparkline(fall, room, ramp), QUIET))
        row = self.evaluation or shot.get("eval")
        if row:
            grid.add_row("evaluation", _text(number(row.get("mean")), simple, STRONG), _judged(row, room, simple))
        else:
            grid.add_row("evaluation", _text("–", simple), _text("none yet", simple, QUIET))
        if shot.get("best") is not None:
            scores = Text(sparkline(self.scores.values, room, ramp), style="green")
            grid.add_row("best", _text(number(_score(shot["best"])), simple, "bold green"), scores)
        return grid

    def _machine(self, width: int, roomy: bool, simple: bool) -> Table:
        facts = self._state()
        pairs = list(zip(facts[::2], facts[1::2], strict=True))
        least = sum(max(len(each[side][part]) for each in pairs) for side in (0, 1) for part in (0, 1)) + 6
        wide = width >= 70
        grid = Table.grid(padding=(0, 2, 0, 0))
        if least > width and roomy:  # one below the other: values are never cut to save lines that are there
            pairs = [(fact, ("", "")) for fact in facts]
        for column in range(2):
            grid.add_column(style=QUIET, no_wrap=True, min_width=10 if wide else 0)
            grid.add_column(no_wrap=True, min_width=22 if wide and column == 0 else 0)
        for (a, b), (c, d) in pairs:
            grid.add_row(a, _text(b, simple), _text(c, simple), _text(d, simple))
        return grid

    def _state(self) -> list[tuple[str, str]]:
        """How fast it goes, how long it takes and how it stands: names and values, in the order of two columns."""
        shot = self.snapshot
        room = self.snapshot.get("replay_capacity")
        return [
            ("speed", f"{_whole(shot.get('steps_per_second'))} steps/s"),
            ("epsilon", number(shot.get("epsilon"))),
            ("", f"{_whole(shot.get('updates_per_second'))} updates/s"),
            ("replay", f"{share(shot.get('replay_size'), room):.0%} of {number(room)}"),
            ("elapsed", duration(shot.get("seconds"))),
            ("checkpoint", _ago(shot.get("checkpoint_age_seconds"))),
            ("left", f"about {duration(seconds_left(shot))}"),
            ("device", machine(self.info)),
            ("learner", _gate(shot)),
            ("lag · age", _ages(shot)),
        ]


def _facts() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=QUIET, no_wrap=True, min_width=10)
    grid.add_column(no_wrap=True, min_width=8)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def _judged(row: Mapping[str, Any], room: int, simple: bool) -> Text:
    between = f"[{number(row.get('low'))}, {number(row.get('high'))}]"
    where = f"at {number(row.get('env_steps'))} steps"
    full = f"95 % {between} · {number(row.get('episodes'))} episodes {where}"
    fitting = [text for text in (full, f"95 % {between} {where}", f"{between} {where}") if len(text) <= room]
    return _text(fitting[0] if fitting else between, simple)


def _score(best: Any) -> Any:
    return best.get("mean") if isinstance(best, Mapping) else best


def _whole(value: float | None) -> str:
    return number(value if value is None else round(value))


def _ago(seconds: float | None) -> str:
    return "none yet" if seconds is None else f"{duration(seconds)} ago"


def _gate(shot: Mapping[str, Any]) -> str:
    """What the learner does, and with how many actors if there could be several."""
    actors = str(shot.get("actors") or "")
    return str(shot.get("gate") or "–") + (f", {actors} actors" if actors not in ("", "1/1") else "")


def _ages(shot: Mapping[str, Any]) -> str:
    """How many updates old the policy is that acts, and how many steps old the experience that is learned from."""
    return f"{number(shot.get('policy_lag'))} · {_whole(shot.get('replay_age'))}"


def _text(text: str, simple: bool, style: str = "") -> Text:
    text = escaped(text)
    return Text(simplify(text) if simple else text, style=style, overflow="ellipsis", no_wrap=True)


def _spaced(blocks: list[RenderableType], roomy: bool) -> list[RenderableType]:
    if not roomy:
        return blocks
    return [piece for block in blocks for piece in (block, Text(""))][:-1]


class LiveWatcher:
    """Redraws the screen in place and leaves the last one standing."""

    draws_in_place = True

    def __init__(
        self, stream: SafeStream, clock: Callable[[], float] = time.monotonic, console: Console | None = None
    ) -> None:
        self.every_seconds = REDRAW_EVERY_SECONDS
        self.screen = Screen()
        self._clock = clock
        self._next = 0.0
        self._console = console or Console(file=cast(IO[str], stream), highlight=False, emoji=False, markup=False)
        self._live: Live | None = None
        self._above = Warnings(lambda warning: self._say(f"! {warning}", ALARM))

    def note(self, text: str) -> None:
        """Say what takes a while before a run begins."""
        self._say(text, QUIET)

    def start(self, info: Mapping[str, Any]) -> None:
        """Print the notes, then open the screen."""
        self.screen.info = info
        for note in info.get("notes") or ():
            self._say(str(note), QUIET)
        self._live = Live(self.screen, console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start(refresh=True)
        # A killed run could not give the cursor back, so it is never taken.
        self._console.show_cursor(True)

    def row(self, row: Mapping[str, Any]) -> None:
        """Keep what the screen needs; an evaluation is shown with the next redraw."""
        self.screen.see(row)
        if row.get("kind") == "eval":
            self._next = 0.0
        elif row.get("text"):
            self._say(remark_line(row), QUIET)  # stays above the screen

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """Redraw, if the last drawing is half a second old."""
        now = self._clock()
        if self._live is None or (now < self._next and not snapshot.get("leaving")):
            return
        self._next = now + self.every_seconds
        # The panel has room for the newest; the others stay above it.
        self._above.hear({"warnings": list(snapshot.get("warnings") or ())[:-MOST_WARNINGS]})
        self.screen.snapshot = snapshot
        self._live.refresh()

    def stop(self, status: Mapping[str, Any]) -> None:
        """Draw the last state, close the screen, and say how it ended."""
        if self._live is not None:
            counts = {key: status[key] for key in ("env_steps", "updates") if status.get(key) is not None}
            self.screen.snapshot = {**self.screen.snapshot, **counts}
            self.screen.ended = True
            self._live.stop()
            self._live = None
        style = STRONG if not status.get("exit_code") else f"{STRONG} {ALARM}"
        for line in end_lines(status):
            self._say(line, style)
            style = ""
        if status.get("profile"):
            self._explain(f"time: {time_line(status['profile'])}")

    def _explain(self, text: str) -> None:
        """A long line, broken between words."""
        simple = self._console.options.ascii_only
        width = min(self._console.width, WIDEST)
        wrapped = textwrap.TextWrapper(width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)
        for line in wrapped.wrap(text):
            self._console.print(_text(line, simple, QUIET), soft_wrap=True)

    def _say(self, text: str, style: str) -> None:
        shown = _text(text, self._console.options.ascii_only, style)
        shown.overflow = "ignore"
        self._console.print(shown, soft_wrap=True)
