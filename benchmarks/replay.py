"""Replay beside cpprb: inserts, draws and priorities per second of processor time, taking turns in one run."""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, peers, report
from benchmarks.replay_cases import INSERT, MANY, SLOTS, UPDATE, Part, tell
from qfleet.data import Rollout, Spec
from qfleet.replay import NStepReturn, Prioritized, Replay, StepCut

SPECS = {"vector": Spec((4,), "float32", (2,)), "frames": Spec((84, 84), "uint8", (6,), stack=4)}
BARS = {"vector": {INSERT: 2.0, UPDATE: 1.5}, "frames": {f"{UPDATE} 256": 1.5}}
SECONDS, ROUNDS, SPARE_SECONDS = 0.6, 7, 180.0
COMMAND = "scripts/bench replay --peers"
PAGE = report.ROOT / "docs" / "speed.md"


def rollout(spec: Spec, rows: int) -> Rollout:
    """So many steps of one environment, none of them the last."""
    rng, shape = np.random.default_rng(0), (rows, 1)
    return Rollout(
        obs=rng.integers(0, 255, (*shape, *spec.obs)).astype(spec.dtype),
        action=np.zeros(shape, np.int64),
        reward=np.zeros(shape, np.float32),
        discount=np.ones(shape, np.float32),
        last=np.zeros(shape, np.bool_),
        source=(0, 0, 0),
        version=0,
    )


def make(what: str, slots: int) -> Part:
    """Our replay, full, and what can be done with it."""
    spec, rng = SPECS[what], np.random.Generator(np.random.Philox(0))
    replay = Replay(spec, 1, slots, Prioritized(slots), rng, cut=StepCut(1), n_step=NStepReturn(1, 0.99))
    one, many = rollout(spec, 1), rollout(spec, MANY)
    priority = {size: np.random.default_rng(1).random(size).astype(np.float32) for size in range(1_000)}
    for _ in range(replay.store.rows // MANY + 1):
        replay.add(many)

    def learn(size: int) -> None:
        batch = replay.sample(size)
        assert batch is not None
        replay.update(batch.ids, priority[size])

    return Part(lambda: replay.add(one), lambda: replay.add(many), replay.sample, learn)


def measure(side: str, what: str, slots: int, seconds: float) -> dict[str, float]:
    """One side's turn, in a process of its own."""
    asked = [what, "--slots", str(slots), "--seconds", str(seconds)]
    words = peers.command("benchmarks.peer_cpprb", *asked)
    if side == "qfleet":
        words = [sys.executable, "-m", "benchmarks.replay", "--one", *asked]
    done = command.run(words, SPARE_SECONDS + 20 * seconds)
    row = done.last("figures")
    if row is None:
        raise SystemExit(f"measuring {side} failed:\n{done.errors}")
    return {name: value for name, value in row[1].items() if isinstance(value, float)}


def hold(what: str, slots: int, seconds: float, rounds: int, with_peers: bool) -> list[dict[str, Any]]:
    """All rounds; a ratio is taken within a round."""
    sides = ["qfleet", "cpprb"] if with_peers else ["qfleet"]
    turns: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            turns[side].append(measure(side, what, slots, seconds))
        print(f"{what}: round {number + 1} of {rounds}", flush=True)
    return [line(what, slots, name, turns) for name in turns["qfleet"][0]]


def line(what: str, slots: int, name: str, turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """One figure: medians, the median of the ratios, and whether the bar was met."""
    ours, theirs = ([turn[name] for turn in turns.get(side, [])] for side in ("qfleet", "cpprb"))
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=False)]
    found = statistics.median(ratios) if ratios else None
    bar = next((bar for word, bar in BARS[what].items() if name.startswith(word)), None)
    return {
        "what": what,
        "slots": slots,
        "name": name,
        "qfleet": statistics.median(ours),
        "cpprb": statistics.median(theirs) if theirs else None,
        "ratio": found,
        "ratios": ratios,
        "bar": bar,
        "met": None if bar is None or found is None else found >= bar,
    }


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table."""
    heads = ("replay of", "slots", "what", "qfleet, per CPU-second", "cpprb", "qfleet / cpprb", "bar", "met")
    return report.table(
        heads,
        [
            (
                row["what"],
                f"{row['slots']:,}",
                row["name"],
                f"{row['qfleet']:,.0f}",
                None if row["cpprb"] is None else f"{row['cpprb']:,.0f}",
                row["ratio"],
                None if row["bar"] is None else f">= {row['bar']:g} x",
                {True: "yes", False: "**no**", None: None}[row["met"]],
            )
            for row in lines
        ],
    )


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="measure cpprb too, from .venv-peers")
    parser.add_argument("--rows", nargs="+", choices=sorted(SLOTS), default=list(SLOTS))
    parser.add_argument("--slots", type=int, help="another size than the one that is shown")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of processor time for each figure")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="folder for the results of a run that is not to be shown")
    parser.add_argument("--one", choices=sorted(SLOTS), help="measure in this process and print one JSON line")
    return parser.parse_args(words)


def whole(given: argparse.Namespace) -> bool:
    """Is this the run whose results are shown?"""
    usual = given.seconds >= SECONDS and given.rounds >= ROUNDS and given.rows == list(SLOTS)
    return bool(given.peers and usual and not given.out and not given.slots)


def main() -> None:
    """Take turns, print the table; save and show a whole run."""
    given = parse()
    if given.one:
        tell(make, given.one, given.slots, given.seconds)
        return
    if given.peers:
        peers.ensure()
    lines = [
        row
        for what in given.rows
        for row in hold(what, given.slots or SLOTS[what], given.seconds, given.rounds, given.peers)
    ]
    text = markdown(lines)
    print(f"\n{text}")
    if whole(given) or given.out:
        record = {"command": COMMAND, "settings": {"seconds": given.seconds, "rounds": given.rounds}}
        path = report.save("replay", {**record, "rows": lines}, text, given.out or report.RESULTS)
        print(f"saved {path.name}")
    if whole(given):
        report.publish("replay", "Replay", COMMAND, page=PAGE)


if __name__ == "__main__":
    main()
