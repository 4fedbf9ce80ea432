"""Does it learn? Five seeds of each task, judged by 100 greedy episodes with seeds that training never saw."""

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import command, report


@dataclass(frozen=True)
class Task:
    """An environment, the score asked for, and on how many of the seeds."""

    env: str
    bar: float
    may_miss: int = 0
    steps: int | None = None
    limit_seconds: float = 7_200.0


# Lanes step together, so a run ends a few steps late; "within" must still be true.
OVERSHOOT_STEPS = 100
TASKS = (
    Task("CartPole-v1", 475.0),
    Task("Acrobot-v1", -90.0),
    Task("LunarLander-v3", 200.0, may_miss=1, steps=300_000),
)


@dataclass(frozen=True)
class Run:
    """One task with one seed."""

    env: str
    seed: int
    mean: float | None
    low: float | None
    high: float | None
    episodes: int | None
    env_steps: int | None
    seconds: float
    exit_code: int | None
    errors: str


def train(task: Task, seed: int, extra: list[str]) -> Run:
    """Train by the command line, exactly as a user does, and read the test score from its last row."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        steps = ["--steps", str(task.steps - OVERSHOOT_STEPS)] if task.steps else []
        flags = ["--seed", str(seed), "--json", "--out", folder, *steps, *extra]
        done = command.run(command.qfleet("train", task.env, *flags), task.limit_seconds)
    run = read(task.env, seed, done)
    print(
        f"{run.env} seed {seed}: {report.shown(run.mean)} after {run.env_steps} steps, {run.seconds:.0f} s", flush=True
    )
    return run


def read(env: str, seed: int, done: command.Finished) -> Run:
    """A run's record from the test row it printed."""
    score = (done.last("eval", split="test") or (0.0, {}))[1]
    mean, low, high, episodes = (score.get(name) for name in ("mean", "low", "high", "episodes"))
    errors = done.errors if done.exit_code else ""
    return Run(env, seed, mean, low, high, episodes, score.get("env_steps"), done.seconds, done.exit_code, errors)


def judge(task: Task, runs: list[Run]) -> dict[str, Any]:
    """The task's line: mean over seeds with its interval, every seed, and whether the bar was met."""
    means = [run.mean for run in runs if run.mean is not None]
    low, high = report.interval(means) if means else (None, None)
    passed = sum(run.mean is not None and run.mean >= task.bar and (run.episodes or 0) >= 100 for run in runs)
    steps = max((run.env_steps or 0 for run in runs), default=0)
    return {
        "env": task.env,
        "bar": task.bar,
        "mean": sum(means) / len(means) if means else None,
        "low": low,
        "high": high,
        "seeds": [run.mean for run in runs],
        "passed": passed,
        "most_steps": steps,
        "met": passed >= max(1, len(runs) - task.may_miss) and (task.steps is None or steps <= task.steps),
    }


def markdown(lines: list[dict[str, Any]]) -> str:
    """The verdicts as a table."""
    heads = ("environment", "bar", "mean of seeds", "95 % interval", "each seed", "most steps", "passed", "met")
    body = [
        (
            line["env"],
            f">= {line['bar']:g}",
            line["mean"],
            None if line["low"] is None else f"{line['low']:.1f} to {line['high']:.1f}",
            ", ".join(report.shown(mean) for mean in line["seeds"]),
            f"{line['most_steps']:,}",
            f"{line['passed']} of {len(line['seeds'])}",
            "yes" if line["met"] else "**no**",
        )
        for line in lines
    ]
    return report.table(heads, body)


def main() -> None:
    """Train all, print the table, save it and put it into the documents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--env", action="append", choices=[task.env for task in TASKS], help="only this one (repeatable)"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one core each")
    parser.add_argument("extra", nargs="*", metavar="path=value", help="plan settings for every run")
    given = parser.parse_args()
    extra = [*given.extra, *(["runtime.threads=1"] if given.jobs > 1 else [])]
    tasks = [task for task in TASKS if not given.env or task.env in given.env]
    seeds = list(range(1, given.seeds + 1))
    with ThreadPoolExecutor(given.jobs) as pool:
        waiting = {task: [pool.submit(train, task, seed, extra) for seed in seeds] for task in tasks}
        runs = {task: [future.result() for future in futures] for task, futures in waiting.items()}
    lines = [judge(task, runs[task]) for task in tasks]
    text = markdown(lines)
    record = {"settings": vars(given), "seeds": seeds, "command": "scripts/qfleet train ENV --seed S --json"}
    record |= {"summary": lines, "runs": [asdict(run) for group in runs.values() for run in group]}
    path = report.save("learn", record, text)
    if tasks == list(TASKS) and given.seeds >= 5 and not given.extra:
        report.publish("learn", "Learning", "scripts/bench learn")
    print(f"\n{text}\nsaved {path.relative_to(report.ROOT)}")


if __name__ == "__main__":
    main()
