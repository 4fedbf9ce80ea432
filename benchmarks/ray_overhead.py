"""What Ray costs: environment steps per second of the same plan on a local Ray and on processes, in turn."""

import argparse
import statistics
import tempfile
from typing import Any

from benchmarks import report
from benchmarks.command import Finished, qfleet, run

PAGE = report.ROOT / "docs" / "ray.md"
BARS = {"cartpole": 0.6, "pong": 0.85}
# Without evaluation and checkpoints, to measure acting, transport and learning only.
PLAIN = ["eval.episodes=0", "eval.test_episodes=0", "save.every_seconds=100000", "save.every_steps=1000000000"]
WORLDS = {
    "cartpole": ["CartPole-v1", "log.every_steps=2000"],
    "pong": ["ALE/Pong-v5", "log.every_steps=200", "algo.learn_start_steps=500", "replay.capacity=20000"],
}
RUNTIMES = ("processes", "ray")


def steady(rows: list[dict[str, Any]]) -> float:
    """Steps per second between the first progress row with updates and the last one."""
    learning = [row for row in rows if row["kind"] == "progress" and row["updates"] > 0]
    if len(learning) < 3:
        return float("nan")
    first, last = learning[0], learning[-1]
    return float((last["env_steps"] - first["env_steps"]) / (last["seconds"] - first["seconds"]))


def measure(world: str, runtime: str, actors: int, seconds: float) -> float:
    """One run of a fixed time."""
    with tempfile.TemporaryDirectory() as out:
        settings = [*WORLDS[world], *PLAIN, f"runtime.type={runtime}", f"actors.num={actors}"]
        limits = [f"until.seconds={seconds}", "--steps", "1000000000", "--out", out, "--json"]
        done: Finished = run(qfleet("train", *settings, *limits), limit_seconds=seconds + 180)
    if done.exit_code != 0:
        raise SystemExit(f"{' '.join(done.command)} left with {done.exit_code}: {done.errors[-500:]}")
    return steady([row for _, row in done.rows])


def main() -> None:
    """Measure in turn, and report whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", nargs="+", choices=sorted(WORLDS), default=sorted(WORLDS))
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--actors", type=int, default=1)
    arguments = parser.parse_args()
    rows, record = [], []
    for world in arguments.worlds:
        speeds: dict[str, list[float]] = {runtime: [] for runtime in RUNTIMES}
        for number in range(arguments.rounds):
            for runtime in RUNTIMES if number % 2 == 0 else reversed(RUNTIMES):
                speeds[runtime].append(measure(world, runtime, arguments.actors, arguments.seconds))
        record.append({"world": world, **speeds})
        rows.append(table_row(world, speeds))
        print(*rows[-1], sep=" | ", flush=True)
    text = report.table(("world", "`processes`, env steps/s", "`ray`, env steps/s", "ratio", "bar", "met"), rows)
    report.save("ray_overhead", {"settings": vars(arguments), "lines": record}, text)
    if set(arguments.worlds) == set(WORLDS):
        report.publish("ray_overhead", "What Ray costs on one machine", "scripts/bench ray_overhead", page=PAGE)
    print(text)


def table_row(world: str, speeds: dict[str, list[float]]) -> tuple[Any, ...]:
    """A row of the table, by medians."""
    near, far = (statistics.median(speeds[runtime]) for runtime in ("processes", "ray"))
    ratio, bar = far / near, BARS[world]
    return world, f"{near:,.0f}", f"{far:,.0f}", ratio, f">= {bar:g}", "yes" if ratio >= bar else "**no**"


if __name__ == "__main__":
    main()
