"""Does memory stay flat? Pong trained for half an hour, its memory looked at as it runs.

The replay is small, so that it is full after a few minutes: what grows after that is a leak.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import command, report

MOST_GROWTH = 0.02  # of what was there when the replay was full
PLAN = ("env.frame_size=42", "replay.capacity=20_000", "algo.learn_start_steps=2_000", "until.steps=100_000_000")
FLEET = ("runtime.type=processes", "actors.num=2", "eval.every_steps=20_000", "save.every_seconds=60")


def family(parent: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield parent
    for listed in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in listed.read_text(encoding="ascii").split():
            yield from family(int(child))


def resident_bytes(parent: int) -> int:
    """Memory of a process and its descendants; what several share counts once (proportional set size)."""
    total = 0
    for process in family(parent):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:
            continue  # it has just ended
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def watch(pid: int, found: list[tuple[float, int]], stop: threading.Event, every_seconds: float) -> None:
    """Look every few seconds until told to stop."""
    begin = time.monotonic()
    while not stop.wait(every_seconds):
        found.append((time.monotonic() - begin, resident_bytes(pid)))


def measure(seconds: float, every_seconds: float) -> dict[str, Any]:
    """Train for so long; the memory of the second and of the last fifth of the time."""
    found: list[tuple[float, int]] = []
    stop = threading.Event()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
    ):
        words = [*PLAN, *FLEET, f"until.seconds={seconds:g}"]
        training = command.start(command.qfleet("train", "ALE/Pong-v5", "--quiet", "--out", folder, *words), errors)
        watcher = threading.Thread(target=watch, args=(training.pid, found, stop, every_seconds), daemon=True)
        watcher.start()
        try:
            code = training.wait(seconds + 300)
        finally:
            stop.set()
            command.stop(training)
    fifth = len(found) // 5
    early, late = (
        statistics.median(size for _, size in part) for part in (found[fifth : 2 * fifth], found[-fifth - 1 : -1])
    )
    growth = late / early - 1.0
    return {
        "seconds": seconds,
        "exit_code": code,
        "early_bytes": early,
        "late_bytes": late,
        "growth": growth,
        "met": growth <= MOST_GROWTH,
        "curve": [(round(at, 1), size) for at, size in found],
    }


def main() -> None:
    """Train, look, tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the results")
    given = parser.parse_args()
    found = measure(60 * given.minutes, every_seconds=max(0.2, given.minutes / 3))
    row = (
        f"{given.minutes:g}",
        f"{found['early_bytes'] / 1e6:,.0f} MB",
        f"{found['late_bytes'] / 1e6:,.0f} MB",
        f"{found['growth']:+.1%}",
        f"<= {MOST_GROWTH:.0%}",
        "yes" if found["met"] else "no",
    )
    table = report.table(("minutes", "second fifth", "last fifth", "growth", "bar", "met"), [row])
    report.save("flat", {"command": "scripts/bench flat", **found}, table, given.out)
    print(table)
    if given.out == report.RESULTS:
        text = (report.RESULTS / "flat.md").read_text(encoding="utf-8").partition("\n\n")[2]
        body = f"## Memory over half an hour\n\n`scripts/bench flat`: {text}"
        report.replace_section(report.PAGE.with_name("speed.md"), "flat", body)


if __name__ == "__main__":
    main()
