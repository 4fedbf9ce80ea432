"""Learning measured on a grid of tasks, presets and seeds: runs by the command line, tables, curves, pictures.

Runs are long, so a grid is made in pieces: what `benchmarks/results/NAME.json` holds already, made by the same plan,
is kept unless `--again` is given; and a run that was cut short is resumed, exactly, from where it lies in `runs/bench`.
"""

import argparse
import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, report
from qfleet.watch import read_rows

UNFINISHED = report.ROOT / "runs" / "bench"
STEPS = "until.steps="
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass(frozen=True)
class Cell:
    """One task with one preset, the score asked for (None: only reported), and settings of its own."""

    env: str
    preset: str
    bar: float | None = None
    settings: tuple[str, ...] = ()
    title: str = ""
    most_seeds: int = 1_000  # where a run is dear

    @property
    def name(self) -> str:
        """What the tables call it."""
        return self.title or self.env


@dataclass(frozen=True)
class Grid:
    """A benchmark: its cells, and what stands around the table."""

    name: str
    heading: str
    cells: tuple[Cell, ...]
    seeds: int
    limit_seconds: float = 14_400.0
    notes: str = ""
    # Published points (steps, score) by task, drawn beside our curves.
    published: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    columns: int = 2
    jobs: int = 2  # runs at the same time, of one core each
    pages: tuple[str, ...] = ("results.md",)  # in docs/


@dataclass(frozen=True)
class Run:
    """One cell with one seed."""

    env: str
    preset: str
    settings: tuple[str, ...]
    seed: int
    mean: float | None
    low: float | None
    high: float | None
    env_steps: int | None
    updates: int | None
    seconds: float
    exit_code: int | None
    curve: list[tuple[int, float]]  # validation: (steps, mean)
    errors: str = ""

    @property
    def key(self) -> tuple[str, str, tuple[str, ...], int]:
        """What makes it the same run."""
        return self.env, self.preset, tuple(self.settings), self.seed


def train(cell: Cell, seed: int, extra: Sequence[str], limit_seconds: float) -> Run:
    """Train by the command line, exactly as a user does, and read score and curve from its rows."""
    asked = (*cell.settings, *extra)
    folder = unfinished(cell, seed, asked)
    done = command.run(train_or_resume(cell, seed, asked, folder), limit_seconds)
    judged = [row for path in folder.glob("*/metrics.jsonl") for row in read_rows(path) if row["kind"] == "eval"]
    score: dict[str, Any] = next((row for row in judged if row["split"] == "test"), {})
    rows = [row for row in judged if row["split"] == "validation"]
    if done.exit_code == 0:
        shutil.rmtree(folder)
    run = Run(
        cell.env,
        cell.preset,
        (*cell.settings, *extra),
        seed,
        *(score.get(name) for name in ("mean", "low", "high", "env_steps", "updates")),
        seconds=round(max(done.seconds, score.get("seconds", 0.0)), 1),  # of all pieces, if there were several
        exit_code=done.exit_code,
        curve=[(row["env_steps"], round(row["mean"], 3)) for row in rows],
        errors=done.errors if done.exit_code else "",
    )
    print(f"{cell.name} {cell.preset} seed {seed}: {report.shown(run.mean)} after {run.env_steps} steps", flush=True)
    return run


def unfinished(cell: Cell, seed: int, asked: Sequence[str]) -> Path:
    """Where a run lies until it is done. A longer one begins like a shorter one, so how long it is does not matter."""
    words = "\n".join(word for word in asked if not word.startswith(STEPS))
    name = re.sub(r"\W+", "-", f"{cell.env}-{cell.preset}-{seed}")
    return UNFINISHED / f"{name}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"


def train_or_resume(cell: Cell, seed: int, asked: Sequence[str], folder: Path) -> list[str]:
    """The command that begins a run, or goes on with one that was cut short."""
    if begun := next(folder.glob("*/checkpoints"), None):
        steps = [word.removeprefix(STEPS) for word in asked if word.startswith(STEPS)]
        return command.qfleet("resume", str(begun.parent), "--json", *(["--steps", *steps] if steps else []))
    flags = ["--preset", cell.preset, "--seed", str(seed), "--json", "--out", str(folder)]
    threads = [] if any(word.startswith("runtime.threads=") for word in asked) else ["runtime.threads=1"]
    return command.qfleet("train", cell.env, *flags, *threads, *asked)


def kept(path: Path) -> dict[Any, Run]:
    """Runs that an earlier piece has made, without those that failed."""
    if not path.exists():
        return {}
    found = [Run(**{**run, "settings": tuple(run["settings"])}) for run in json.loads(path.read_text())["runs"]]
    return {run.key: run for run in found if run.exit_code == 0}


def judge(cell: Cell, runs: list[Run]) -> dict[str, Any]:
    """The cell's line: mean over seeds with its interval, every seed, and whether the bar was met."""
    means = [run.mean for run in runs if run.mean is not None]
    low, high = report.interval(means) if means else (None, None)
    mean = sum(means) / len(means) if means else None
    return {
        "task": cell.name,
        "preset": cell.preset,
        "bar": cell.bar,
        "mean": mean,
        "low": low,
        "high": high,
        "seeds": [run.mean for run in runs],
        "most_steps": max((run.env_steps or 0 for run in runs), default=0),
        "most_updates": max((run.updates or 0 for run in runs), default=0),
        "seconds": float(np.median([run.seconds for run in runs])) if runs else None,
        "passed": None if cell.bar is None else sum(score >= cell.bar for score in means),
        "met": None if cell.bar is None else bool(means) and mean is not None and mean >= cell.bar,
    }


def markdown(lines: list[dict[str, Any]]) -> str:
    """The verdicts as a table."""
    heads = (
        "task",
        "preset",
        "bar",
        "mean of seeds",
        "95 % interval",
        "each seed",
        "steps",
        "updates",
        "seconds",
        "met by",
    )
    body = [
        (
            line["task"],
            f"`{line['preset']}`",
            None if line["bar"] is None else f">= {line['bar']:g}",
            line["mean"],
            None if line["low"] is None else f"{report.shown(line['low'])} to {report.shown(line['high'])}",
            ", ".join(report.shown(mean) for mean in line["seeds"]),
            f"{line['most_steps']:,}",
            f"{line['most_updates']:,}",
            None if line["seconds"] is None else f"{line['seconds']:,.0f}",
            None if line["passed"] is None else f"{line['passed']} of {len(line['seeds'])}",
        )
        for line in lines
    ]
    return report.table(heads, body)


def picture(grid: Grid, runs: dict[Cell, list[Run]], path: Path) -> None:
    """Validation curves, a panel per task: the mean over seeds and the band of all of them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(cell.name for cell in runs))
    rows = -(-len(tasks) // grid.columns)
    size = (5.5 * min(grid.columns, len(tasks)), 3.6 * rows)
    figure, axes = pyplot.subplots(rows, min(grid.columns, len(tasks)), figsize=size, squeeze=False)
    for panel, task in zip(axes.flat, tasks, strict=False):
        cells = [cell for cell in runs if cell.name == task]
        for colour, cell in zip(COLOURS * 9, cells, strict=False):
            draw(panel, [run.curve for run in runs[cell] if run.curve], cell.preset, colour)
        if points := grid.published.get(task):
            panel.plot(*zip(*points, strict=True), "k--o", markersize=3, label="published DQN")
        panel.set(title=task, xlabel="environment steps", ylabel="return")
        panel.legend(fontsize=7)
    for panel in axes.flat[len(tasks) :]:
        panel.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw(panel: Any, curves: list[list[tuple[int, float]]], label: str, colour: str) -> None:
    """One line with its band; seeds that ended early keep their last value."""
    if not curves:
        return
    steps = np.unique([step for curve in curves for step, _ in curve])
    values = np.array([np.interp(steps, *zip(*curve, strict=True)) for curve in curves])
    panel.plot(steps, values.mean(0), color=colour, label=label, linewidth=1.2)
    panel.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)


def main(grid: Grid, description: str | None) -> None:
    """Train what is missing, print the table, save it and put it into the documents."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--preset", action="append", help="only this one (repeatable)")
    parser.add_argument("--env", action="append", help="only this one (repeatable)")
    parser.add_argument("--seeds", type=int, default=grid.seeds)
    parser.add_argument("--jobs", type=int, default=grid.jobs, help="runs at the same time, one core each")
    parser.add_argument("--again", action="store_true", help="make runs anew that are there already")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the results")
    parser.add_argument("extra", nargs="*", metavar="path=value", help="plan settings for every run")
    given = parser.parse_args()
    wanted = [
        cell
        for cell in grid.cells
        if (not given.preset or cell.preset in given.preset) and (not given.env or cell.env in given.env)
    ]
    fill(grid, wanted, given)


def fill(grid: Grid, wanted: list[Cell], given: argparse.Namespace) -> None:
    """Make the runs that are missing, saving after each, then publish."""
    path, seeds, extra = given.out / f"{grid.name}.json", range(1, given.seeds + 1), tuple(given.extra)
    have = kept(path)
    pairs = [(cell, seed) for seed in seeds for cell in wanted if seed <= cell.most_seeds]
    missing = [(c, s) for c, s in pairs if given.again or (c.env, c.preset, (*c.settings, *extra), s) not in have]
    for cell, seed in missing if given.again else ():
        shutil.rmtree(unfinished(cell, seed, (*cell.settings, *extra)), ignore_errors=True)
    with ThreadPoolExecutor(given.jobs) as pool:
        for run in pool.map(lambda pair: train(*pair, extra, grid.limit_seconds), missing):
            have[run.key] = run
            write(grid, have, given.out, extra)
    write(grid, have, given.out, extra)
    if given.out == report.RESULTS and not extra:
        publish(grid)


def write(grid: Grid, have: dict[Any, Run], folder: Path, extra: tuple[str, ...] = ()) -> None:
    """Table, data and picture of every run there is with these extra settings."""
    found = {cell: runs_of(cell, have, extra) for cell in grid.cells}
    groups = {cell: runs for cell, runs in found.items() if runs}
    lines = [judge(cell, runs) for cell, runs in groups.items()]
    record = {"command": f"scripts/bench {grid.name}", "summary": lines, "runs": [asdict(run) for run in have.values()]}
    report.save(grid.name, record, markdown(lines), folder)
    if groups:
        picture(grid, groups, folder / f"{grid.name}.png")


def runs_of(cell: Cell, have: dict[Any, Run], extra: tuple[str, ...]) -> list[Run]:
    """A cell's runs in the order of their seeds."""
    wanted = (cell.env, cell.preset, (*cell.settings, *extra))
    return sorted((run for run in have.values() if run.key[:3] == wanted), key=lambda run: run.seed)


def publish(grid: Grid) -> None:
    """The table and the picture on the grid's pages."""
    table = (report.RESULTS / f"{grid.name}.md").read_text(encoding="utf-8").partition("\n\n")[2]
    shown = f"![curves](../benchmarks/results/{grid.name}.png)"
    body = f"## {grid.heading}\n\n`scripts/bench {grid.name}`: {table}\n{shown}\n\n{grid.notes}"
    for page in grid.pages:
        report.replace_section(report.PAGE.with_name(page), grid.name, body)
