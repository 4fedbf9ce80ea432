"""Pictures in a terminal: two pixels per character, as half blocks in colour or as shades. H, W pixels of a picture."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

from qfleet.data import Array

BLOCK = "▀"  # the upper half in the foreground colour, the lower half in the background colour
SHADES = " .:-=+*#%@"
COLOUR_MASK = 0xF0  # fewer colours: equal neighbours are written together, and styles are kept
MOST_COLUMNS = 200
MOST_ROWS = 80


def as_rgb(frame: Array) -> Array:  # [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] -> [H, W, 3] uint8
    """A picture with three channels of bytes; fractions from 0 to 1 are brightness too."""
    picture = frame[..., None] if frame.ndim == 2 else frame
    if picture.dtype.kind == "f":
        picture = np.nan_to_num(picture) * (255.0 if picture.size and float(np.nanmax(picture)) <= 1.0 else 1.0)
    picture = np.clip(picture, 0, 255).astype(np.uint8)
    return picture.repeat(3, axis=2) if picture.shape[2] < 3 else picture[..., :3]


def fitted(picture: Array, columns: int, rows: int) -> Array:  # [H, W, 3] -> [2 R, C, 3]
    """The picture in at most `rows` rows of `columns` characters, in its own proportions, with an even height."""
    height, width = picture.shape[:2]
    scale = min(columns / width, 2 * rows / height)
    new_height = max(2, int(height * scale) // 2 * 2)
    return resized(resized(picture, new_height, 0), max(1, int(width * scale)), 1).astype(np.uint8)


def resized(picture: Array, size: int, axis: int) -> Array:
    """The picture with another size along one axis: means of pixels, or repeated pixels if it grows."""
    before = picture.shape[axis]
    if size >= before:
        repeated: Array = picture.take(np.arange(size) * before // size, axis=axis)
        return repeated
    edges = np.arange(size) * before // size
    counts = np.diff([*edges, before])
    sums = np.add.reduceat(picture.astype(np.float32), edges, axis=axis)
    means: Array = sums / counts.reshape([-1 if each == axis else 1 for each in range(picture.ndim)])
    return means


@dataclass(frozen=True)
class TerminalPicture:
    """A rich renderable: a picture that fits into the console's width and into `rows` rows."""

    frame: Array  # [H, W, 3] uint8
    rows: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = max(1, min(options.max_width, MOST_COLUMNS))
        pixels = fitted(self.frame, columns, max(1, min(self.rows, MOST_ROWS)))
        if console.color_system is None or options.ascii_only:
            yield from shaded(pixels)
        else:
            yield from half_blocks(pixels)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


def half_blocks(pixels: Array) -> Iterable[Segment]:  # [2 R, C, 3]
    """Rows of half blocks; neighbours of the same colours are one segment."""
    upper = (pixels[0::2] & COLOUR_MASK).tolist()
    lower = (pixels[1::2] & COLOUR_MASK).tolist()
    for above, below in zip(upper, lower, strict=True):
        pairs = [(tuple(a), tuple(b)) for a, b in zip(above, below, strict=True)]
        for (top, bottom), run in groupby(pairs):
            yield Segment(BLOCK * len(list(run)), block_style(top, bottom))
        yield Segment.line()


@lru_cache(maxsize=8192)
def block_style(top: tuple[int, int, int], bottom: tuple[int, int, int]) -> Style:
    """The style of a half block."""
    return Style.from_color(Color.from_rgb(*top), Color.from_rgb(*bottom))


def shaded(pixels: Array) -> Iterable[Segment]:  # [2 R, C, 3]
    """Rows of characters from dark to bright, for a terminal without colours."""
    brightness = pixels.astype(np.float32).mean(axis=2)
    rows = (brightness[0::2] + brightness[1::2]) / 2
    for row in (rows / 256 * len(SHADES)).astype(int).tolist():
        yield Segment("".join(SHADES[each] for each in row))
        yield Segment.line()
