"""A soak of learning in epochs: learners are killed at random, and each transition is still used once per epoch.

Runs with 1, 2, 3 and 4 learners. What is killed (SIGKILL) is the whole run, which then goes on from its newest
checkpoint, half the time with another number of learners; or one of the other learners, whose part of the batch the
rest reads. One learner alone must end with the bits of a run that was never killed.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.epochs_child import LENGTHS
from benchmarks.soak_learners import is_up
from qfleet.data import Spec
from qfleet.datasets.format import Description, RecordedEpisode, spec_columns, write_dataset
from qfleet.datasets.storage import open_place
from qfleet.save import Checkpoints

NUM_STEPS = sum(LENGTHS)
EPOCHS = 40
LONGEST_SECONDS = 300.0  # from one kill to the next, or to the end
SPEC = Spec((3,), "float32", (2,))


@dataclass
class Outcome:
    """What was killed, and what was found."""

    learners: int
    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    mid_epoch: int = 0  # kills that fell while an epoch was half done
    transitions: int = 0  # that were used, and had to be
    differences: int = 0  # transitions used more or less often than once in an epoch
    unequal: int = 0  # runs of one learner that ended with other bits
    changed: int = 0  # times another number of learners was asked for


def make_data(folder: Path) -> None:
    """Seven episodes in seven files."""

    def episode(number: int, length: int) -> RecordedEpisode:
        rng = np.random.default_rng(number)
        obs = rng.standard_normal((length + 1, 3)).astype(np.float32)
        action = rng.integers(0, 2, length)
        reward = rng.standard_normal(length)
        return RecordedEpisode(f"e{number}", {"obs": obs}, action, reward, terminated=True, truncated=False)

    made = (episode(number, length) for number, length in enumerate(LENGTHS))
    write_dataset(open_place(str(folder)), Description("Logs-v0", SPEC, spec_columns(SPEC)), made, {}, 3_000)


def start(data: Path, out: Path, learners: int, epochs: int, wanted: int = 0) -> "subprocess.Popen[bytes]":
    """The run, in a process of its own."""
    out.mkdir(exist_ok=True)
    call = "import sys; from benchmarks.epochs_child import main; main(*sys.argv[1:])"
    command = [sys.executable, "-c", call, str(data), str(out), str(learners), str(epochs), str(wanted)]
    with open(out / "errors", "ab") as errors:
        return subprocess.Popen(command, cwd=report.ROOT, stdout=subprocess.DEVNULL, stderr=errors)  # noqa: S603


def size(out: Path) -> int:
    """Bytes that the run has noted."""
    path = out / "positions"
    return path.stat().st_size if path.exists() else 0


def wait_for(child: "subprocess.Popen[bytes]", out: Path, bytes_more: int) -> bool:
    """Wait until the run has noted so much more; False if it ended before."""
    until = size(out) + bytes_more
    limit = time.monotonic() + LONGEST_SECONDS
    while size(out) < until and child.poll() is None:
        if time.monotonic() > limit:
            child.kill()
            raise TimeoutError(f"{out} did not go on within {LONGEST_SECONDS:g} s")
        time.sleep(0.001)
    return child.poll() is None


def workers_of(out: Path) -> list[int]:
    """The processes of the other learners that are up."""
    path = out / "workers"
    pids = path.read_text(encoding="utf-8").split() if path.exists() else []
    return [int(pid) for pid in pids if is_up(int(pid))]


def used(out: Path) -> list[tuple[int, int]]:
    """The batches of the history that counts: going back drops those after the position."""
    found: list[tuple[int, int]] = []
    for line in (out / "positions").read_text(encoding="utf-8").splitlines():
        word, *numbers = line.split()
        if word == "back":
            found = [each for each in found if each[1] <= int(numbers[0])]
        else:
            found.append((int(numbers[0]), int(numbers[1])))
    return found


def is_mid_epoch(out: Path) -> bool:
    """Was an epoch half done when the run noted its last batch?"""
    batches = used(out)
    return bool(batches) and batches[-1][1] % NUM_STEPS != 0


def weights(out: Path) -> bytes:
    """The weights of a run's last checkpoint."""
    return Checkpoints(out / "run/checkpoints", writer=False).newest().read("model.safetensors")


def blow(child: "subprocess.Popen[bytes]", out: Path, outcome: Outcome, chance: random.Random) -> bool:
    """Kill the run or one of its other learners; is the run over?"""
    others = workers_of(out)
    if others and chance.random() < 0.6:
        os.kill(chance.choice(others), signal.SIGKILL)
        outcome.kills["learner"] += 1
        outcome.mid_epoch += is_mid_epoch(out)
        return False
    child.kill()
    (out / "workers").unlink(missing_ok=True)
    if child.wait(60) == -signal.SIGKILL:
        outcome.kills["run"] += 1
        outcome.mid_epoch += is_mid_epoch(out)
    return True


def survive(data: Path, out: Path, learners: int, epochs: int, kills: int, outcome: Outcome, seed: int = 0) -> None:
    """One run under at most `kills` kills, then to its end; what it used is compared with what it had to use."""
    chance = random.Random(seed)
    outcome.runs += 1
    until = sum(outcome.kills.values()) + kills
    child = start(data, out, learners, epochs)
    while sum(outcome.kills.values()) < until and wait_for(child, out, chance.randrange(8, 3_000)):
        if blow(child, out, outcome, chance):
            wanted = chance.choice([1, 2, 3, 4]) if learners > 1 and chance.random() < 0.5 else 0
            outcome.changed += bool(wanted)
            child = start(data, out, learners, epochs, wanted)
    if child.wait(LONGEST_SECONDS) != 0:
        raise RuntimeError(f"the run failed: {(out / 'errors').read_text(encoding='utf-8')[-2_000:]}")
    counts = Counter(position for begin, end in used(out) for position in range(begin, end))
    wanted_counts = Counter(range(NUM_STEPS * epochs))
    outcome.transitions += sum(wanted_counts.values())
    outcome.differences += sum(((counts - wanted_counts) + (wanted_counts - counts)).values())


def soak(folder: Path, learners: int, kills: int, epochs: int = EPOCHS) -> Outcome:
    """Runs with this number of learners until so many kills have fallen."""
    data = folder / "data"
    make_data(data)
    outcome = Outcome(learners)
    while sum(outcome.kills.values()) < kills:
        number = outcome.runs
        survive(data, folder / f"run{number}", learners, epochs, kills - sum(outcome.kills.values()), outcome, number)
        if learners == 1:
            whole = folder / "whole"
            if not whole.exists():
                survive(data, whole, 1, epochs, 0, Outcome(1))
            outcome.unequal += weights(whole) != weights(folder / f"run{number}")
    return outcome


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table."""
    rows: list[list[Any]] = []
    for each in outcomes:
        hits = [each.kills["run"], each.kills["learner"]]
        bits = each.unequal if each.learners == 1 else None
        rows.append(
            [each.learners, each.runs, *hits, each.mid_epoch, each.changed, each.transitions, each.differences, bits]
        )
    total = [sum(row[at] for row in rows) for at in range(1, 8)]
    headers = ["learners", "runs", "kills of the run", "of another learner", "in mid-epoch", "other number asked for"]
    headers += ["transitions to use", "differences", "runs with other bits"]
    return report.table(headers, [*rows, ["all", *total, None]])


def main() -> int:
    """Soak, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in all (default 100)")
    parser.add_argument("--no-save", action="store_true", help="write no results")
    options = parser.parse_args()
    outcomes = []
    for learners in (1, 2, 3, 4):
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(soak(Path(folder), learners, options.kills // 4))
        print(markdown(outcomes), flush=True)
    table = markdown(outcomes)
    if not options.no_save:
        record = {"rows": [{**vars(each), "kills": dict(each.kills)} for each in outcomes]}
        report.save("epochs_soak", record, f"`scripts/bench epochs_soak`\n\n{table}")
    return int(any(each.differences or each.unequal for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
