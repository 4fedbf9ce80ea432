"""Curves of one run or several as a picture; needs the extra `plot`. No window, no global state."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from qfleet.data.types import Array
from qfleet.errors import UsageError
from qfleet.escape import escaped
from qfleet.install import install_command
from qfleet.plan.local_paths import local_path
from qfleet.watch.read_files import each_row
from qfleet.watch.run_files import Row, write_file
from qfleet.watch.run_listing import read_tables
from qfleet.watch.statistics import NUM_RESAMPLES, estimate, iqm
from qfleet.watch.text import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinguishable with any colour vision and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
FORMATS = {".png", ".svg", ".pdf"}
MOST_POINTS = 200  # of a curve with an interval at each
LARGEST_DRAWN = 1e30
MOST_CHARACTERS = 200  # of a name in a picture
MOST_ROWS_KEPT = 100_000  # of a run: more than a picture can show
DRAWN = ("kind", "split", "env_steps", "checkpoint", "loss", "steps_per_second", "return_mean", "mean", "low", "high")
MORE_DRAWN = ("info.", "callback.")  # names that begin so have a panel each
MOST_PANELS = 8  # of these
MOST_NAMES_KEPT = 64  # of a run
LENGTH = "length_mean"
Points = tuple[list[float], list[float]]  # steps, returns
INK = "#333333"
PALE = "#E6E6E6"
STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": PALE,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "qfleet",
}


def plot_runs(paths: Sequence[Path | str], file: Path | str) -> Path:
    """Draw return (with the 95 % interval of each evaluation), loss and speed of the runs into `file`.

    Below them are the lengths of episodes, numbers of `log.info` and metrics of callbacks, a panel each.
    """
    target = _target(local_path(file))
    return _save(target, figure_of_runs(paths))


def figure_of_runs(paths: Sequence[Path | str]) -> "Figure":
    """The same as a figure of matplotlib, which a notebook shows."""
    runs = {name: curve_rows(Path(path)) for name, path in _labels(paths).items()}
    height = 9 + 2.25 * len(_more_names(runs))
    return _figure((12, height), lambda figure: _draw(figure, runs, _title(paths)))


def plot_sides(sides: Mapping[str, Sequence[Path]], file: Path | str) -> Path:
    """Draw the return of each side over steps: IQM over its runs with the 95 % interval, a panel per environment."""
    target = _target(local_path(file))
    return _save(target, figure_of_sides(sides))


def figure_of_sides(sides: Mapping[str, Sequence[Path]]) -> "Figure":
    """The same as a figure of matplotlib, which a notebook shows."""
    panels: dict[str, dict[str, list[Points]]] = {}
    for name, paths in sides.items():
        for path in paths:
            points = curve(curve_rows(path), "eval", "mean")
            if points[0]:
                panels.setdefault(_env_id(path), {}).setdefault(name, []).append(points)
    if not panels:
        raise UsageError(
            f"{', '.join(sides)} cannot be drawn", "no run was evaluated yet", "let them train for eval.every_steps"
        )
    return _figure((10 * len(panels), 6), lambda figure: _draw_panels(figure, panels))


def _figure(size: tuple[float, float], draw: Callable[["Figure"], None]) -> "Figure":
    """A figure that is in no list of pyplot's, so nothing keeps it alive."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise UsageError(
            "plots need the package matplotlib", f"it cannot be imported: {error}", install_command("plot")
        ) from error
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=100, layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.15))
        draw(figure)
    # A notebook asks for this. pyplot would register a way to show figures, but only once it is imported.
    setattr(figure, "_repr_png_", lambda: picture_bytes(figure, "png"))  # noqa: B010
    return figure


def picture_bytes(figure: "Figure", ending: str) -> bytes:
    """A figure as the bytes of a file: png, svg or pdf."""
    import matplotlib as mpl

    picture = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(picture, format=ending)
    return picture.getvalue()


def draw_runs(paths: Sequence[Path | str], file: Path | str | None = None) -> "Figure":
    """The figure of runs, saved as well if there is a `file`."""
    target = None if file is None else _target(local_path(file))
    figure = figure_of_runs(paths)
    if target is not None:
        _save(target, figure)
    return figure


def draw_sides(sides: Mapping[str, Sequence[Path]], file: Path | str | None = None) -> "Figure":
    """The figure of several sides, saved as well if there is a `file`."""
    target = None if file is None else _target(local_path(file))
    figure = figure_of_sides(sides)
    if target is not None:
        _save(target, figure)
    return figure


def _save(target: Path, figure: "Figure") -> Path:
    write_file(target, picture_bytes(figure, target.suffix[1:].lower()))
    return target


def _target(file: Path) -> Path:
    if file.suffix.lower() in FORMATS and file.parent.is_dir():
        return file
    why = "its folder does not exist" if file.suffix.lower() in FORMATS else "the end of the name chooses the format"
    raise UsageError(
        f"cannot draw into {file}", why, "give a name like curves.png (or .svg, .pdf) in a folder that exists"
    )


def _labels(paths: Sequence[Path | str]) -> dict[str, Path | str]:
    """Run names as labels; whole paths where two runs share a name."""
    if not paths:
        raise UsageError("there is nothing to plot", "no run was named", "name one: qfleet plot latest")
    names = [Path(path).resolve().name for path in paths]
    known = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    return dict(zip(map(_text, known), paths, strict=True))


def curve_rows(path: Path) -> list[Row]:
    """The rows that curves are made of; of a long run every second, or fewer."""
    rows: list[Row] = []
    more = {LENGTH: None}  # a dict: an ordered set
    for row in each_row(path / "metrics.jsonl"):
        if row.get("kind") in ("progress", "eval"):
            found = [name for name in row if name.startswith(MORE_DRAWN) and name not in more]
            more |= dict.fromkeys(found[: MOST_NAMES_KEPT - len(more)])
            rows.append({name: row[name] for name in (*DRAWN, *more) if name in row})
        if len(rows) > MOST_ROWS_KEPT:
            rows = rows[::2]  # every second one: the curve keeps its shape
    if not rows:
        raise UsageError(
            f"the run {path} has nothing to plot yet",
            f"there is no row in {path / 'metrics.jsonl'}",
            "let it train a little longer, or name another run: qfleet runs",
        )
    return rows


def _title(paths: Sequence[Path | str]) -> str:
    ids = [env_id for path in paths if (env_id := _env_id(Path(path)))]
    names = [_text(Path(paths[0]).resolve().name)] if len(paths) == 1 else []
    return " · ".join([*dict.fromkeys(ids), *names])


def _text(text: str) -> str:
    """A name as matplotlib shall draw it, with $ escaped, which would begin mathematics."""
    return escaped(text)[:MOST_CHARACTERS].replace("$", r"\$")


def _env_id(path: Path) -> str:
    """The environment of a run, or "" if its plan cannot be read."""
    try:
        return _text(str(read_tables(path)["env"]["id"]))
    except (UsageError, KeyError, TypeError):
        return ""


def _kind(row: Row) -> str:
    """The row's kind; "test" for an evaluation on test episodes."""
    return "test" if row.get("split") == "test" else str(row.get("kind"))


def curve(rows: list[Row], kind: str, field: str, at: str = "env_steps") -> Points:
    """Steps and values of one field; rows without a number there are left out."""
    points = [(row.get(at, row.get("env_steps")), row.get(field)) for row in rows if _kind(row) == kind]
    kept = [(float(x), float(y)) for x, y in points if _is_drawable(x) and _is_drawable(y)]
    return [x for x, _ in kept], [y for _, y in kept]


def _is_drawable(value: object) -> TypeGuard[float]:
    """Is it a number that fits on an axis?"""
    return isinstance(value, int | float) and abs(value) < LARGEST_DRAWN


def _more_names(runs: dict[str, list[Row]]) -> list[str]:
    """The names of numbers that have a panel of their own: lengths first, then in the order in which they appear."""
    names = dict.fromkeys(
        name
        for rows in runs.values()
        for row in rows
        for name in row
        if name.startswith((LENGTH, *MORE_DRAWN)) and _is_drawable(row[name])
    )
    return sorted(names, key=lambda name: name != LENGTH)[:MOST_PANELS]


def _draw_more(axes: "Axes", runs: dict[str, list[Row]], name: str) -> None:
    """Draw one number: a thin line of training episodes, a thick one with dots of evaluations."""
    for index, rows in enumerate(runs.values()):
        colour = COLOURS[index % len(COLOURS)]
        line = "-" if index < len(COLOURS) else "--"
        axes.plot(*curve(rows, "progress", name), color=colour, linestyle=line, linewidth=1.2)
        axes.plot(*curve(rows, "eval", name), color=colour, linestyle=line, linewidth=2.2, marker="o", markersize=4)
    _label(axes, "episode length" if name == LENGTH else _text(name))


def _draw(figure: "Figure", runs: dict[str, list[Row]], title: str) -> None:
    names = _more_names(runs)
    grid: Any = figure.subplots(3 + len(names), 1, sharex=True, height_ratios=(2, 1, 1, *(1 for _ in names)))
    returns, loss, speed, *more = grid
    for axes, name in zip(more, names, strict=True):
        _draw_more(axes, runs, name)
    for index, (name, rows) in enumerate(runs.items()):
        colour = COLOURS[index % len(COLOURS)]
        line = "-" if index < len(COLOURS) else "--"
        _draw_returns(returns, rows, name, colour, line, alone=len(runs) == 1)
        loss.plot(*curve(rows, "progress", "loss"), color=colour, linestyle=line, linewidth=1.2)
        speed.plot(*curve(rows, "progress", "steps_per_second"), color=colour, linestyle=line, linewidth=1.2)
    _label(returns, "return")
    _label(loss, "loss")
    _label(speed, "steps per second")
    _scale(loss, runs)
    speed.set_ylim(bottom=0)
    _steps_axis(speed, grid[-1])
    figure.align_ylabels()
    returns.set_title(title, loc="left", fontweight="bold", pad=14)
    returns.legend(loc="best", ncols=1 + len(runs) // 8)


def _draw_returns(axes: "Axes", rows: list[Row], name: str, colour: str, line: str, *, alone: bool) -> None:
    training = "training episodes" if alone else None
    axes.plot(*curve(rows, "progress", "return_mean"), color=colour, linewidth=0.9, alpha=0.45, label=training)
    steps, means = curve(rows, "eval", "mean")
    label = "evaluation, 95 % interval" if alone else name
    axes.plot(steps, means, color=colour, linestyle=line, linewidth=2.2, marker="o", markersize=4, label=label)
    below, low = curve(rows, "eval", "low")
    above, high = curve(rows, "eval", "high")
    if below == above == steps:
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
    if alone and steps:
        _draw_last(axes, steps, means, colour)
    _draw_test(axes, rows, colour, alone=alone)


def _draw_test(axes: "Axes", rows: list[Row], colour: str, *, alone: bool) -> None:
    """Draw the reported score as a star with its interval, at the step of its checkpoint."""
    steps, means = curve(rows, "test", "mean", at="checkpoint")
    (below, low), (above, high) = (curve(rows, "test", field, at="checkpoint") for field in ("low", "high"))
    if not steps or not below == above == steps:
        return
    spans = [
        [max(0.0, mean - bound) for mean, bound in zip(means, low, strict=True)],
        [max(0.0, bound - mean) for mean, bound in zip(means, high, strict=True)],
    ]
    label = f"test episodes{_chosen_from(rows)}, 95 % interval" if alone else None
    star: dict[str, Any] = {
        "marker": "*",
        "markersize": 15,
        "markeredgecolor": INK,
        "markeredgewidth": 0.8,
        "zorder": 5,
    }
    axes.errorbar(steps, means, spans, fmt="none", ecolor=INK, elinewidth=1.4, capsize=4, zorder=4)
    axes.plot(steps, means, color=colour, linestyle="", label=label, **star)


def _chosen_from(rows: list[Row]) -> str:
    """How many validations the tested policy was chosen from, for the label."""
    counts = [row.get("best_of") for row in rows if _kind(row) == "test"]
    return f" of the best of {counts[-1]} validations" if counts and isinstance(counts[-1], int) else ""


def _draw_last(axes: "Axes", steps: list[float], means: list[float], colour: str) -> None:
    """Draw a ring around the last evaluation, to compare with the best one."""
    ring: dict[str, Any] = {
        "marker": "o",
        "markersize": 11,
        "markerfacecolor": "none",
        "markeredgewidth": 1.6,
        "linestyle": "",
    }
    label = f"last evaluation: {number(means[-1])}"
    axes.plot(steps[-1:], means[-1:], color=colour, markeredgecolor=colour, label=label, **ring)


def _label(axes: "Axes", text: str) -> None:
    axes.set_ylabel(text)
    axes.tick_params(length=0)
    axes.margins(x=0.01)


def _scale(axes: "Axes", runs: dict[str, list[Row]]) -> None:
    """Use a logarithmic axis if the loss is positive and spans more than a factor of a hundred."""
    losses = [value for rows in runs.values() for value in curve(rows, "progress", "loss")[1] if math.isfinite(value)]
    if losses and min(losses) > 0 and max(losses) > 100 * min(losses):
        axes.set_yscale("log")


def _steps_axis(axes: "Axes", lowest: "Axes | None" = None) -> None:
    """Format the axes; the steps are named below the lowest panel."""
    from matplotlib.ticker import EngFormatter, StrMethodFormatter

    (lowest or axes).set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


# --- runs side by side ---


def _draw_panels(figure: "Figure", panels: dict[str, dict[str, list[Points]]]) -> None:
    grid: Any = figure.subplots(1, len(panels), squeeze=False)
    names = list(dict.fromkeys(name for sides in panels.values() for name in sides))
    for axes, (env, sides) in zip(grid[0], panels.items(), strict=True):
        for name, curves in sides.items():
            _draw_side(axes, curves, name, COLOURS[names.index(name) % len(COLOURS)])
        _label(axes, "return")
        _steps_axis(axes)
        axes.set_title(env, loc="left", fontweight="bold", pad=14)
        axes.legend(loc="best")


def _draw_side(axes: "Axes", curves: list[Points], name: str, colour: str) -> None:
    """Draw each run as a thin line, their IQM as a thick one, and its interval as a band."""
    for curve in curves:
        axes.plot(*curve, color=colour, linewidth=0.8, alpha=0.4)
    steps, values = aligned(curves)
    found = [estimate(iqm, column[:, None], resamples=NUM_RESAMPLES) for column in values.T]
    runs = f"{len(curves)} run{'s' * (len(curves) > 1)}"
    content = f"IQM of {runs}, 95 % interval" if len(curves) > 1 else runs
    middle = [each.value for each in found]
    axes.plot(steps, middle, color=colour, linewidth=2.2, marker="o", markersize=4, label=f"{_text(name)} ({content})")
    low = [each.low for each in found]
    high = [each.high for each in found]
    if len(curves) > 1:
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)  # type: ignore[arg-type]


def aligned(curves: Sequence[Points]) -> tuple[Array, Array]:
    """Curves at common steps: steps [P], values [runs, P].

    At each step a run counts with its newest evaluation. A run that ended early because it reached its score keeps its
    last one: leaving it out would bias the curve towards runs that still learn.
    """
    first = max(steps[0] for steps, _ in curves)
    every = np.unique([step for steps, _ in curves for step in steps if step >= first])
    # Runs are evaluated at nearly, not exactly, the same steps: of steps close together only the last is kept.
    gaps = [gap for steps, _ in curves for gap in np.diff(steps)]
    every = every[np.append(np.diff(every) > np.median(gaps) / 2 if gaps else np.diff(every) > 0, True)]
    if len(every) > MOST_POINTS:
        every = every[np.linspace(0, len(every) - 1, MOST_POINTS).round().astype(int)]
    rows = [np.asarray(values)[np.searchsorted(steps, every, side="right") - 1] for steps, values in curves]
    return every, np.stack(rows)
