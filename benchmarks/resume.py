"""Exact resume: runs stopped at random moments and resumed must end bit-equal to one that was never disturbed.

DQN in {CartPole, Pong} x {uniform, prioritized} x {n-step 1, 3}, and every other member of the family once. In each
cell runs are killed (SIGKILL) at random moments and resumed until they are done; also once each by SIGTERM, Ctrl-C and
by finishing early and being extended.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import command, report
from qfleet.watch import CLOCK_FIELDS

KILLS_PER_RUN = 4
MAX_MISSES = 20  # runs that were done before their kill came
STARTING_SHARE, SAVING_SHARE = 0.15, 0.3
SAVE_SECONDS = 5.0  # how long to lie in wait for a save
LIMIT_SECONDS = 600.0
STEP_FOLDER = re.compile(r"step_\d{12}")
ALIKE = "runtime.threads=1 log.every_steps=50 save.max_share=1 save.every_steps=200"


@dataclass(frozen=True)
class World:
    """How long a run is, and what is small about it; `replay` is for those that have one."""

    steps: int
    settings: str
    replay: str


SMALL = {
    "CartPole-v1": World(
        4_000,
        # A score that CartPole cannot reach: every run goes on to its last step.
        "env.num=4 eval.every_steps=1000 eval.episodes=2 eval.test_episodes=4 until.score=501",
        "replay.capacity=1500 replay.samples_per_insert=8 algo.batch_size=32 algo.learn_start_steps=200",
    ),
    "Pendulum-v1": World(
        2_000,
        "env.num=4 eval.every_steps=1000 eval.episodes=2 eval.test_episodes=4",
        "replay.capacity=1500 replay.samples_per_insert=8 algo.batch_size=32 algo.learn_start_steps=200",
    ),
    "ALE/Pong-v5": World(
        2_400,
        "env.num=2 net.torso.type=nature net.torso.width=32 eval.every_steps=600 eval.episodes=1 eval.test_episodes=1",
        "replay.capacity=2000 replay.samples_per_insert=1 algo.batch_size=8 algo.learn_start_steps=200 "
        "algo.target.type=copy algo.target.every_updates=50",
    ),
}
# Members of the family: a preset if there is one, and what is added or made small.
FAMILY = {
    "dqn": ("", ""),
    "c51": ("c51-small", ""),
    "qrdqn": ("qrdqn-small", ""),
    "iqn": ("iqn-small", ""),
    "noisy": ("noisy-small", ""),
    "munchausen": ("munchausen-small", ""),
    "rainbow": ("rainbow-small", ""),
    "r2d2": ("r2d2-small", "algo.batch_size=8 replay.samples_per_insert=16"),
    "pqn": ("pqn-small", "replay.rows=16 replay.minibatches=4"),
    "btr": ("btr-small", ""),
    "decqn": ("decqn-small", "algo.target.every_updates=20"),
    "spectral norm, dropout": ("", "net.spectral_norm=true net.dropout=0.1"),
}


@dataclass(frozen=True)
class Cell:
    """One combination of world, sampler and n-step, or (where these are None) what a member of the family has."""

    env: str
    sampler: str | None = None
    n_step: int | None = None
    member: str = "dqn"
    seed: int = 7

    @property
    def steps(self) -> int:
        """How long the undisturbed run is."""
        return SMALL[self.env].steps

    def settings(self) -> list[str]:
        """The plan as flags and paths, all but the number of steps."""
        world, (preset, more) = SMALL[self.env], FAMILY[self.member]
        replay = "" if self.member == "pqn" else world.replay
        chosen = dict(word.split("=") for word in f"{ALIKE} {world.settings} {replay} {more}".split())
        if self.sampler is not None:
            chosen |= {"replay.sampler.type": self.sampler, "algo.n_step": str(self.n_step)}
        flags = ["--seed", str(self.seed), "--quiet", *(["--preset", preset] if preset else [])]
        return [*flags, *(f"{path}={value}" for path, value in chosen.items())]

    def train(self, out: Path, steps: int | None = None) -> list[str]:
        """The command that starts this cell's run."""
        where = ["--out", str(out), "--steps", str(steps or self.steps)]
        return [*QFLEET, "train", self.env, *where, *self.settings()]


# Not through the script: signals must reach the run itself.
QFLEET = (sys.executable, "-m", "qfleet")
CELLS = (
    *(Cell(*axes) for axes in product(("CartPole-v1", "ALE/Pong-v5"), ("uniform", "prioritized"), (1, 3))),
    *(Cell("Pendulum-v1" if name == "decqn" else "CartPole-v1", member=name) for name in FAMILY if name != "dqn"),
)


@dataclass(frozen=True)
class Moment:
    """When to send which signal: once so many steps are in the rows, some seconds later, or then at the next save."""

    signal: signal.Signals
    at_steps: int
    later_seconds: float
    in_save: bool = False


@dataclass
class Stop:
    """One stop: which signal, how long after the start, where it fell, and how the process left."""

    signal: str
    after_seconds: float
    where: str
    env_steps: int
    exit_code: int | None


@dataclass
class Trial:
    """One disturbed run from its start to its end."""

    stops: list[Stop] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reference:
    """The undisturbed run: how long it took to start, and from one row to the next."""

    folder: Path
    start_seconds: float
    row_seconds: float


class Failed(Exception):
    """A command that should have trained or resumed did not."""

    def __init__(self, line: list[str], what: str, errors: str = "") -> None:
        super().__init__(f"`qfleet {' '.join(line[len(QFLEET) :])}` {what}\n{errors[-2000:]}".strip())


def finish(line: list[str]) -> float:
    """Run a command to its end and say how long it took."""
    done = command.run(line, LIMIT_SECONDS)
    if done.exit_code != 0:
        raise Failed(line, f"left with {done.exit_code}", done.errors)
    return done.seconds


def make_reference(cell: Cell, folder: Path) -> Reference:
    """Train once without disturbance."""
    seconds = finish(cell.train(folder))
    run = only_run(folder)
    rows = read_rows(run) if run else []
    if run is None or not rows:
        raise Failed(cell.train(folder), "left no rows in its run folder")
    trained = float(rows[-1]["seconds"])
    return Reference(run, max(0.0, seconds - trained), trained / len(rows))


def interrupt(line: list[str], moment: Moment, out: Path) -> Stop | None:
    """Start a command and stop it when the moment has come; None when it was done before that."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        begin = time.monotonic()
        process = command.start(line, errors, quiet=True)
        try:
            if not wait_for(moment, process, out):
                if process.returncode:
                    raise Failed(line, f"left with {process.returncode}", command.tail(errors))
                return None
            seconds = time.monotonic() - begin
            code = signalled(line, process, moment.signal)
        finally:
            command.stop(process)
    return Stop(moment.signal.name, seconds, place(only_run(out), process.pid), progress(out), code)


def wait_for(moment: Moment, process: "subprocess.Popen[str]", out: Path) -> bool:
    """True when the moment has come, False when the process ended first."""
    limit = time.monotonic() + LIMIT_SECONDS
    while progress(out) < moment.at_steps and time.monotonic() < limit:
        if process.poll() is not None:
            return False
        time.sleep(0.005)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(moment.later_seconds)
    if moment.in_save:
        wait_for_save(process, out)
    return process.poll() is None


def progress(out: Path) -> int:
    """Steps according to the newest row."""
    run = only_run(out)
    rows = read_rows(run) if run else []
    return int(rows[-1]["env_steps"]) if rows else 0


def wait_for_save(process: "subprocess.Popen[str]", out: Path) -> None:
    """Until a save has begun, if one does soon."""
    limit = time.monotonic() + SAVE_SECONDS
    while time.monotonic() < limit and process.poll() is None:
        if any(out.glob("*/checkpoints/.tmp-*")):
            return
        time.sleep(0.0005)


def signalled(line: list[str], process: "subprocess.Popen[str]", number: signal.Signals) -> int:
    """Send the signal and wait for the exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        raise Failed(line, f"still ran 60 s after {number.name}") from None


def only_run(out: Path) -> Path | None:
    """The one run folder inside an `--out` folder, once it is there."""
    found = [path for path in out.iterdir() if (path / "run.toml").exists()] if out.exists() else []
    return found[0] if found else None


def place(run: Path | None, process_id: int) -> str:
    """Where a stop fell, read from what it left behind."""
    if run is None:
        return "before the run folder"
    status = read_status(run)
    if not status or status.get("pid") not in (process_id, None):
        return "while starting"
    entries = list((run / "checkpoints").glob("*"))
    if any(not STEP_FOLDER.fullmatch(entry.name) for entry in entries):
        return "inside a save"
    return "training" if entries else "before the first checkpoint"


def disturb(cell: Cell, reference: Reference, signals: list[signal.Signals], chance: random.Random) -> Trial:
    """One run, stopped by each signal in turn, resumed every time, then compared."""
    trial = Trial()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        try:
            out = stop_and_resume(cell, reference, signals, chance, Path(name), trial)
            trial.differences = differences(reference.folder, only_run(out))
        except Failed as failure:
            trial.differences = [str(failure)]
    return trial


def stop_and_resume(
    cell: Cell,
    reference: Reference,
    signals: list[signal.Signals],
    chance: random.Random,
    folder: Path,
    trial: Trial,
) -> Path:
    """Train, be stopped, resume, be stopped, ... and at last finish; answers the `--out` folder that was used."""
    out = folder / "0"
    line = cell.train(out)
    for turn, number in enumerate(signals, start=1):
        moment = choose_moment(number, progress(out), cell.steps, reference, chance)
        stop = interrupt(line, moment, out)
        if stop is None:
            return out
        trial.stops.append(stop)
        run = only_run(out)
        if run is not None and newest_checkpoint(run):
            line = [*QFLEET, "resume", str(run), "--quiet"]
        else:  # nothing was promised yet: such a run is begun again
            out = folder / str(turn)
            line = cell.train(out)
    finish(line)
    return out


def choose_moment(
    number: signal.Signals, done_steps: int, steps: int, reference: Reference, chance: random.Random
) -> Moment:
    """A random moment: mostly while it trains, some while it starts, some once a save has begun."""
    if chance.random() < STARTING_SHARE:
        return Moment(number, 0, chance.uniform(0.0, reference.start_seconds))
    at_steps = chance.randint(min(done_steps, steps), steps)
    return Moment(number, at_steps, chance.uniform(0.0, 1.5 * reference.row_seconds), chance.random() < SAVING_SHARE)


def extend(cell: Cell, reference: Reference, chance: random.Random) -> Trial:
    """A run that finished early and was then extended."""
    steps = chance.randrange(cell.steps // 4, cell.steps * 3 // 4)
    trial = Trial([Stop("completion", 0.0, "at the end of a shorter run", steps, 0)])
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        try:
            finish(cell.train(Path(name), steps))
            run = only_run(Path(name))
            finish([*QFLEET, "resume", str(run), "--steps", str(cell.steps), "--quiet"])
            trial.differences = differences(reference.folder, run)
        except Failed as failure:
            trial.differences = [str(failure)]
    return trial


def differences(one: Path, other: Path | None) -> list[str]:
    """Everything in which two runs end differently, the clock aside; empty when they are equal."""
    if other is None:
        return ["there is no run folder"]
    found = list(row_differences(read_rows(one), read_rows(other)))
    mine, yours = newest_checkpoint(one), newest_checkpoint(other)
    if mine is None or yours is None:
        return [*found, "a run has no checkpoint"]
    if mine.name != yours.name:
        return [*found, f"checkpoints: {mine.name} and {yours.name}"]
    return [*found, *file_differences(mine, yours)]


def row_differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> Iterator[str]:
    """Metric rows that differ in more than clock fields."""
    if len(one) != len(other):
        yield f"metrics.jsonl: {len(one)} and {len(other)} rows"
    for index, (mine, yours) in enumerate(zip(one, other, strict=False)):
        if timeless(mine) != timeless(yours):
            yield f"metrics.jsonl row {index}: {timeless(mine)} and {timeless(yours)}"[:500]


def file_differences(one: Path, other: Path) -> Iterator[str]:
    """Files of two checkpoints that differ; not the manifest: hashes of the others, and the clock."""
    names = [{str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} for folder in (one, other)]
    for name in sorted(names[0] ^ names[1]):
        yield f"{name}: only in one of them"
    for name in sorted((names[0] & names[1]) - {"manifest.json"}):
        if content(one / name) != content(other / name):
            yield f"{name}: different"


def content(path: Path) -> Any:
    """What must be equal: bytes, or for JSON the document without its clock."""
    if path.suffix == ".json":
        return timeless(json.loads(path.read_text(encoding="utf-8")))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def timeless(value: Any) -> Any:
    """The value without clock fields, at any depth."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in CLOCK_FIELDS}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def newest_checkpoint(run: Path) -> Path | None:
    """The last complete checkpoint of a run."""
    return max((path.parent for path in run.glob("checkpoints/step_*/manifest.json")), default=None)


def read_status(run: Path) -> dict[str, Any]:
    """status.json, empty when it is not there."""
    with contextlib.suppress(FileNotFoundError):
        status: dict[str, Any] = json.loads((run / "status.json").read_text(encoding="utf-8"))
        return status
    return {}


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The whole rows of a run's metrics; a torn last line is not one."""
    with contextlib.suppress(FileNotFoundError):
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines if line]
    return []


def examine(cell: Cell, kills: int, seed: int) -> dict[str, Any]:
    """One cell: the reference, then disturbed runs until enough stops of every kind have fallen."""
    chance = random.Random(f"{seed} {cell}")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        reference = make_reference(cell, Path(folder))
        trials = [extend(cell, reference, chance)]
        for number, wanted in ((signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGKILL, kills)):
            trials += disturbed(cell, reference, number, wanted, chance)
    wrong = sum(bool(trial.differences) for trial in trials)
    fallen = sum(stop.signal == "SIGKILL" for trial in trials for stop in trial.stops)
    print(
        f"{cell}: {fallen} kills, {len(trials)} runs, {wrong} different, {time.monotonic() - begin:.0f} s", flush=True
    )
    return {"cell": asdict(cell), "kills": fallen, "trials": [asdict(trial) for trial in trials], "different": wrong}


def disturbed(
    cell: Cell, reference: Reference, number: signal.Signals, wanted: int, chance: random.Random
) -> Iterator[Trial]:
    """Runs stopped by one kind of signal until so many have fallen; a run may be done before its turn comes."""
    fallen = misses = 0
    while fallen < wanted and misses < MAX_MISSES:
        trial = disturb(cell, reference, [number] * min(KILLS_PER_RUN, wanted - fallen), chance)
        fallen += len(trial.stops)
        misses += not trial.stops
        yield trial


def row(result: dict[str, Any]) -> tuple[Any, ...]:
    """One cell's line of the table."""
    cell = result["cell"]
    stops = [stop for trial in result["trials"] for stop in trial["stops"]]
    where = Counter(stop["where"] for stop in stops)
    placed = ", ".join(f"{count} {name}" for name, count in where.most_common())
    others = ", ".join(sorted({stop["signal"] for stop in stops} - {"SIGKILL"}))
    runs = len(result["trials"])
    axes = (cell["member"], cell["env"], cell["sampler"] or "its own", cell["n_step"] or "its own")
    return (*axes, result["kills"], others, runs, placed, result["different"])


def main() -> None:
    """Examine every cell, print the table, save it; leaves with 1 when anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs in all, spread over the cells")
    parser.add_argument("--jobs", type=int, default=2, help="cells at the same time")
    parser.add_argument("--seed", type=int, default=0, help="decides when the kills fall")
    parser.add_argument("--env", choices=sorted(SMALL), help="only this one")
    parser.add_argument("--member", choices=list(FAMILY), help="only this member of the family")
    given = parser.parse_args()
    cells = [cell for cell in CELLS if given.env in (None, cell.env) and given.member in (None, cell.member)]
    if not cells:
        parser.error(f"--member {given.member} is not tried in {given.env}")
    shares = [given.kills // len(cells) + (index < given.kills % len(cells)) for index in range(len(cells))]
    with ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(examine, cells, shares, [given.seed] * len(cells)))
    heads = ("member", "environment", "sampler", "n-step", "kills", "also stopped by", "runs", "where stops fell")
    text = report.table((*heads, "different"), [row(result) for result in results])
    path = report.save("resume", {"settings": vars(given), "cells": results}, text)
    if given.kills >= 100 and cells == list(CELLS):
        report.publish("resume", "Exact resume", "scripts/bench resume --kills 100")
    total = sum(result["different"] for result in results)
    kills = sum(result["kills"] for result in results)
    print(f"\n{text}\n{kills} kills, {total} runs that differ; saved {path.relative_to(report.ROOT)}")
    raise SystemExit(1 if total else 0)


if __name__ == "__main__":
    main()
