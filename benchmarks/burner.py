"""Keeps one core busy with plain arithmetic, so that others are measured on a machine that has other work too.

Nothing is pinned: the burner competes for processor time as any program does. It says how much it got, because a
burner that was starved, or that ended too soon, means that the machine was not busy.
"""

import argparse
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO

from benchmarks import command
from benchmarks.pace import Row, say

LOOPS = 20_000  # between two looks at the clock, about a millisecond
TELL_SECONDS = 0.1
START_SECONDS = 20.0
# Two threads of somebody else and the burner on two cores get two thirds of a core each.
LEAST_SHARE = 0.5


def work(loops: int) -> float:
    """Integers and floats that stay in the processor."""
    value = 1.0
    for number in range(loops):
        value = value * 0.999 + number % 7
    return value


def burn(
    seconds: float,
    *,
    wall: Callable[[], float] = time.monotonic,
    cpu: Callable[[], float] = time.process_time,
    tell: Callable[[Row], None] = say,
) -> None:
    """Work until the seconds are over, and say every moment how much processor time that took so far."""
    begin = wall()
    used = cpu()
    told = -TELL_SECONDS
    while (spent := wall() - begin) < seconds:
        work(LOOPS)
        if spent - told >= TELL_SECONDS:
            told = spent
            tell({"kind": "burner", "seconds": wall() - begin, "cpu_seconds": cpu() - used})


class Burner:
    """A burner beside whatever happens inside `with`; ends by itself after `limit_seconds`."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self.rows: command.Rows = []

    def __enter__(self) -> "Burner":
        """Start it, and wait until it burns."""
        self.errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")
        words = command.here("burner", "--seconds", str(self.limit_seconds))
        self.begin = time.monotonic()
        self.process: subprocess.Popen[str] = command.start(words, self.errors)
        reading = (self.process.stdout, self.begin, self.rows)
        self.reader = threading.Thread(target=command.collect, args=reading, daemon=True)
        self.reader.start()
        while not self.rows:
            if self.process.poll() is not None or time.monotonic() - self.begin > START_SECONDS:
                self.close()
                raise RuntimeError(f"the burner did not start: {command.tail(self.errors)}")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.close()

    def close(self) -> None:
        """End it and everything it said."""
        command.stop(self.process)
        self.reader.join(10)

    def share(self) -> float:
        """The part of a core that it has had, from its first word until now; one that has ended has none."""
        return share(list(self.rows), time.monotonic() - self.begin)


def share(rows: command.Rows, now: float) -> float:
    """Processor time by time, from the moment of the first row until now."""
    if not rows or now <= rows[0][0]:
        return 0.0
    used = float(rows[-1][1]["cpu_seconds"] - rows[0][1]["cpu_seconds"])
    return used / (now - rows[0][0])


def main() -> None:
    """Burn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="its limit")
    burn(parser.parse_args().seconds)


if __name__ == "__main__":
    main()
