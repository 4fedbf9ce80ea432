"""Pong in compressed blocks: memory of a million steps, and what packing and unpacking cost."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, report
from benchmarks.memory import resident_bytes
from benchmarks.replay_cases import cpu_rate
from qfleet.data import Rollout, Spec, World
from qfleet.envs import TRAIN, make_world
from qfleet.plan.schema import Algo, BufferReplay, Env, Plan
from qfleet.replay import make_replay

BAR_BYTES = 1_000  # per step: 1 GB for a million
LANES, ROWS, CHUNK_ROWS, BATCH = 8, 1_500, 16, 32
STEPS = 1_000_000
COMMAND = "scripts/bench packed"
PAGE = report.ROOT / "docs" / "speed.md"


def plan(capacity: int, *, compress: bool) -> Plan:
    """A replay of Pong as the standard protocol shows it."""
    env = Env(id="ALE/Pong-v5", num=LANES, frame_size=84)
    return Plan(env=env, algo=Algo(), replay=BufferReplay(capacity=capacity, compress=compress))


def play(rows: int) -> tuple[Spec, list[Rollout]]:
    """Real games by random actions, in pieces."""
    world, rng = make_world(plan(1, compress=False).env, seed=0, stream=TRAIN), np.random.default_rng(0)
    pieces, step, last = [], world.reset(), np.zeros(LANES, np.bool_)
    for _ in range(rows // CHUNK_ROWS):
        kept = []
        for _ in range(CHUNK_ROWS):
            shown, action = step.obs[:, -1].copy(), rng.integers(0, world.spec.num_actions, LANES)
            step = advance(world, action)
            kept.append((shown, action, step.reward, (~step.terminated).astype(np.float32), last))
            last = (step.terminated | step.truncated) & ~last
        columns = [np.stack(column) for column in zip(*kept, strict=True)]
        pieces.append(Rollout(*columns, source=(0, 0, len(pieces)), version=0))
    spec = world.spec
    world.close()
    return spec, pieces


def advance(world: World, action: Any) -> Any:
    """One step everywhere."""
    world.send(action)
    return world.receive()


def measure(capacity: int) -> dict[str, Any]:
    """Fill a compressed replay with games played over and over, then draw; beside it a raw one for the draws."""
    spec, pieces = play(ROWS)
    raw = make_replay(plan(LANES * ROWS, compress=False), spec, LANES, np.random.default_rng(0))
    warm = make_replay(plan(1_000, compress=True), spec, LANES, np.random.default_rng(0))
    for piece in pieces:
        raw.add(piece)
        warm.add(piece)  # code is loaded before the measurement
    warm.sample(BATCH)
    before = resident_bytes()
    replay = make_replay(plan(capacity, compress=True), spec, LANES, np.random.default_rng(0))
    for number in range(int(1.1 * capacity) // (LANES * CHUNK_ROWS)):
        replay.add(pieces[number % len(pieces)])
    rates = {
        name: cpu_rate(lambda each=each: each.sample(BATCH), 2.0) for name, each in (("packed", replay), ("raw", raw))
    }  # type: ignore[misc]
    saving = replay.store.compression_savings()
    assert saving is not None
    return {
        "steps": len(replay),
        "full": len(replay) >= capacity,
        "measured": (resident_bytes() - before) / len(replay),
        "ratio": saving.ratio,
        "pack_microseconds": 1e6 * saving.pack_seconds / (16 * saving.packed_blocks),
        "unpack_microseconds": 1e6 * saving.unpack_seconds / saving.unpacked_blocks,
        "batches_per_second": rates["packed"],
        "raw_batches_per_second": rates["raw"],
    }


def main() -> None:
    """Measure in a process of its own, print the table, save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=int, default=STEPS)
    parser.add_argument("--one", action="store_true", help="measure in this process and print one JSON line")
    parser.add_argument("--out", type=Path, help="folder for the results of a run that is not to be shown")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.capacity)))
        return
    words = [sys.executable, "-m", "benchmarks.packed", "--one", "--capacity", str(given.capacity)]
    done = command.run(words, limit_seconds=1_800)
    if done.exit_code or not done.rows:
        raise SystemExit(f"measuring failed:\n{done.errors}")
    row = done.rows[-1][1]
    row["met"] = bool(row["full"] and row["measured"] <= BAR_BYTES)
    text = markdown(row)
    print(text)
    whole = given.capacity >= STEPS and not given.out
    if whole or given.out:
        report.save("packed", {"command": COMMAND, "rows": [row]}, text, given.out or report.RESULTS)
    if whole:
        report.publish("packed", "A compressed replay of Pong", COMMAND, page=PAGE)


def markdown(row: dict[str, Any]) -> str:
    """The table."""
    heads = (
        "steps held",
        "bytes per step (RSS)",
        "bar",
        "met",
        "frames are smaller by",
        "packing, microseconds per frame",
        "unpacking, per block of 16",
        f"batches of {BATCH} per CPU-second",
        "without compression",
    )
    cells = (
        f"{row['steps']:,}",
        row["measured"],
        f"<= {BAR_BYTES:,}",
        "yes" if row["met"] else "**no**",
        row["ratio"],
        row["pack_microseconds"],
        row["unpack_microseconds"],
        row["batches_per_second"],
        row["raw_batches_per_second"],
    )
    return report.table(heads, [cells])


if __name__ == "__main__":
    main()
