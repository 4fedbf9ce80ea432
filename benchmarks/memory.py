"""Bytes per stored Atari step: what the arrays add up to, and what the process really grows by when they are full."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, report
from qfleet.data import Rollout, Spec
from qfleet.plan.schema import Algo, BufferReplay, Env, Plan, PrioritizedSampler, UniformSampler
from qfleet.replay import make_replay

BAR_BYTES = 7_400
SPEC = Spec(obs=(84, 84), dtype="uint8", actions=(6,), stack=4)
SAMPLERS: dict[str, UniformSampler | PrioritizedSampler] = {
    "uniform": UniformSampler(),
    "prioritized": PrioritizedSampler(),
}
EPISODE_ROWS = 500  # shorter than any Atari game is on average, so more `last` rows than there would be
CHUNK_ROWS = 16


def rollout(rng: np.random.Generator, first_row: int, lanes: int) -> Rollout:
    """Noise in the shape of Atari; nothing in it can be shared or compressed."""
    rows = first_row + np.arange(CHUNK_ROWS)
    last = np.repeat((rows % EPISODE_ROWS == EPISODE_ROWS - 1)[:, None], lanes, axis=1)
    return Rollout(
        obs=rng.integers(0, 256, (CHUNK_ROWS, lanes, *SPEC.obs), dtype=np.uint8),
        action=rng.integers(0, 6, (CHUNK_ROWS, lanes)),
        reward=np.zeros((CHUNK_ROWS, lanes), np.float32),
        discount=np.ones((CHUNK_ROWS, lanes), np.float32),
        last=last,
        source=(0, 0, first_row // CHUNK_ROWS),
        version=0,
    )


def make(sampler: str, n_step: int, capacity: int, lanes: int) -> Any:
    """A replay as the plan of an Atari run makes it."""
    plan = Plan(
        env=Env(id="ALE/Pong-v5", num=lanes),
        algo=Algo(n_step=n_step),
        replay=BufferReplay(capacity=capacity, sampler=SAMPLERS[sampler]),
    )
    return make_replay(plan, SPEC, lanes, np.random.default_rng(0))


def fill(replay: Any, lanes: int, num_rows: int) -> None:
    """Add rows of noise, then draw once so that lazily made parts exist too."""
    rng = np.random.default_rng(1)
    for row in range(0, num_rows, CHUNK_ROWS):
        replay.add(rollout(rng, row, lanes))
    replay.sample(32)


def array_bytes(thing: Any) -> int:
    """Bytes of every array that an object of ours holds."""
    if isinstance(thing, np.ndarray):
        return int(thing.nbytes)
    if not type(thing).__module__.startswith("qfleet.replay"):
        return 0
    return sum(array_bytes(part) for part in vars(thing).values())


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(sampler: str, n_step: int, capacity: int, lanes: int) -> dict[str, Any]:
    """Fill one replay beyond its capacity and compare before and after."""
    fill(
        make(sampler, n_step, 1_000, lanes), lanes, 2 * CHUNK_ROWS
    )  # code is loaded and compiled before the measurement
    before = resident_bytes()
    replay = make(sampler, n_step, capacity, lanes)
    fill(replay, lanes, int(1.1 * capacity / lanes) + CHUNK_ROWS)
    grown = resident_bytes() - before
    steps = len(replay)
    row = {"sampler": sampler, "n_step": n_step, "steps": steps, "full": steps >= capacity}
    return row | {"computed": array_bytes(replay) / steps, "measured": grown / steps}


def measured_alone(sampler: str, n_step: int, capacity: int, lanes: int) -> dict[str, Any]:
    """The same in a process of its own, so that nothing freed earlier hides the growth."""
    which = ["--one", sampler, "--n-step", str(n_step), "--capacity", str(capacity), "--lanes", str(lanes)]
    done = command.run([sys.executable, "-m", "benchmarks.memory", *which], limit_seconds=900)
    if done.exit_code or not done.rows:
        raise SystemExit(f"measuring {sampler}, n_step {n_step} failed:\n{done.errors}")
    return done.rows[-1][1]


def main() -> None:
    """Measure both samplers with one and three steps, print the table, save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=int, default=100_000)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--one", choices=sorted(SAMPLERS), help="measure in this process and print one JSON line")
    parser.add_argument("--n-step", type=int, default=1)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.n_step, given.capacity, given.lanes)))
        return
    cases = [(sampler, n_step) for sampler in SAMPLERS for n_step in (1, 3)]
    rows = [measured_alone(*case, given.capacity, given.lanes) for case in cases]
    for row in rows:
        row["met"] = bool(row["full"] and max(row["computed"], row["measured"]) <= BAR_BYTES)
    heads = ("sampler", "n-step", "steps held", "bytes per step, computed", "measured (RSS)", "bar", "met")
    body = [(r["sampler"], r["n_step"], f"{r['steps']:,}", r["computed"], r["measured"], f"<= {BAR_BYTES:,}",
             "yes" if r["met"] else "**no**") for r in rows]  # fmt: skip
    text = report.table(heads, body)
    path = report.save("memory", {"settings": vars(given), "bar_bytes": BAR_BYTES, "rows": rows}, text)
    report.publish("memory", "Bytes per stored Atari step", "scripts/bench memory")
    print(f"{text}\nsaved {path.relative_to(report.ROOT)}")


if __name__ == "__main__":
    main()
