"""How far a command about data is: a bar in a terminal, otherwise a line every 30 seconds; always on standard error."""

import shutil
import sys
import time
from collections.abc import Callable

from qfleet.watch.console import PLAIN_EVERY_SECONDS, SafeStream, to_ascii
from qfleet.watch.text import duration

LIVE_EVERY_SECONDS = 0.2
BAR_CELLS = 24
CLEAR = "\r\x1b[K"


class CountProgress:
    """Shows how many of a known number are done, how fast, and how long the rest takes at that speed."""

    def __init__(
        self, verb: str, unit: str, stream: SafeStream | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.verb = verb
        self.unit = unit
        self.stream = stream or SafeStream(sys.stderr)
        self.clock = clock
        self.is_live = self.stream.isatty()
        self.began = clock()
        self.shown = self.began

    def show(self, done: int, num: int) -> None:
        """Show that `done` of `num` are done."""
        now = self.clock()
        if now - self.shown < (LIVE_EVERY_SECONDS if self.is_live else PLAIN_EVERY_SECONDS):
            return
        self.shown = now
        text = self._text(done, num, now - self.began)
        if self.is_live:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(CLEAR + self._encodable(f"{self._bar(done, num)} {text}")[:width])
            self.stream.flush()
        else:
            self.stream.write_escaped(text)

    def end(self) -> None:
        """Remove the bar."""
        if self.is_live:
            self.stream.write(CLEAR)
            self.stream.flush()

    def _text(self, done: int, num: int, seconds: float) -> str:
        rate = done / seconds if seconds > 0 else 0.0
        left = duration((num - done) / rate if rate else None)
        speed = f"{rate:,.1f}" if rate < 10 else f"{rate:,.0f}"
        return f"{self.verb}  {done:,} of {num:,} {self.unit} · {speed}/s · {left} left"

    def _bar(self, done: int, num: int) -> str:
        full = BAR_CELLS * done // max(1, num)
        return "█" * full + "░" * (BAR_CELLS - full)

    def _encodable(self, text: str) -> str:
        return to_ascii(text) if self.stream.ascii_only else text
