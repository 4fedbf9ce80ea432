"""A plan trained for real, with a meter: the contestant that is ours."""

import argparse
import tempfile
from typing import Any

import qfleet
from benchmarks.pace import Meter, run_settings, say
from qfleet.plan import compose


def train(env: str, preset: str | None, words: list[str], seconds: float, every_row: bool = False) -> None:
    """Train until the meter has seen enough; evaluation is off, everything else as the plan says.

    At the end it says what the run's own run.toml has; with `every_row` also each row of progress.
    """
    quiet = ["eval.episodes=0", "eval.test_episodes=0", "until.steps=100000000"]
    asked = [(*word.split("=", 1), "command line") for word in [*quiet, *words]]
    plan = compose(env, preset, overrides=asked).plan  # type: ignore[arg-type]
    meter = Meter(seconds)

    def watch(row: dict[str, Any]) -> bool:
        if row["kind"] != "progress":
            return False
        if every_row:
            say({"kind": "row", "env_steps": row["env_steps"], "updates": row["updates"]})
        return meter(row["env_steps"], row["updates"])

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run = qfleet.train(plan, out=folder, callbacks=[watch])
        say({"kind": "settings", **run_settings(run.path)})


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env")
    parser.add_argument("--preset")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--every-row", action="store_true", help="say each row of progress as it is written")
    parser.add_argument("words", nargs="*", metavar="path=value", help="plan settings")
    given = parser.parse_intermixed_args()
    train(given.env, given.preset, given.words, given.seconds, given.every_row)


if __name__ == "__main__":
    main()
