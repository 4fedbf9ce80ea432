"""Compare runs or groups: their scores, confidence intervals, and the probability that one side is better.

A side is a group, a run, or several of them. Its scores are those on test episodes, one per run, as [runs, envs].
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qfleet.data.types import Array
from qfleet.errors import UsageError
from qfleet.plan import read_toml
from qfleet.watch.read_files import read_json
from qfleet.watch.run_directory import GROUP_FILE, find_run_or_group, is_group, is_run, run_label, runs_in
from qfleet.watch.run_listing import read_tables
from qfleet.watch.statistics import (
    Estimate,
    Statistic,
    estimate,
    iqm,
    mean,
    median,
    median_run,
    optimality_gap,
    probability_of_improvement,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bounds = Mapping[str, tuple[float, float]]  # env id -> the scores that become 0 and 1


class ScoredRun(NamedTuple):
    """One run and its score on test episodes: the mean, and the 95 % interval of that mean over its episodes."""

    name: str
    path: Path
    env: str
    seed: int
    score: float
    low: float | None
    high: float | None
    of_best: bool = True  # False: its best checkpoint could not be read, and the last weights were tested


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its runs, and members of its groups that have no score yet."""

    name: str
    runs: tuple[ScoredRun, ...]
    missing: tuple[str, ...] = ()

    @property
    def envs(self) -> tuple[str, ...]:
        """The environments it was tested in."""
        return tuple(sorted({run.env for run in self.runs}))

    def scores(self, bounds: Bounds | None = None) -> Array:
        """Scores [runs, envs], raw or normalised by the bounds."""
        columns = [[run.score for run in self.runs if run.env == env] for env in self.envs]
        raw = np.array(columns, dtype=np.float64).T
        if bounds is None:
            return raw
        low, high = np.array([bounds[env] for env in self.envs], dtype=np.float64).T
        return np.asarray((raw - low) / (high - low))


@dataclass(frozen=True)
class Comparison:
    """Aggregates of each side with intervals, and for each pair the probability that the first beats the second."""

    sides: tuple[Side, ...]
    normalized: bool
    threshold: float | None
    aggregates: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    improvements: dict[tuple[str, str], Estimate] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def envs(self) -> tuple[str, ...]:
        """The environments of every side."""
        return self.sides[0].envs

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON data."""
        return {
            "envs": list(self.envs),
            "normalized": self.normalized,
            "threshold": self.threshold,
            "sides": [
                {
                    "name": side.name,
                    "runs": [{**run._asdict(), "path": str(run.path)} for run in side.runs],
                    "missing": list(side.missing),
                    **{name: value._asdict() for name, value in self.aggregates[side.name].items()},
                }
                for side in self.sides
            ],
            "improvements": [{"a": a, "b": b, **value._asdict()} for (a, b), value in self.improvements.items()],
            "notes": list(self.notes),
        }

    def plot(self, file: Path | str | None = None) -> "Figure":
        """The return of each side over steps as a figure of matplotlib; `file` saves it as well."""
        from qfleet.watch.plot import draw_sides

        return draw_sides({side.name: [run.path for run in side.runs] for side in self.sides}, file)

    def _repr_html_(self) -> str:
        """The aggregates as a table in a notebook."""
        from qfleet.watch.notebook.run_html import comparison_html

        return comparison_html(self)


def compare(
    *names: str | Path,
    out: Path | str = "runs",
    normalize: Bounds | None = None,
    threshold: float | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare groups or runs by their test scores, with intervals.

    Args:
        names: the sides; each is a group, a run, or a comma-separated list of them.
        out: the folder in which a name is looked for.
        normalize: for each environment's id the two scores that become 0 and 1.
        threshold: a score; the optimality gap, how far runs stay below it, is added.
        seed: draws the resamples of the intervals.

    Returns:
        Aggregates of each side, and for each pair the probability that the first is better.
    """
    sides = tuple(read_side(name, out) for name in names)
    _check(sides, normalize)
    scores = {side.name: side.scores(normalize) for side in sides}
    statistics = _statistics(len(sides[0].envs), threshold)
    return Comparison(
        sides,
        normalize is not None,
        threshold,
        {
            name: {title: estimate(statistic, values, seed=seed) for title, statistic in statistics.items()}
            for name, values in scores.items()
        },
        {
            (a, b): estimate(probability_of_improvement, scores[a], scores[b], seed=seed)
            for a, b in combinations(scores, 2)
        },
        tuple(_notes(sides)),
    )


def _statistics(num_envs: int, threshold: float | None) -> dict[str, Statistic]:
    # The median of environments' means is customary; with one environment it would equal the mean.
    found: dict[str, Statistic] = {"mean": mean, "median": median if num_envs > 1 else median_run, "iqm": iqm}
    if threshold is not None:
        gap: Callable[[Array], Array] = lambda scores: optimality_gap(scores, threshold)  # noqa: E731
        found["optimality_gap"] = gap
    return found


# --- sides ---


def read_side(name: str | Path, out: Path | str = "runs") -> Side:
    """The runs of a side with their scores."""
    entries = _entries(str(name), out)
    if not entries:
        raise UsageError(
            f"{str(name)!r} names nothing to compare",
            "a side is a group, a run, or several of them with commas between",
            "list them with: qfleet runs",
        )
    runs: list[ScoredRun] = []
    missing: list[str] = []
    for entry in entries:
        scored = [_scored(path) for path in runs_in(entry)]
        runs += [each for each in scored if each is not None]
        missing += _missing(entry, {each.name for each in scored if each is not None})
        if not any(scored):
            raise _without_score(entry)
    _refuse_duplicates(runs)
    return Side(",".join(run_label(entry) for entry in entries), tuple(runs), tuple(missing))


def _entries(name: str, out: Path | str) -> list[Path]:
    """The runs and groups of a side; a path may contain commas."""
    if is_run(Path(name)) or is_group(Path(name)):
        return [Path(name)]
    return [find_run_or_group(part.strip(), out) for part in name.split(",") if part.strip()]


def _scored(path: Path) -> ScoredRun | None:
    status = read_json(path / "status.json")
    score = status.get("score")
    plan = read_tables(path)
    env = plan.get("env")
    if not isinstance(score, Mapping) or not isinstance(env, Mapping):
        return None
    mean, low, high = (_finite(score.get(key)) for key in ("mean", "low", "high"))
    if mean is None:
        return None
    of_best = score.get("which") != "latest" or status.get("best") is None
    return ScoredRun(run_label(path), path, str(env.get("id")), int(plan.get("seed", 0)), mean, low, high, of_best)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _missing(entry: Path, scored: set[str]) -> list[str]:
    """Members of a group, started or not, that have no score."""
    members = read_json(entry / GROUP_FILE).get("members")
    names = [f"{entry.name}/{each.get('name')}" for each in members or () if isinstance(each, Mapping)]
    return [name for name in names if name not in scored]


def _without_score(entry: Path) -> UsageError:
    problem = f"no member of {run_label(entry)} has a score" if is_group(entry) else f"{run_label(entry)} has no score"
    return UsageError(
        problem,
        "a run is scored on test episodes when it has reached its end, unless eval.test_episodes is 0",
        f"let it come to its end: qfleet resume {entry}",
    )


def _refuse_duplicates(runs: Sequence[ScoredRun]) -> None:
    seen: set[Path] = set()
    for run in runs:
        if (where := run.path.resolve()) in seen:
            raise UsageError(
                f"{run.name} is on one side twice",
                "counted twice it would look like two runs with equal scores",
                "name it once",
            )
        seen.add(where)


# --- checks ---


def _check(sides: tuple[Side, ...], bounds: Bounds | None) -> None:
    if not sides:
        raise UsageError("there is nothing to compare", "no group and no run was named", "see: qfleet compare --help")
    if len({side.name for side in sides}) < len(sides):
        raise UsageError(
            f"{sides[0].name} is compared with itself", "two sides have the same name", "name each side once"
        )
    for side in sides[1:]:
        _same_envs(sides[0], side)
    for side in sides:
        _same_counts(side)
    _bounded(sides[0].envs, bounds)


def _same_envs(one: Side, other: Side) -> None:
    if one.envs != other.envs:
        raise UsageError(
            f"{one.name} and {other.name} were not tested in the same environments",
            f"{one.name} has {', '.join(one.envs)}; {other.name} has {', '.join(other.envs)}",
            "compare sides that have the same environments",
        )


def _same_counts(side: Side) -> None:
    counts = {env: sum(run.env == env for run in side.runs) for env in side.envs}
    if len(set(counts.values())) > 1:
        raise UsageError(
            f"{side.name} does not have the same number of scored runs in each environment",
            ", ".join(f"{env} has {count}" for env, count in counts.items()),
            "name as many runs of each, with commas between",
        )


def _bounded(envs: tuple[str, ...], bounds: Bounds | None) -> None:
    if bounds is None and len(envs) > 1:
        raise UsageError(
            f"scores of {len(envs)} environments cannot be averaged as they are: {', '.join(envs)}",
            "their returns have different scales",
            "give --normalize FILE.toml with low and high for each (see docs/groups.md)",
        )
    absent = [env for env in envs if bounds is not None and env not in bounds]
    if absent:
        raise UsageError(
            f"the bounds lack {', '.join(absent)}",
            "each environment needs the scores that become 0 and 1",
            f'add to the file: ["{absent[0]}"] and, below, low = 0.0 and high = 500.0',
        )


def read_bounds(file: str | Path) -> dict[str, tuple[float, float]]:
    """Bounds from a TOML file: a table per environment with `low` and `high`."""
    if not Path(file).is_file():
        raise UsageError(
            f"there is no file {file}", "it sets which scores become 0 and 1", "check the path after --normalize"
        )
    found = {}
    for env, table in read_toml(file).items():
        low, high = (_finite(table.get(key)) if isinstance(table, Mapping) else None for key in ("low", "high"))
        if low is None or high is None or not low < high:
            raise UsageError(
                f"{file}: [{env!r}] has no bounds",
                "low and high must be finite numbers, and low the smaller one",
                f'write: ["{env}"] and, below, low = 0.0 and high = 500.0',
            )
        found[env] = (low, high)
    return found


def _notes(sides: tuple[Side, ...]) -> list[str]:
    notes = [f"{side.name}: not counted, no score yet: {', '.join(side.missing)}" for side in sides if side.missing]
    notes += [
        f"{run.name}: its best checkpoint could not be read, the score is that of its last weights"
        for side in sides
        for run in side.runs
        if not run.of_best
    ]
    notes += [
        f"{' and '.join(names)} share {run}: P is closer to 0.5 than it should be, because a run never beats itself"
        for run, names in _shared(sides).items()
    ]
    alone = [side.name for side in sides if len(side.runs) == len(side.envs)]
    if alone:
        notes.append(
            f"no interval for {', '.join(alone)}: one seed does not show the spread of others; train more with --seeds"
        )
    return notes


def _shared(sides: tuple[Side, ...]) -> dict[str, list[str]]:
    """Runs that are on more than one side, and the names of those sides."""
    found: dict[Path, tuple[str, list[str]]] = {}
    for side in sides:
        for run in side.runs:
            found.setdefault(run.path.resolve(), (run.name, []))[1].append(side.name)
    return {run: names for run, names in found.values() if len(names) > 1}
