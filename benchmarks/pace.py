"""How fast something learns: everybody counts steps and updates with one meter, and one function reads the rows."""

import json
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.command import Finished

# What contestants on the same task share.
PONG = "PongNoFrameskip-v4"
CAPACITY = 20_000  # of pictures; SB3 needs 56 KB for each step
LEARN_START = 500
EPSILON = 0.1
WARM_UPDATES = 10

Row = dict[str, Any]


def say(row: Row) -> None:
    """One row, at once."""
    print(json.dumps(row), flush=True)


class Meter:
    """Counts from the moment learning is under way, for so many seconds; called as often as its owner can."""

    def __init__(
        self,
        seconds: float,
        *,
        warm_updates: int = WARM_UPDATES,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[Row], None] = say,
    ) -> None:
        self.seconds, self.warm_updates, self.clock, self.tell = seconds, warm_updates, clock, tell
        self.began: float | None = None

    def __call__(self, env_steps: int, updates: int) -> bool:
        """Note how far it has come; True when that is enough."""
        now = self.clock()
        if self.began is None and updates >= self.warm_updates:
            self.began = now
            self.note(0.0, env_steps, updates)
        elif self.began is not None and now - self.began >= self.seconds:
            self.note(now - self.began, env_steps, updates)
            return True
        return False

    def note(self, seconds: float, env_steps: int, updates: int) -> None:
        """Tell where it stands."""
        self.tell({"kind": "progress", "seconds": seconds, "env_steps": env_steps, "updates": updates})


def pace(done: Finished, count: str) -> float | None:
    """`env_steps` or `updates` per second between the first and the last row, or None when there are no two."""
    rows = [row for _, row in done.rows if row.get("kind") == "progress"]
    if len(rows) < 2 or rows[-1]["seconds"] <= rows[0]["seconds"]:
        return None
    first, last = rows[0], rows[-1]
    return float((last[count] - first[count]) / (last["seconds"] - first["seconds"]))


def steps_per_second(done: Finished) -> float | None:
    """Environment steps per second while learning."""
    return pace(done, "env_steps")


def updates_per_second(done: Finished) -> float | None:
    """Updates per second inside training."""
    return pace(done, "updates")


def bare_updates_per_second(done: Finished) -> float | None:
    """What the ceiling's only row says."""
    return float(done.rows[-1][1]["updates_per_second"]) if done.rows and not done.exit_code else None


def side_by_side_steps_per_second(done: Finished) -> float | None:
    """Environment steps per second of several runs while all of them learned."""
    row = done.last("side_by_side")
    return None if row is None or done.exit_code else float(row[1]["env_steps_per_second"])


def first_update_seconds(done: Finished) -> float | None:
    """From the command to the arrival of the first row that knows of an update."""
    return next((moment for moment, row in done.rows if row.get("updates", 0) > 0), None)


def whole_seconds(done: Finished) -> float | None:
    """From the command to its end."""
    return done.seconds if done.exit_code == 0 else None


def gigabytes_per_million(done: Finished) -> float | None:
    """What a million stored steps really take, by one that `benchmarks.memory` has measured."""
    row = done.rows[-1][1] if done.rows and not done.exit_code else {}
    return float(row["measured"]) / 1e3 if row.get("full") else None


def run_settings(run: Path) -> Row:
    """What a run resolved to: threads, precision and whether its update is compiled, from its run.toml."""
    runtime = tomllib.loads((run / "run.toml").read_text(encoding="utf-8"))["runtime"]
    return {name: runtime.get(name) for name in ("threads", "precision", "parallel", "compile")}


def newest_settings(runs: Path) -> Row:
    """Those of the newest run in a folder, if there is one."""
    found = sorted(runs.glob("*/run.toml"), key=lambda path: path.stat().st_mtime)
    return run_settings(found[-1].parent) if found else {}
