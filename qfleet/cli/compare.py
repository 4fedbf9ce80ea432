"""`qfleet compare`: scores of groups and runs with confidence intervals, and the probability that one is better."""

import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qfleet.cli.output import echo, echo_json, echo_table
from qfleet.cli.training import Out
from qfleet.errors import UsageError

if TYPE_CHECKING:
    from qfleet.watch.compare import Comparison

TITLES = {"mean": "mean", "median": "median", "iqm": "IQM", "optimality_gap": "gap"}


def compare(
    *sides: Annotated[str, Parameter(name="SIDE", help="A group, a run, or several of them: A,B,C.")],
    out: Out = "runs",
    normalize: Annotated[
        str | None, Parameter(help="TOML file with low and high of each environment; they become 0 and 1.")
    ] = None,
    threshold: Annotated[
        str | None, Parameter(help="Score that is good enough; adds the optimality gap below it.")
    ] = None,
    file: Annotated[
        str | None, Parameter(help="Picture of return over steps; plot.png in the group for one group.")
    ] = None,
    json: Annotated[bool, Parameter(help="Print all of it as JSON.", show_default=False)] = False,
) -> int:
    """Compare groups or runs: scores, aggregates with 95 % intervals, and how likely one beats another."""
    if not sides:
        raise UsageError("qfleet compare needs SIDE", "The argument SIDE is missing.", "Try: qfleet compare latest")
    found = _compare_sides(sides, out, normalize, _number("--threshold", threshold))
    picture = draw(found, Path(file)) if file is not None else draw_group(found)
    if json:
        echo_json({**found.as_dict(), "picture": None if picture is None else str(picture)})
        return 0
    echo_comparison(found)
    if picture is not None:
        echo("", f"plot   {picture}")
    return 0


def _compare_sides(sides: tuple[str, ...], out: str, normalize: str | None, threshold: float | None) -> "Comparison":
    from qfleet.watch.compare import compare as compared
    from qfleet.watch.compare import read_bounds

    bounds = None if normalize is None else read_bounds(normalize)
    return compared(*sides, out=out, normalize=bounds, threshold=threshold)


def report(group: Path, *, json: bool, quiet: bool) -> None:
    """Print the table and draw the plot of a group that has just ended, if any member has a score."""
    if quiet or json:
        return
    from qfleet.watch.compare import compare as compared

    with suppress(UsageError):  # no member was scored: the lines above already show why
        found = compared(group)
        echo()
        echo_comparison(found)
        if picture := draw_group(found):
            echo("", f"plot   {picture}")


def draw(found: "Comparison", file: Path) -> Path:
    """Plot return over steps of every side."""
    from qfleet.watch.plot import plot_sides

    return plot_sides({side.name: [run.path for run in side.runs] for side in found.sides}, file)


def draw_group(found: "Comparison") -> Path | None:
    """Plot a single group into its folder; failing to draw prints a note only, because no plot was requested."""
    from qfleet.watch.run_directory import is_group

    folder = found.sides[0].runs[0].path.parent
    if len(found.sides) > 1 or not is_group(folder) or any(run.path.parent != folder for run in found.sides[0].runs):
        return None
    try:
        return draw(found, folder / "plot.png")
    except UsageError as error:
        echo(f"note: no plot: {error.what}", to_stderr=True)
        return None


def echo_comparison(found: "Comparison") -> None:
    """Print runs, aggregates, probabilities of improvement and notes."""
    several = len(found.envs) > 1
    rows = [
        (run.name, *([run.env] if several else []), run.seed, _with_interval(run.score, run.low, run.high))
        for side in found.sides
        for run in side.runs
    ]
    echo_table(rows, ("run", *(["environment"] if several else []), "seed", "score [95 % of its episodes]"))
    echo()
    names = list(found.aggregates[found.sides[0].name])
    echo_table(
        [
            (side.name, len(side.runs), *(_with_interval(*found.aggregates[side.name][name]) for name in names))
            for side in found.sides
        ],
        (", ".join(found.envs), "runs", *(TITLES[name] for name in names)),
    )
    if found.improvements:
        echo()
    for (a, b), value in found.improvements.items():
        interval = "" if value.low is None else f" [{value.low:.2f}, {value.high:.2f}]"
        echo(f"P({a} > {b}) = {value.value:.2f}{interval}")
    for note in found.notes:
        echo(f"note: {note}")


def _with_interval(value: float, low: float | None, high: float | None) -> str:
    from qfleet.watch.text import number

    return f"{number(value)} [{number(low)}, {number(high)}]" if low is not None else number(value)


def _number(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise UsageError(
        f"{option} {text} is not valid", f"{option} must be a finite number.", f"Write for example {option} 475"
    )
