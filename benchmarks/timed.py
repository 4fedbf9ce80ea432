"""A plan trained for real, with a meter: the contestant that is ours."""

import argparse
import tempfile
from typing import Any

import qfleet
from benchmarks.pace import Meter
from qfleet.plan import compose


def train(env: str, preset: str | None, words: list[str], seconds: float) -> None:
    """Train until the meter has seen enough; evaluation is off, everything else as the plan says."""
    quiet = ["eval.episodes=0", "eval.test_episodes=0", "until.steps=100000000"]
    asked = [(*word.split("=", 1), "command line") for word in [*quiet, *words]]
    plan = compose(env, preset, overrides=asked).plan  # type: ignore[arg-type]
    meter = Meter(seconds)

    def watch(row: dict[str, Any]) -> bool:
        return row["kind"] == "progress" and meter(row["env_steps"], row["updates"])

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        qfleet.train(plan, out=folder, callbacks=[watch])


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env")
    parser.add_argument("--preset")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("words", nargs="*", metavar="path=value", help="plan settings")
    given = parser.parse_intermixed_args()
    train(given.env, given.preset, given.words, given.seconds)


if __name__ == "__main__":
    main()
