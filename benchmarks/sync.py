"""Two learners on CartPole, in every way they can agree: environment steps until 475 beside one learner's."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.grid import Cell, Run, train

TARGET, MOST_STEPS = 475.0, 40_000
PAGE = report.ROOT / "docs" / "sync.md"
BUDGET = (
    f"until.score={TARGET:g}",
    f"until.steps={MOST_STEPS}",
    "eval.every_steps=1000",
    "eval.episodes=20",
    "eval.test_episodes=0",
    "runtime.compile=false",
)
CODECS = ("fp16", "bf16", "int8", "sign", "ternary", "top_k", "power_sgd")


@dataclass(frozen=True)
class Way:
    """One way to agree, and how many times the steps of one learner it may take."""

    name: str
    settings: tuple[str, ...]
    bar: float = 1.3


ASYNCHRONOUS = ("sync.type=server", "sync.max_staleness=none")
SWITCHES = "[300 sync.type=server sync.max_staleness=4, 600 sync.type=local, 900 sync.type=allreduce]"
ALONE = Way("one learner", ())
WAYS = (
    Way("allreduce", ("sync.type=allreduce",)),
    Way("server, synchronous, 2 shards", ("sync.type=server", "sync.shards=2")),
    Way("server, at most 4 steps stale", ("sync.type=server", "sync.max_staleness=4"), 1.5),
    Way("server, asynchronous", ASYNCHRONOUS, 1.5),
    Way("server, asynchronous, slower when stale", (*ASYNCHRONOUS, "sync.slow_down=true"), 1.5),
    Way("window of 2 gradients", ("sync.type=window",), 1.5),
    Way("local, every 8", ("sync.type=local",)),
    Way("local with an outer rate (DiLoCo)", ("sync.type=local", "sync.outer_rate=0.7")),
    Way("easgd", ("sync.type=easgd",)),
    Way("admm", ("sync.type=admm",), 1.5),
    Way("gossip", ("sync.type=gossip",)),
    Way("allreduce, server, local, allreduce", (f"learners.schedule={SWITCHES}",)),
    Way("bundles, allreduce", ("learners.bundles=true",)),
    Way("bundles, server, asynchronous (Gorila)", ("learners.bundles=true", *ASYNCHRONOUS), 1.5),
    *(Way(f"allreduce, {codec}", (f"sync.codec.type={codec}",), 1.5 if codec == "top_k" else 1.3) for codec in CODECS),
    Way("allreduce, top_k by a sample", ("sync.codec.type=top_k", "sync.codec.sampled=true"), 1.5),
)

# What becomes of ways that take longer when the likely reason is taken away: that is why they do, or not.
WITHOUT = (
    Way("easgd, learning rate x 1.5", ("sync.type=easgd", "optim.learning_rate=3e-3")),
    Way("allreduce, steps, no codec", ("sync.send=steps",)),
)


def steps_needed(run: Run) -> int | None:
    """Environment steps of the first validation at or above the target."""
    return next((steps for steps, mean in run.curve if mean >= TARGET), None)


def race(way: Way, seed: int, limit_seconds: float) -> int | None:
    """One run by the command line."""
    learners = () if way is ALONE else ("learners.num=2",)
    # The preset that one learner solves it with by every seed, in 8,000 to 13,000 steps: others vary tenfold.
    cell = Cell("CartPole-v1", "cartpole", None, (*BUDGET, *learners, *way.settings), way.name)
    run = train(cell, seed, (), limit_seconds)
    if run.exit_code != 0:  # not to be taken for one that never learned
        raise SystemExit(f"{way.name}, seed {seed}: exit code {run.exit_code}. {run.errors[-500:]}")
    return steps_needed(run)


def judge(way: Way, steps: Sequence[int | None], alone: Sequence[int | None]) -> dict[str, Any]:
    """The way's line: each seed's ratio to one learner's steps; who never got there counts as the whole budget."""
    ratios = [(own or MOST_STEPS) / (other or MOST_STEPS) for own, other in zip(steps, alone, strict=True)]
    low, high = report.interval(ratios)
    mean = sum(ratios) / len(ratios)
    return {
        "way": way.name,
        "settings": list(way.settings),
        "steps": list(steps),
        "ratio": mean,
        "low": low,
        "high": high,
        "bar": way.bar,
        "met": low <= way.bar,
        "mean_met": mean <= way.bar,
    }


def markdown(alone: Sequence[int | None], lines: list[dict[str, Any]]) -> str:
    """The verdicts as a table."""
    heads = (
        "how they agree",
        "plan",
        "steps to 475, each seed",
        "x one learner",
        "95 % interval",
        "bar",
        "mean within",
        "bound within",
    )
    first = ("one learner", "`learners.num=1`", each(alone), None, None, None, None, None)
    body = [
        (
            line["way"],
            " ".join(f"`{word}`" for word in line["settings"]),
            each(line["steps"]),
            f"{'' if all(line['steps']) else '>= '}{line['ratio']:.2f}",
            f"{line['low']:.2f} to {line['high']:.2f}",
            f"<= {line['bar']:g}",
            "yes" if line["mean_met"] else "**no**",
            "yes" if line["met"] else "**no**",
        )
        for line in lines
    ]
    return report.table(heads, [first, *body])


def each(steps: Sequence[int | None]) -> str:
    """Steps of every seed."""
    return ", ".join("never" if step is None else f"{step:,}" for step in steps)


def main() -> None:
    """Run what is asked for; the table is published when it is whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=None, help="beginnings of names; all of them if none is given")
    parser.add_argument("--limit-seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    given = parser.parse_args()
    named = given.ways
    ways = [way for way in (*WAYS, *WITHOUT) if named is None or any(way.name.startswith(word) for word in named)]
    seeds = range(1, given.seeds + 1)
    alone = [race(ALONE, seed, given.limit_seconds) for seed in seeds]
    lines = [judge(way, [race(way, seed, given.limit_seconds) for seed in seeds], alone) for way in ways]
    table = markdown(alone, lines)
    print(table)
    record = {"seeds": list(seeds), "alone": alone, "lines": lines, "command": "scripts/bench sync"}
    if given.ways is None:
        report.save("sync", record, table, given.out)
    if given.ways is None and given.out == report.RESULTS and given.seeds >= 3:
        report.publish("sync", "Learning", "scripts/bench sync", page=PAGE)
    else:
        print(json.dumps(record))


if __name__ == "__main__":
    main()
