"""Leaks: memory, descriptors, threads and processes of a long run, sampled; none may grow once the replay is full."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import report

WARM_SHARE = 0.25  # of the time, in which buffers fill
# More than this per hour is a leak; samples of a minute scatter by far less.
MOST_PER_HOUR = {"megabytes": 60.0, "descriptors": 4.0, "threads": 2.0, "processes": 1.0, "shared": 1.0}
SETTINGS = ("runtime.type=processes", "runtime.inference=local", "runtime.replay_process=true", "actors.num=2")
SETTINGS += ("env.num=4", "env.workers=2", "replay.capacity=5000", "save.every_steps=2000", "save.max_share=1")
SETTINGS += ("log.every_steps=500", "eval.every_steps=10000", "eval.episodes=5", "eval.test_episodes=5")
SETTINGS += ("until.score=none", "until.steps=1000000000", "runtime.threads=1", "algo.explore.steps=1000")


@dataclass(frozen=True)
class Sample:
    """What the processes of a run hold at one moment."""

    seconds: float
    megabytes: float  # not shared with others
    descriptors: int
    threads: int
    processes: int
    shared: int  # names in /dev/shm


def tree(pid: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from tree(int(child))


def held(pid: int) -> tuple[float, int, int]:
    """Megabytes, descriptors and threads of one process; nothing if it has just ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        private = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
        return private / 1024, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0.0, 0, 0


def sample(pid: int, began: float) -> Sample:
    """Everything at one moment."""
    pids = list(tree(pid))
    sizes = [held(each) for each in pids]
    megabytes, descriptors, threads = (sum(column) for column in zip(*sizes, strict=True))
    shared = len(os.listdir("/dev/shm"))  # noqa: S108  it is only counted
    return Sample(time.monotonic() - began, megabytes, int(descriptors), int(threads), len(pids), shared)


def watch(seconds: float, every: float, folder: Path) -> list[Sample]:
    """Samples of one run of so many seconds."""
    words = ["train", "Acrobot-v1", "--quiet", "--out", str(folder), *SETTINGS, f"until.seconds={seconds}"]
    log = folder / "output.log"
    with log.open("wb") as output:
        command = [sys.executable, "-P", "-m", "qfleet", *words]
        process = subprocess.Popen(command, stdout=output, stderr=output)  # noqa: S603  our own program
        began = time.monotonic()
        samples = []
        while process.poll() is None and time.monotonic() - began < seconds - every:
            time.sleep(every)
            samples.append(sample(process.pid, began))
        code = process.wait(timeout=120)
    if code:
        raise SystemExit(f"the run ended with {code}: {log.read_text(errors='replace')[-2000:]}")
    return samples


def slopes(samples: list[Sample]) -> dict[str, float]:
    """Growth per hour of each number, by least squares over the samples after the warm-up."""
    late = samples[int(WARM_SHARE * len(samples)) :]
    hours = np.array([each.seconds for each in late]) / 3600
    return {name: float(np.polyfit(hours, [asdict(each)[name] for each in late], 1)[0]) for name in MOST_PER_HOUR}


def leaks(samples: list[Sample]) -> dict[str, float]:
    """What grows by more than it may."""
    return {name: slope for name, slope in slopes(samples).items() if slope > MOST_PER_HOUR[name]}


def main() -> int:
    """Watch a run, print the table, and fail if something grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = watch(60 * asked.minutes, asked.every, Path(folder))
    found = slopes(samples)
    rows = [
        (name, asdict(samples[int(WARM_SHARE * len(samples))])[name], asdict(samples[-1])[name], found[name], most)
        for name, most in MOST_PER_HOUR.items()
    ]
    print(f"{len(samples)} samples in {asked.minutes:g} minutes\n")
    print(report.table(("what", "after warm-up", "at the end", "growth per hour", "most"), rows))
    grown = leaks(samples)
    print("leaks: " + (", ".join(grown) or "none"))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
