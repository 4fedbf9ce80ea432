"""Does the auxiliary loss of `examples/auxiliary_loss.py` help? MinAtar games with and without it, several seeds.

Every run is a process of its own on one thread; both arms have the same plan and the same seeds.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import command, report

GAMES = ("Breakout", "Asterix")
ARMS = ("TD loss", "with prediction")
STEPS, SEEDS, EPISODES = 100_000, 5, 100
LIMIT_SECONDS = 3_600.0
COMMAND = "scripts/bench auxiliary"


def train(game: str, arm: str, seed: int, steps: int) -> None:
    """One run; prints its score on test episodes and the share of dormant units at its end."""
    import qfleet
    from examples.auxiliary_loss import PredictNextFeatures

    quiet = {"eval.every_steps": steps // 10, "eval.episodes": 20, "eval.test_episodes": EPISODES}
    settings = {"until.steps": steps, "seed": seed, "runtime.threads": 1, "runtime.compile": False, **quiet}
    loss = PredictNextFeatures() if arm == ARMS[1] else None
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run = qfleet.train(f"MinAtar/{game}-v0", overrides=settings, loss=loss, out=folder)
        scores = [row["mean"] for row in run.metrics if row["kind"] == "eval" and row["split"] == "validation"]
        last = [row for row in run.metrics if row["kind"] == "progress"][-1]
        result = run.result() or {}
    print(json.dumps({"mean": result["mean"], "area": sum(scores) / len(scores), "dormant": last["dormant"]}))


def measure(game: str, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """One run in a process of its own."""
    words = ("--one", game, arm, "--seed", str(seed), "--steps", str(steps))
    done = command.run([sys.executable, "-m", "benchmarks.auxiliary", *words], LIMIT_SECONDS)
    if done.exit_code != 0 or not done.rows:
        raise SystemExit(f"{game}, {arm}, seed {seed} failed: {done.errors[-500:]}")
    print(game, arm, seed, done.rows[-1][1], flush=True)
    return done.rows[-1][1]


def lines(found: dict[tuple[str, str], list[dict[str, Any]]]) -> list[tuple[Any, ...]]:
    """A row of the table per game and measure: both arms, and the difference over seeds with its interval."""
    rows = []
    for game in dict.fromkeys(game for game, _ in found):
        without, with_it = (found[game, arm] for arm in ARMS)
        for name, text in (("mean", "test score"), ("area", "mean of all validations"), ("dormant", "dormant units")):
            differences = [two[name] - one[name] for one, two in zip(without, with_it, strict=True)]
            low, high = report.interval(differences)
            means = [sum(each[name] for each in arm) / len(arm) for arm in (without, with_it)]
            verdict = "no difference shown" if low <= 0.0 <= high else "higher" if low > 0.0 else "lower"
            rows.append(
                (game, text, *means, f"{sum(differences) / len(differences):.3g} [{low:.3g}, {high:.3g}]", verdict)
            )
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Train all runs, two at a time, and show the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("GAME", "ARM"), help="train one run and print its numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--games", nargs="+", default=list(GAMES))
    given = parser.parse_args(words)
    if given.one:
        train(*given.one, given.seed, given.steps)
        return
    cases = [(game, arm, seed) for game in given.games for seed in range(given.seeds) for arm in ARMS]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda case: measure(*case, given.steps), cases))
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (game, arm, _), result in zip(cases, results, strict=True):
        found.setdefault((game, arm), []).append(result)
    heads = ("game", "measure", *ARMS, "difference, 95 % interval", "verdict")
    text = report.table(heads, lines(found))
    text += f"\n{given.seeds} seeds, {given.steps:,} steps each, {EPISODES} test episodes.\n"
    print(f"\n{text}")
    report.save("auxiliary", {"command": COMMAND, "settings": vars(given), "runs": results}, text)
    if given.steps == STEPS and given.seeds == SEEDS and set(given.games) == set(GAMES):
        report.publish("auxiliary", "An auxiliary loss of your own", COMMAND)


if __name__ == "__main__":
    main()
