"""A group of two seeds that train side by side: environment steps per second of both while both learn."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import qfleet
from benchmarks.pace import WARM_UPDATES, run_settings, say
from qfleet.plan import compose

NUM_SEEDS = 2
FILL_SECONDS = 4.0  # until a member learns, more or less
Point = tuple[float, int]  # moment, environment steps


class Overlap:
    """Watches a group; keeps how far each member was at which moment, since it learns."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.points: dict[str, list[Point]] = {}

    def row(self, member: str, row: Mapping[str, Any]) -> None:
        """A member wrote a row."""
        if row["kind"] == "progress" and row["updates"] >= WARM_UPDATES:
            self.points.setdefault(member, []).append((self.clock(), row["env_steps"]))

    def start(self, info: Mapping[str, Any]) -> None:
        """Nothing."""

    def warn(self, member: str, text: str) -> None:
        """Nothing."""

    def live(self, members: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def finished(self, member: Mapping[str, Any]) -> None:
        """Nothing."""

    def stop(self, end: Mapping[str, Any]) -> None:
        """Nothing."""


def together(points: Mapping[str, list[Point]], num: int = NUM_SEEDS) -> tuple[float, float] | None:
    """Steps per second of all members added up while all of them learned, and for how many seconds they did."""
    if len(points) < num:
        return None
    begin = max(each[0][0] for each in points.values())
    end = min(each[-1][0] for each in points.values())
    inside = [[point for point in each if begin <= point[0] <= end] for each in points.values()]
    if any(len(each) < 2 for each in inside):
        return None
    return sum(speed(each[0], each[-1]) for each in inside), end - begin


def speed(first: Point, last: Point) -> float:
    """Steps per second between two moments."""
    return (last[1] - first[1]) / (last[0] - first[0])


def train(env: str, words: Sequence[str], seconds: float, out: Path) -> None:
    """Train the group and say how fast it was; it says nothing if its members never learned at the same time."""
    end = f"until.seconds={seconds + FILL_SECONDS}"
    quiet = ["eval.episodes=0", "eval.test_episodes=0", "until.steps=100000000", end]
    explore = ["algo.explore.type=constant", "algo.explore.epsilon=0.1"]
    asked = [(*word.split("=", 1), "command line") for word in [*quiet, *explore, *words]]
    plan = compose(env, "dqn", overrides=asked).plan  # type: ignore[arg-type]
    overlap = Overlap()
    group = qfleet.train_group(plan, NUM_SEEDS, jobs=NUM_SEEDS, out=out, watcher=overlap)
    say({"kind": "settings", **run_settings(group.members[0])})
    found = together(overlap.points)
    if found is not None:
        say({"kind": "side_by_side", "env_steps_per_second": found[0], "seconds": found[1]})


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the group")
    parser.add_argument("words", nargs="*", metavar="path=value", help="plan settings")
    given = parser.parse_intermixed_args()
    train(given.env, given.words, given.seconds, given.out)


if __name__ == "__main__":
    main()
