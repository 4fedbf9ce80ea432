"""Does learning from data sets learn? CQL, cloning, DQN and QR-DQN on recorded CartPole and MinAtar Breakout, by seeds.

The benchmark makes the data sets itself. It is long, so results that are there, of the same data and settings, are
kept, and runs that were cut short are resumed.
"""

import argparse
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.offline_data import (
    BREAKOUT,
    CARTPOLE,
    FOLDER,
    PINNED,
    RECIPES,
    Recipe,
    complete,
    describe,
    make_dataset,
)
from qfleet import load as load_run
from qfleet.watch import read_rows, statistics

COMMAND = "scripts/bench offline"
SEEDS = 3
EPISODES = 100  # of every test
TEST_SEED = 1_000  # and the run's own seed: episodes that neither the run nor its validation has seen
REPLAY_BAR = 400.0  # on CartPole's replay
TARGETS = ("algo.n_step=3", "algo.target.type=copy", "algo.target.every_updates=500")
SHARED = {
    CARTPOLE: ("until.score=none", "algo.batch_size=64", "optim.learning_rate=5e-4", "eval.every_steps=32_000"),
    BREAKOUT: ("--preset", "dqn", "algo.batch_size=64", "eval.every_steps=320_000"),
}
TARGET_SETTINGS = {CARTPOLE: TARGETS, BREAKOUT: ()}
STEPS = {CARTPOLE: 320_000, BREAKOUT: 1_600_000}  # recorded steps that are learned from: 5,000 and 25,000 updates
ALGORITHMS = {
    "CQL": ("algo.offline.type=cql", "algo.offline.alpha=1"),
    "cloning": ("algo.offline.type=bc",),
    "DQN": (),
    "QR-DQN": ("net.head.type=quantile", "net.head.quantiles=25"),
}


@dataclass(frozen=True)
class Result:
    """One algorithm on one data set with one seed; scores are mean, low and high of 100 test episodes."""

    env: str
    data: str
    version: str
    algorithm: str
    settings: tuple[str, ...]
    seed: int
    final: tuple[float, float, float]
    best: tuple[float, float, float]
    env_steps: int  # recorded steps that were learned from
    updates: int
    seconds: float

    @property
    def key(self) -> tuple[str, str, str, str, tuple[str, ...], int]:
        """What makes it the same run."""
        return self.env, self.data, self.version, self.algorithm, self.settings, self.seed


def settings(env: str, algorithm: str) -> tuple[str, ...]:
    """The words of a plan; those about targets would have no effect on cloning."""
    targets = () if algorithm == "cloning" else TARGET_SETTINGS[env]
    steps = ("--steps", str(STEPS[env]), "log.every_steps=32_000", "eval.episodes=20", "eval.test_episodes=0")
    return (*SHARED[env], *targets, *ALGORITHMS[algorithm], *steps, *PINNED)


def measure(recipe: Recipe, version: str, algorithm: str, seed: int) -> Result:
    """Train by the command line, and test the last and the best checkpoint on the same new episodes."""
    words = settings(recipe.env, algorithm)
    data = (f"replay.path={recipe.url}", f"replay.version={version}", "replay.type=dataset", "replay.split=all")
    folder = FOLDER / "learned" / hashlib.sha256("\n".join((*words, version, str(seed))).encode()).hexdigest()[:16]
    run = complete(["train", recipe.env, "--seed", str(seed), *words, *data], folder)
    final = evaluate(run, "latest", seed)
    best = evaluate(run, "best", seed)
    end = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "end"][-1]
    shutil.rmtree(folder)
    counts = (end["env_steps"], end["updates"], round(end["seconds"], 1))
    print(f"{recipe.env} {recipe.name} {algorithm} seed {seed}: final {final[0]:.1f}, best {best[0]:.1f}", flush=True)
    return Result(recipe.env, recipe.name, version, algorithm, words, seed, final, best, *counts)


def evaluate(run: Path, which: str, seed: int) -> tuple[float, float, float]:
    """Mean, low and high of the greedy policy on episodes of their own."""
    row = load_run(run, which=which).evaluate(EPISODES, TEST_SEED + seed)
    return row["mean"], row["low"], row["high"]


def over_seeds(scores: Sequence[float]) -> str:
    """The mean over seeds with its 95 % interval (bootstrap over seeds)."""
    found = statistics.estimate(statistics.mean, np.array(scores)[:, None])
    span = "" if found.low is None else f" [{report.shown(found.low)}, {report.shown(found.high)}]"
    return f"{report.shown(found.value)}{span}"


def judge(described: dict[str, Any], results: Sequence[Result]) -> list[dict[str, Any]]:
    """The verdicts on one data set: only CQL has bars, and its final policies must reach them."""
    means = [each.final[0] for each in results if each.algorithm == "CQL"]
    if not means:
        return []
    mean = sum(means) / len(means)
    bars = [("the behaviour's mean", described["mean"])]
    if (described["env"], described["data"]) == (CARTPOLE, "replay"):
        bars.append(("400", REPLAY_BAR))
    place = {"env": described["env"], "data": described["data"], "mean": mean, "seeds": len(means)}
    return [{**place, "bar": name, "least": bar, "met": mean >= bar} for name, bar in bars]


def data_table(sets: Sequence[dict[str, Any]]) -> str:
    """What was recorded."""
    heads = ("task", "data", "recorded", "episodes", "steps", "behaviour's mean return", "best episode", "version")
    rows = [
        (
            each["env"],
            each["data"],
            each["what"],
            f"{each['episodes']:,}",
            f"{each['steps']:,}",
            f"{report.shown(each['mean'])} [{report.shown(each['low'])}, {report.shown(each['high'])}]",
            each["best"],
            f"`{each['version'][:12]}`",
        )
        for each in sets
    ]
    return report.table(heads, rows)


def score_table(sets: Sequence[dict[str, Any]], results: Sequence[Result]) -> str:
    """A row per data set and algorithm."""
    heads = ("task", "data", "behaviour", "algorithm", "final", "each seed", "best checkpoint", "each seed", "updates")
    rows = []
    for each in sets:
        for name in ALGORITHMS:
            group = select(results, each, name)
            if group:
                final = [result.final[0] for result in group]
                best = [result.best[0] for result in group]
                scores = (over_seeds(final), listed(final), over_seeds(best), listed(best))
                rows.append((each["env"], each["data"], each["mean"], name, *scores, f"{group[0].updates:,}"))
    return report.table(heads, rows)


def listed(scores: Sequence[float]) -> str:
    """Every seed's score."""
    return ", ".join(report.shown(score) for score in scores)


def select(results: Sequence[Result], described: dict[str, Any], algorithm: str | None = None) -> list[Result]:
    """Results of this version of the data with today's settings, by seed."""
    found = [
        each
        for each in results
        if each.version == described["version"] and each.settings == settings(each.env, each.algorithm)
    ]
    return sorted((each for each in found if algorithm in (None, each.algorithm)), key=lambda each: each.seed)


def verdict_lines(verdicts: Sequence[dict[str, Any]]) -> str:
    """Met or missed, a line each."""
    lines = [
        f"- {each['env']}, {each['data']}: final CQL {report.shown(each['mean'])} ({each['seeds']} seeds) >= "
        f"{each['bar']} ({report.shown(each['least'])}): {'met' if each['met'] else '**missed**'}"
        for each in verdicts
    ]
    return "\n".join(lines)


def page(sets: Sequence[dict[str, Any]], results: Sequence[Result]) -> str:
    """All tables."""
    verdicts = [line for each in sets for line in judge(each, select(results, each))]
    return "\n".join((data_table(sets), score_table(sets, results), verdict_lines(verdicts), "", NOTES))


NOTES = (
    f"Scores are mean returns of the greedy policy in {EPISODES} test episodes of their own per seed, with 95 % "
    "intervals over seeds. The behaviour's mean is over all episodes of the data set, with its interval over episodes. "
    "*final* is the last checkpoint, and what the bars are about. *best checkpoint* was chosen by 20 validation "
    "episodes in the environment, which nobody without an environment can do. All data sets of a task are learned from "
    "with the same settings, which are in the JSON file.\n"
)


def save(sets: Sequence[dict[str, Any]], results: Sequence[Result], folder: Path) -> None:
    """Tables and data of all results; older ones of other settings are dropped."""
    kept = [result for each in sets for result in select(results, each)]
    verdicts = [line for each in sets for line in judge(each, select(results, each))]
    record = {"command": COMMAND, "data": sets, "verdicts": verdicts, "runs": [asdict(each) for each in kept]}
    report.save("offline", record, page(sets, kept), folder)


def load(path: Path) -> tuple[list[dict[str, Any]], list[Result]]:
    """What an earlier call has saved."""
    if not path.exists():
        return [], []
    found = json.loads(path.read_text(encoding="utf-8"))
    lists = ("settings", "final", "best")
    runs = [Result(**{**run, **{name: tuple(run[name]) for name in lists}}) for run in found["runs"]]
    return found["data"], runs


def fill(recipes: Sequence[Recipe], algorithms: Sequence[str], seeds: int, folder: Path, *, again: bool) -> None:
    """Make what is missing, saving after each run."""
    sets, results = load(folder / "offline.json")
    for recipe in recipes:
        described = describe(recipe, make_dataset(recipe))
        sets = in_order([each for each in sets if place(each) != place(described)] + [described])
        for algorithm in algorithms:
            for seed in range(1, seeds + 1):
                same = [each for each in select(results, described, algorithm) if each.seed == seed]
                if not same or again:
                    results = [each for each in results if each not in same]
                    results.append(measure(recipe, described["version"], algorithm, seed))
                    save(sets, results, folder)
    save(sets, results, folder)


def place(described: dict[str, Any]) -> tuple[str, str]:
    """Which data set of the benchmark it is."""
    return described["env"], described["data"]


def in_order(sets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As in the list of recipes."""
    order = [(each.env, each.name) for each in RECIPES]
    return sorted((each for each in sets if place(each) in order), key=lambda each: order.index(place(each)))


def main(words: Sequence[str] | None = None) -> int:
    """Make data sets, learn from them, publish the tables; fails if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", action="append", choices=(CARTPOLE, BREAKOUT), help="only this one (repeatable)")
    parser.add_argument("--data", action="append", help="only data sets of this name (repeatable)")
    parser.add_argument("--algorithm", action="append", choices=tuple(ALGORITHMS), help="only this one (repeatable)")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--again", action="store_true", help="make runs anew that are there already")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the results")
    given = parser.parse_args(words)
    wanted = [
        each
        for each in RECIPES
        if (not given.env or each.env in given.env) and (not given.data or each.name in given.data)
    ]
    fill(wanted, given.algorithm or tuple(ALGORITHMS), given.seeds, given.out, again=given.again)
    print((given.out / "offline.md").read_text(encoding="utf-8"))
    if given.out == report.RESULTS:
        report.publish("offline", "Offline", COMMAND)
    verdicts = json.loads((given.out / "offline.json").read_text(encoding="utf-8"))["verdicts"]
    return int(not all(each["met"] for each in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
