"""A small curve as SVG: evaluations with their interval, or the returns of training where there are none yet."""

from collections.abc import Sequence
from pathlib import Path

from qfleet.errors import QfleetError
from qfleet.escape import html_text
from qfleet.watch.plot import COLOURS, Points, curve, curve_rows
from qfleet.watch.run_files import Row
from qfleet.watch.text import number

WIDTH = 320
HEIGHT = 80
MARGIN = 4
MOST_POINTS = 200
Scale = tuple[float, float, float, float]  # first and last step, lowest and highest value
MOST_BYTES = 64 << 20  # a larger file would keep its reader waiting


def run_curve(path: Path) -> str:
    """The curve of a run; empty if it has nothing to draw."""
    rows = drawn_rows(path)
    steps, means = thinned(curve(rows, "eval", "mean"))
    if len(steps) < 2:
        return svg([thinned(curve(rows, "progress", "return_mean"))], "return of training episodes")
    low = thinned(curve(rows, "eval", "low"))
    high = thinned(curve(rows, "eval", "high"))
    band = (low, high) if low[0] == high[0] == steps else None
    return svg([(steps, means)], "evaluation", band)


def evaluations(path: Path) -> Points:
    """The evaluations of a run over its steps."""
    return thinned(curve(drawn_rows(path), "eval", "mean"))


def drawn_rows(path: Path) -> list[Row]:
    """The rows of a run; none if they cannot be read, or are too many to read for a small picture."""
    try:
        if (path / "metrics.jsonl").lstat().st_size > MOST_BYTES:
            return []
        return curve_rows(path)
    except (QfleetError, OSError):
        return []


def thinned(points: Points) -> Points:
    """At most MOST_POINTS of them, the last included."""
    steps, values = points
    every = max(1, -(-len(steps) // MOST_POINTS))
    kept = range(len(steps) - 1, -1, -every)
    return [steps[index] for index in reversed(kept)], [values[index] for index in reversed(kept)]


def svg(curves: Sequence[Points], title: str, band: tuple[Points, Points] | None = None) -> str:
    """Curves on common axes, each in a colour of its own; the band lies behind the first."""
    drawn = [each for each in curves if len(each[0]) > 1]
    if not drawn:
        return ""
    every = [*drawn, *(band or ())]
    steps = [step for each in every for step in each[0]]
    values = [value for each in every for value in each[1]]
    scale = (min(steps), max(steps), min(values), max(values))
    shapes = [] if band is None else [_band(band, scale)]
    shapes += [_line(each, scale, COLOURS[index % len(COLOURS)]) for index, each in enumerate(drawn)]
    label = f"{title}: {number(scale[2])} to {number(scale[3])} over {number(int(scale[1]))} steps"
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    picture = f'<svg {size} role="img" aria-label="{html_text(label)}">{"".join(shapes)}</svg>'
    return f'<div>{picture}<div style="font-size:smaller">{html_text(label)}</div></div>'


def _line(points: Points, scale: Scale, colour: str) -> str:
    return f'<polyline points="{_places(points, scale)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


def _band(band: tuple[Points, Points], scale: Scale) -> str:
    low, high = band
    back: Points = (high[0][::-1], high[1][::-1])
    outline = f"{_places(low, scale)} {_places(back, scale)}"
    return f'<polygon points="{outline}" fill="{COLOURS[0]}" fill-opacity="0.18"/>'


def _places(points: Points, scale: Scale) -> str:
    first, last, lowest, highest = scale
    wide = (WIDTH - 2 * MARGIN) / max(last - first, 1e-9)
    tall = (HEIGHT - 2 * MARGIN) / max(highest - lowest, 1e-9)
    places = zip(*points, strict=True)
    return " ".join(f"{MARGIN + (x - first) * wide:.1f},{HEIGHT - MARGIN - (y - lowest) * tall:.1f}" for x, y in places)
