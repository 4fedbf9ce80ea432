"""Where episodes are shown: in a window, as pictures or text in the terminal, or not at all."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from qfleet.data import Array
from qfleet.errors import UsageError
from qfleet.training.evaluation.pictures import TerminalPicture, as_rgb
from qfleet.training.video import picture

HUMAN = "human"  # the render modes of Gymnasium that are used here
TEXT = "ansi"
PICTURE = "rgb_array"
DRAWS_PER_SECOND = 15  # in a terminal; a faster one would not be seen
SMALLEST_WINDOW = 480  # pixels: smaller pictures are enlarged
ROWS_BELOW = 3  # the line below a picture, the cursor's, and one to spare
MOST_TEXT = 20_000


class WindowClosed(Exception):
    """The user has closed the window: nobody looks any more."""


class EpisodeScreen(Protocol):
    """Shows what a world looks like."""

    def show(self, world: Any, line: str, *, ended: bool) -> None:
        """Show the world as it is now, and a line about it."""

    def write(self, line: str) -> None:
        """Print a line that stays."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def choose_mode(modes: tuple[str, ...], name: str, *, window: bool) -> str:
    """The render mode to use; UsageError if the environment has none that can be shown."""
    wanted = [HUMAN] if window else []
    found = [mode for mode in (*wanted, TEXT, PICTURE) if mode in modes]
    if found:
        return found[0]
    only_windows = "It can only draw into a window, and there is no display. " if HUMAN in modes else ""
    raise UsageError(
        f"{name} cannot be shown",
        f"{only_windows}Its render modes are: {', '.join(modes) or 'none'}; a terminal shows {TEXT} or {PICTURE}.",
        "Give its render() one of these modes, or send the output through a pipe to see only the returns: | cat",
    )


def has_display(variables: Mapping[str, str] = os.environ) -> bool:
    """Is there a display that a window can be opened on?"""
    return bool(variables.get("DISPLAY") or variables.get("WAYLAND_DISPLAY"))


def make_screen(mode: str | None, console: Console, *, window: bool) -> EpisodeScreen:
    """The screen for a render mode; None: only lines."""
    if mode is None or mode == HUMAN:
        return LineScreen(console)
    if mode == PICTURE and window and (opened := PictureWindow.open(console)) is not None:
        return opened
    return TerminalScreen(console, mode)


@dataclass
class LineScreen:
    """Only lines: for a pipe, and for an environment that draws its own window."""

    console: Console

    def show(self, world: Any, line: str, *, ended: bool) -> None:
        """Show nothing: the environment draws by itself, or nobody looks."""

    def write(self, line: str) -> None:
        """Print the line."""
        self.console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        """Nothing is open."""


class TerminalScreen:
    """Pictures or text in the terminal, redrawn in place at a bounded rate."""

    def __init__(self, console: Console, mode: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.mode = mode
        self.clock = clock
        self.drawn_at = -1.0
        self.live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self.live.start()

    def show(self, world: Any, line: str, *, ended: bool) -> None:
        """Draw the world, unless it was drawn a moment ago."""
        now = self.clock()
        if not ended and now - self.drawn_at < 1 / DRAWS_PER_SECOND:
            return
        self.drawn_at = now
        self.live.update(Group(self._drawing(world), Text(line, no_wrap=True)), refresh=True)

    def _drawing(self, world: Any) -> RenderableType:
        rows = max(1, self.console.size.height - ROWS_BELOW)
        if self.mode == TEXT:
            lines = str(world.render())[:MOST_TEXT].splitlines()[:rows]
            return Text("\n").join(Text.from_ansi(each, no_wrap=True) for each in lines)
        return TerminalPicture(as_rgb(shown_picture(world)), rows)

    def write(self, line: str) -> None:
        """Print the line above the picture."""
        self.console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        """Remove the picture and show the cursor."""
        self.live.stop()


class PictureWindow:
    """A window of our own, for environments that only make pictures."""

    def __init__(self, pygame: Any, console: Console) -> None:
        self.pygame = pygame
        self.console = console
        self.surface: Any = None

    @classmethod
    def open(cls, console: Console) -> "PictureWindow | None":
        """A window; None if there is no pygame or no usable display."""
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        try:
            import pygame

            pygame.display.init()
        except Exception:  # pygame.error of a display that cannot be used, or no pygame
            return None
        return cls(pygame, console)

    def show(self, world: Any, line: str, *, ended: bool) -> None:
        """Draw the picture; `WindowClosed` if the user has closed the window."""
        frame = as_rgb(shown_picture(world))
        height, width = frame.shape[:2]
        scale = max(1, -(-SMALLEST_WINDOW // max(height, width)))
        if self.surface is None:
            self.surface = self.pygame.display.set_mode((width * scale, height * scale))
        drawn = self.pygame.surfarray.make_surface(frame.swapaxes(0, 1))
        self.surface.blit(self.pygame.transform.scale(drawn, self.surface.get_size()), (0, 0))
        self.pygame.display.set_caption(line)
        self.pygame.display.flip()
        if any(event.type == self.pygame.QUIT for event in self.pygame.event.get()):
            raise WindowClosed

    def write(self, line: str) -> None:
        """Print the line."""
        self.console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        """Close the window."""
        self.pygame.display.quit()


def shown_picture(world: Any) -> Array:
    """What the world looks like; the error says that it cannot be shown."""
    try:
        return picture(world)
    except UsageError as error:
        raise UsageError("this environment cannot be shown", error.why, error.fix) from error
