"""Drawings of a report as SVG: curves with bands, histograms, calibration. Colours come from the page's style."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 640
HEIGHT = 260
LEFT = 62
RIGHT = 14
TOP = 12
BOTTOM = 44
MOST_POINTS = 400
Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`, drawn between two places in pixels."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """The place of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin)

    def ticks(self, num: int = 5) -> list[float]:
        """Round values on it, about the wanted number."""
        step = round_step((self.high - self.low) / num)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def round_step(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(step))
    return next(power * each for each in (1, 2, 5, 10) if power * each >= step * (1 - 1e-9))


def axis(values: Sequence[float], begin: float, end: float, *, zero: bool = False) -> Axis:
    """An axis with room for all values; with `zero` it begins there."""
    low = min(values)
    high = max(values)
    if zero:
        low = min(0.0, low)
    room = (high - low) * 0.05 or max(abs(high), 1e-9) * 0.05
    return Axis(low if zero else low - room, high + room, begin, end)


def number_text(value: float) -> str:
    """A short number for a tick: 20k, 1.5M, 0.02."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (abs(value) >= size and unit == "M"):
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def frame(label: str, x: Axis, y: Axis, x_name: str, y_name: str, body: str) -> str:
    """A drawing with its axes, ticks and their names."""
    parts = [flat_line("grid", y.at(tick)) for tick in y.ticks()]
    parts += [text(LEFT - 8, y.at(tick) + 4, number_text(tick), "end") for tick in y.ticks()]
    parts += [text(x.at(tick), HEIGHT - BOTTOM + 18, number_text(tick), "middle") for tick in x.ticks(6)]
    parts.append(flat_line("axis", HEIGHT - BOTTOM))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_name, "middle", "name"))
    turned = f"translate(13 {(TOP + HEIGHT - BOTTOM) / 2:.1f}) rotate(-90)"
    parts.append(f'<text class="name" text-anchor="middle" transform="{turned}">{escape(y_name)}</text>')
    return figure(label, "".join(parts) + body)


def flat_line(style: str, y: float) -> str:
    """A line over the whole width."""
    return f'<line class="{style}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def bar(x: float, y: float, width: float, height: float) -> str:
    """A filled rectangle."""
    return f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def figure(label: str, body: str, height: int = HEIGHT) -> str:
    """An SVG with its description below it."""
    shown = escape(label)
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{shown}">{body}</svg>'
        f"<figcaption>{shown}</figcaption></figure>"
    )


def text(x: float, y: float, what: str, anchor: str, style: str = "tick") -> str:
    """A text."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(what)}</text>'


def no_drawing(label: str, why: str) -> str:
    """What stands in the place of a drawing without data."""
    return f'<p class="note">{escape(label)}: {escape(why)}</p>'


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most MOST_POINTS of the points, the last one too."""
    step = math.ceil(len(points) / MOST_POINTS) or 1
    return points if step == 1 else [*points[::step], points[-1]]


def curve(
    label: str,
    points: Sequence[Point],
    x_name: str,
    y_name: str,
    *,
    band: Sequence[tuple[float, float, float]] = (),
    marks: Sequence[tuple[float, str]] = (),
    level: tuple[float, str] | None = None,
) -> str:
    """A curve, with the intervals of its points as a band, marked places and a level to compare with."""
    points = thinned([(x, y) for x, y in points if math.isfinite(y)])
    if len(points) < 2:
        return no_drawing(label, "fewer than two points")
    heights = [y for _, y in points] + [each for _, *span in band for each in span]
    heights += [] if level is None else [level[0]]
    x = Axis(min(0.0, points[0][0]), points[-1][0], LEFT, WIDTH - RIGHT)
    y = axis([each for each in heights if math.isfinite(each)], HEIGHT - BOTTOM, TOP)
    body = band_shape(band, x, y) + line(points, x, y)
    if len(points) <= 60:
        body += "".join(f'<circle class="point" cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="2.6"/>' for a, b in points)
    for place, name in marks:
        at = x.at(place)
        anchor = "end" if at > WIDTH / 2 else "start"
        body += f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        body += text(at + (-5 if anchor == "end" else 5), TOP + 11, name, anchor, "mark-name")
    if level is not None:
        at = y.at(level[0])
        body += flat_line("level", at)
        body += text(WIDTH - RIGHT - 4, at - 5, level[1], "end", "level-name")
    return frame(label, x, y, x_name, y_name, body)


def line(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """The line through the points."""
    drawn = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in points)
    return f'<polyline class="curve" points="{drawn}"/>'


def band_shape(band: Sequence[tuple[float, float, float]], x: Axis, y: Axis) -> str:
    """The area between two curves."""
    known = [each for each in band if all(map(math.isfinite, each))]
    if len(known) < 2:
        return ""
    upper = [(at, high) for at, _, high in known]
    lower = [(at, low) for at, low, _ in reversed(known)]
    drawn = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in [*upper, *lower])
    return f'<polygon class="band" points="{drawn}"/>'


def histogram(label: str, edges: Sequence[float], counts: Sequence[int], x_name: str, y_name: str) -> str:
    """Bars between edges."""
    if not counts or not sum(counts):
        return no_drawing(label, "there is nothing to count")
    x = Axis(edges[0], max(edges[-1], edges[0] + 1e-9), LEFT, WIDTH - RIGHT)
    y = axis([0.0, *counts], HEIGHT - BOTTOM, TOP, zero=True)
    body = ""
    for begin, end, count in zip(edges[:-1], edges[1:], counts, strict=True):
        left = x.at(begin) + 0.5
        width = max(0.5, x.at(end) - x.at(begin) - 1)
        top = y.at(count)
        body += (
            f'<rect class="bar" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{HEIGHT - BOTTOM - top:.1f}"/>'
        )
    return frame(label, x, y, x_name, y_name, body)


def shares(label: str, names: Sequence[str], values: Sequence[float]) -> str:
    """Horizontal bars of shares of 1, with their names."""
    if not values:
        return no_drawing(label, "they were not counted")
    row = 24
    longest = max(values) or 1.0
    body = ""
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        top = number * row + 4
        width = value / longest * (WIDTH - LEFT - RIGHT - 150)
        body += text(LEFT + 34, top + 14, name, "end")
        body += bar(LEFT + 42, top, width, row - 8)
        body += text(LEFT + 50 + width, top + 13, f"{value:.1%}", "start")
    return figure(label, body, len(values) * row + 8)


def calibration(label: str, groups: Sequence[Point], x_name: str, y_name: str) -> str:
    """Points beside the diagonal on which both numbers are equal."""
    known = [(a, b) for a, b in groups if math.isfinite(a) and math.isfinite(b)]
    if len(known) < 2:
        return no_drawing(label, "fewer than two groups")
    numbers = [each for point in known for each in point]
    x = axis(numbers, LEFT, WIDTH - RIGHT)
    y = axis(numbers, HEIGHT - BOTTOM, TOP)
    body = f'<line class="level" x1="{x.begin}" y1="{y.begin}" x2="{x.end}" y2="{y.end}"/>'
    body += "".join(f'<circle class="point" cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="5"/>' for a, b in known)
    return frame(label, x, y, x_name, y_name, body)
