"""The data sets of `benchmarks.offline`: who was recorded, by which commands, and what returns they have.

What is there already is kept, and a run that was cut short is resumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, report
from qfleet.datasets.format import Dataset, open_dataset
from qfleet.datasets.format.manifest import MANIFEST
from qfleet.watch import read_rows
from qfleet.watch.statistics import mean_interval

FOLDER = report.ROOT / "runs" / "bench" / "offline"
LIMIT_SECONDS = 14_400.0
PINNED = ("runtime.threads=1", "runtime.compile=false")  # so that every machine makes the same steps
CARTPOLE = "CartPole-v1"
BREAKOUT = "MinAtar/Breakout-v0"


@dataclass(frozen=True)
class Recipe:
    """A data set: the words of the command that makes it. `{online}` and the like name runs that are made first."""

    name: str
    env: str
    what: str
    words: tuple[str, ...]

    @property
    def url(self) -> Path:
        """Where it is."""
        return FOLDER / "data" / self.env.replace("/", "-") / self.name


RUNS = {
    "online": ("train", CARTPOLE, "--seed", "1", "--steps", "50_000", "until.score=none", *PINNED),
    "half": ("train", CARTPOLE, "--seed", "101", "until.score=100", "eval.every_steps=1_000", *PINNED),
    "breakout": ("train", BREAKOUT, "--preset", "dqn", "--seed", "1", "--steps", "1_000_000", *PINNED),
}
MIXTURE = ("--policy", "epsilon=0.3:0.5", "--policy", "random:0.5")
RECIPES = (
    Recipe("replay", CARTPOLE, "all that a run of 50,000 steps did while it learned", ("online",)),
    Recipe(
        "mixed",
        CARTPOLE,
        "a half-trained policy with epsilon 0.3, and random actions, as many steps of each",
        ("data", "collect", "{half}", "{url}", *MIXTURE, "--steps", "50_000", "--seed", "12"),
    ),
    Recipe(
        "expert",
        CARTPOLE,
        "the greedy policy of that run",
        ("data", "collect", "{online}", "{url}", "--policy", "greedy", "--steps", "50_000", "--seed", "11"),
    ),
    Recipe("replay", BREAKOUT, "all that the preset dqn did in a million steps", ("breakout",)),
)


def make_dataset(recipe: Recipe) -> Dataset:
    """The data set, made if it is not there."""
    if not (recipe.url / MANIFEST).exists():
        if recipe.words[0] in RUNS:
            run_folder(recipe.words[0])
        else:
            names = {name: str(run_folder(name)) for name in RUNS if f"{{{name}}}" in recipe.words}
            execute([word.format(**names, url=recipe.url) for word in recipe.words])
    return open_dataset(str(recipe.url))


def run_folder(name: str) -> Path:
    """The folder of an online run, made or completed if it is not done."""
    folder = FOLDER / "runs" / name
    recorded = [f"save.dataset={each.url}" for each in RECIPES if each.words == (name,)]
    return complete([*RUNS[name], *recorded], folder)


def complete(words: Sequence[str], folder: Path) -> Path:
    """The one run in a folder: begun by these words, or resumed if it was cut short, or left alone if it is done."""
    if (begun := resumable(folder)) is None:
        execute([*words, "--out", str(folder), "--quiet"])
    elif not is_done(begun):
        execute(["resume", str(begun), "--quiet"])
    found = resumable(folder)
    if found is None:
        raise SystemExit(f"no run was left in {folder}")
    return found


def resumable(folder: Path) -> Path | None:
    """The run in a folder, if it has a checkpoint."""
    return next((each.parent for each in sorted(folder.glob("*/checkpoints")) if any(each.iterdir())), None)


def is_done(run: Path) -> bool:
    """Did it reach its end?"""
    return any(row["kind"] == "end" and row["state"] == "done" for row in read_rows(run / "metrics.jsonl"))


def execute(words: list[str]) -> None:
    """Run a command of qfleet; the benchmark ends if it fails."""
    done = command.run(command.qfleet(*words), LIMIT_SECONDS)
    if done.exit_code != 0:
        raise SystemExit(f"qfleet {' '.join(words)} failed with {done.exit_code}: {done.errors[-1_000:]}")
    print(f"qfleet {' '.join(words)}: {done.seconds:.0f} s", flush=True)


def describe(recipe: Recipe, dataset: Dataset) -> dict[str, Any]:
    """What is in the data set, with the mean return of its episodes: that of the behaviour."""
    ended = [row for row in dataset.index if row.terminated or row.truncated]  # a run's end cuts some off
    returns = np.array([row.undiscounted_return for row in ended])
    low, high = mean_interval(returns, 0)
    return {
        "env": recipe.env,
        "data": recipe.name,
        "what": recipe.what,
        "version": dataset.version,
        "episodes": dataset.manifest.num_episodes,
        "steps": dataset.manifest.num_steps,
        "mean": float(returns.mean()),
        "low": low,
        "high": high,
        "best": float(returns.max()),
    }
