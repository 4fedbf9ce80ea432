"""Seconds from typing the command to a verified 475 on CartPole-v1, beside Stable-Baselines3 and SBX.

Everybody is judged alike: every 2,500 steps 20 greedy episodes; when their mean reaches the target, 100 fresh ones,
whose mean counts. Start, imports, compilation and evaluation are inside the clock. Runs never overlap. Our own
command is stricter with itself: it asks the whole 95 % interval of the 20 to reach the target, and has one try.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import command, peers, report

TARGET = 475.0
EVERY_STEPS = 2_500
OURS, FIRST = "qfleet", "qfleet, empty compile cache"
BAR_SECONDS = 5.0  # of our median
# Our median as a fraction of theirs.
BARS = {"Stable-Baselines3": {OURS: 0.15, FIRST: 1 / 3}, "SBX": {OURS: 1 / 2, FIRST: 1 / 2}}


@dataclass(frozen=True)
class Run:
    """One contestant's race with one seed; `seconds` is None when the target was not verified within the limit."""

    contestant: str
    seed: int
    seconds: float | None
    mean: float | None
    env_steps: int | None
    evaluations: int
    exit_code: int | None
    errors: str


def train_qfleet(seed: int, limit_seconds: float, cold: bool = False) -> command.Finished:
    """Our command in a folder of its own; `cold` starts without anything numba compiled earlier."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        env = {"NUMBA_CACHE_DIR": str(Path(folder) / "cache")} if cold else {}
        return command.run(qfleet_command(seed, folder), limit_seconds, env)


def qfleet_command(seed: int, out: str) -> list[str]:
    """What a user would type, with the cadence and numbers of episodes that everybody has."""
    shared = (
        f"until.score={TARGET:g}",
        f"eval.every_steps={EVERY_STEPS}",
        "eval.episodes=20",
        "eval.test_episodes=100",
    )
    # No cap in steps: peers have none, the clock decides.
    flags = ("--seed", str(seed), "--json", "--out", out, "--steps", "10000000")
    return command.qfleet("train", "CartPole-v1", *flags, *shared)


def verdict(contestant: str, seed: int, done: command.Finished) -> Run:
    """Read the verdict from a finished command: the last 100 test episodes, and when their row arrived."""
    moment, row = done.last("eval", split="test") or (None, {})
    mean, episodes = row.get("mean"), row.get("episodes", 0)
    reached = mean is not None and mean >= TARGET and episodes >= 100
    evaluations = sum(row.get("kind") == "eval" for _, row in done.rows)
    newest = done.rows[-1][1] if done.rows else {}
    errors = done.errors if done.exit_code else ""
    steps = newest.get("env_steps")
    return Run(contestant, seed, moment if reached else None, mean, steps, evaluations, done.exit_code, errors)


def contestants(with_peers: bool, threads: int, limit_seconds: float) -> dict[str, Callable[[int], command.Finished]]:
    """Who races, in the order in which they take turns."""
    field: dict[str, Callable[[int], command.Finished]] = {
        OURS: lambda seed: train_qfleet(seed, limit_seconds),
        FIRST: lambda seed: train_qfleet(seed, limit_seconds, cold=True),
    }
    if with_peers:
        same = ("--threads", str(threads), "--every-steps", str(EVERY_STEPS), "--target", str(TARGET))
        field["Stable-Baselines3"] = lambda seed: peers.train("sb3", seed, limit_seconds, *same)
        field["SBX"] = lambda seed: peers.train("sbx", seed, limit_seconds, *same)
    return field


def race(field: dict[str, Callable[[int], command.Finished]], seeds: list[int]) -> list[Run]:
    """One after another, interleaved by seed, so that a slow hour of the machine hits everybody."""
    runs = []
    for seed in seeds:
        for name, start in field.items():
            runs.append(verdict(name, seed, start(seed)))
            print(line(runs[-1]), flush=True)
    return runs


def line(run: Run) -> str:
    """One race in one line."""
    time = f"{run.seconds:.1f} s" if run.seconds is not None else "not verified"
    return f"seed {run.seed}  {run.contestant}: {time}, mean {report.shown(run.mean)}, {run.env_steps} steps"


def summary(runs: list[Run], limit_seconds: float) -> list[dict[str, Any]]:
    """Median per contestant, ours as a fraction of it, and whether what is asked of it was reached."""
    names = list(dict.fromkeys(run.contestant for run in runs))
    times = {name: [run.seconds for run in runs if run.contestant == name] for name in names}
    medians = {name: report.capped_median(times[name], limit_seconds) for name in names}
    rows = []
    for name in names:
        middle, bound = medians[name]
        ratios = {ours: report.ratio(medians[ours][0], middle) for ours in (OURS, FIRST) if name in BARS}
        met = all(ratios[ours] <= bar for ours, bar in BARS[name].items()) if ratios else None
        if name == OURS:
            met = middle <= BAR_SECONDS and not bound
        row = {"contestant": name, "median_seconds": middle, "bound": bound, "times": times[name]}
        rows.append(row | {"ratios": ratios, "bar": asked(name), "met": met})
    return rows


def asked(name: str) -> str | None:
    """The bar in words."""
    if name == OURS:
        return f"<= {BAR_SECONDS:g} s"
    found = BARS.get(name)
    return None if found is None else f"<= {found[OURS]:.2f}, without cache <= {found[FIRST]:.2f}"


def markdown(rows: list[dict[str, Any]], limit_seconds: float) -> str:
    """The summary as a table; ">" marks what was stopped at the limit."""
    body = [
        (
            row["contestant"],
            (">" if row["bound"] else "") + f"{row['median_seconds']:.1f}",
            ", ".join(f">{limit_seconds:.0f}" if value is None else f"{value:.1f}" for value in row["times"]),
            *(row["ratios"].get(ours) for ours in (OURS, FIRST)),
            row["bar"],
            {True: "yes", False: "**no**", None: None}[row["met"]],
        )
        for row in rows
    ]
    heads = ("contestant", "median, s", "each seed, s", "qfleet / it", "qfleet without cache / it", "bar", "met")
    return report.table(heads, body)


def main() -> None:
    """Race, print the table, save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="race Stable-Baselines3 and SBX too")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--limit-seconds", type=float, default=240.0)
    parser.add_argument("--peer-threads", type=int, default=1, help="torch threads of Stable-Baselines3 (1 is faster)")
    given = parser.parse_args()
    if given.peers:
        peers.ensure()
    field = contestants(given.peers, given.peer_threads, given.limit_seconds)
    seeds = list(range(1, given.seeds + 1))
    runs = race(field, seeds)
    rows = summary(runs, given.limit_seconds)
    text = markdown(rows, given.limit_seconds)
    record = {"settings": vars(given), "target": TARGET, "every_steps": EVERY_STEPS, "seeds": seeds}
    record |= {"command": " ".join(["scripts/qfleet", *qfleet_command(1, "DIR")[1:]]), "summary": rows}
    record |= {"peers": peers.versions() if given.peers else None, "runs": [asdict(run) for run in runs]}
    path = report.save("cartpole", record, text)
    if given.peers and given.seeds >= 5:
        report.publish("cartpole", "Time to a verified 475 on CartPole-v1", "scripts/bench cartpole --peers")
    print(f"\n{text}\nsaved {path.relative_to(report.ROOT)}")


if __name__ == "__main__":
    main()
