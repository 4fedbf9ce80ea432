"""Progress in a notebook: one output of the cell, redrawn in place; it needs no widgets."""

import io
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.text import Text

from qfleet.escape import escaped
from qfleet.watch.console import NewWarnings
from qfleet.watch.live_screen import Screen
from qfleet.watch.sweep_console import Member, ending, introduction, overview, table
from qfleet.watch.text import end_lines, progress_line, remark_line, time_line

REDRAW_EVERY_SECONDS = 1.0
COLUMNS = 100
LINES = 40
MOST_LINES = 200  # of text around the panel: a run may warn without end
INTERRUPT = "interrupting the cell saves and returns the run"
# As rich draws in a notebook: the colours of the page, and a font whose frames join.
PRE = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\">{code}</pre>"
)


class CellOutput(Protocol):
    """An output of a cell that can be replaced."""

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        """Show this instead."""


def new_output(bundle: dict[str, str]) -> CellOutput:
    """Show a bundle of MIME types in the cell that runs."""
    shown: CellOutput = import_module("IPython.display").display(bundle, raw=True, display_id=True)
    return shown


class CellScreen:
    """Lines of text around a panel, in one output of the cell. A front end that refuses it does not stop training."""

    def __init__(self, show: Callable[[dict[str, str]], CellOutput] = new_output) -> None:
        self.above: list[str] = []
        self.below: list[str] = []
        self._show = show
        self._output: CellOutput | None = None

    def draw(self, panel: RenderableType | None, text: str) -> None:
        """Show the lines and the panel; `text` is for readers without HTML."""
        bundle = {"text/html": self._html(panel), "text/plain": escaped(text)}
        try:
            if self._output is None:
                self._output = self._show(bundle)
            else:
                self._output.update(bundle, raw=True)
        except Exception:  # the kernel's connection, or code of a front end
            return

    def _html(self, panel: RenderableType | None) -> str:
        console = Console(
            file=io.StringIO(),
            record=True,
            width=COLUMNS,
            height=LINES,
            color_system="truecolor",
            force_terminal=True,
            force_jupyter=False,
            highlight=False,
            emoji=False,
            markup=False,
        )
        for line in self.above[-MOST_LINES:]:
            console.print(Text(escaped(line)), soft_wrap=True)
        if panel is not None:
            console.print(panel)
        for line in self.below[-MOST_LINES:]:
            console.print(Text(escaped(line)), soft_wrap=True)
        return console.export_html(inline_styles=True, code_format=PRE)


class NotebookWatcher:
    """The live screen of one run in a cell."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, cell: CellScreen | None = None) -> None:
        self.screen = Screen()
        self.screen.hint = INTERRUPT
        self._cell = cell or CellScreen()
        self._clock = clock
        self._next = 0.0
        self._begun = False
        self._warnings = NewWarnings(lambda warning: self._cell.above.append(f"! {warning}"))

    def note(self, text: str) -> None:
        """Show what takes a while before a run begins."""
        self._cell.above.append(text)
        self._draw()

    def start(self, info: Mapping[str, Any]) -> None:
        """Show the run's folder, the notes and the panel."""
        self.screen.info = {**info, "run": None}  # a long folder would not fit into the panel's title
        self._begun = True
        self._cell.above += [str(info.get("run") or ""), *(str(note) for note in info.get("notes") or ())]
        self._draw()

    def row(self, row: Mapping[str, Any]) -> None:
        """Add the row to the panel; an evaluation is shown at the next redraw."""
        self.screen.add_row(row)
        if row.get("kind") == "eval":
            self._next = 0.0
        elif row.get("text"):
            self._cell.above.append(remark_line(row))

    def live(self, snapshot: Mapping[str, Any]) -> None:
        """Redraw, if the last drawing is a second old."""
        now = self._clock()
        if now < self._next and not snapshot.get("leaving"):
            return
        self._next = now + REDRAW_EVERY_SECONDS
        self._warnings.forward(snapshot)
        self.screen.snapshot = {**snapshot, "warnings": ()}  # they are above the panel
        self._draw()

    def stop(self, status: Mapping[str, Any]) -> None:
        """Draw the last state, and how the run ended."""
        counts = {key: status[key] for key in ("env_steps", "updates") if status.get(key) is not None}
        self.screen.snapshot = {**self.screen.snapshot, **counts}
        self.screen.ended = True
        self._cell.below += end_lines(status)
        if status.get("profile"):
            self._cell.below.append(f"time: {time_line(status['profile'])}")
        self._draw()

    def _draw(self) -> None:
        lines = self._cell.below or [progress_line(self.screen.snapshot)]
        self._cell.draw(self.screen if self._begun else None, "\n".join(lines))


class NotebookGroup:
    """The members of a group in a cell."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, cell: CellScreen | None = None) -> None:
        self._cell = cell or CellScreen()
        self._clock = clock
        self._next = 0.0
        self._members: Sequence[Member] = ()

    def start(self, info: Mapping[str, Any]) -> None:
        """Show the introduction and the notes."""
        self._cell.above += [introduction(info), *(f"note: {note}" for note in info.get("notes") or ())]
        self._draw()

    def row(self, member: str, row: Mapping[str, Any]) -> None:
        """Nothing: `live` shows it."""

    def warn(self, member: str, text: str) -> None:
        """Show one line above the table."""
        self._cell.above.append(f"{member} warning: {text}")

    def live(self, members: Sequence[Member]) -> None:
        """Redraw, if the last drawing is a second old."""
        self._members = members
        if self._clock() < self._next:
            return
        self._next = self._clock() + REDRAW_EVERY_SECONDS
        self._draw()

    def finished(self, member: Member) -> None:
        """Show one line below the table."""
        self._cell.below.append(ending(member))
        self._next = 0.0

    def stop(self, end: Mapping[str, Any]) -> None:
        """Show how the group ended, without the table of those that run."""
        self._members = ()
        self._cell.below.append(f"{end['state']}: {end['reason']} ({end['group']})")
        self._draw()

    def _draw(self) -> None:
        text = "\n".join(self._cell.below) or overview(self._members)
        self._cell.draw(table(self._members) if self._members else None, text)
