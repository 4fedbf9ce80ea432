"""What is asked of a replay, how fast it does it per second of processor time, and the rows that say so.

Whoever takes part gives a `Part`: calls that insert one step or 64, draw a batch, and draw one and tell priorities.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.pace import say

MANY = 64
BATCHES = (32, 256)
TURNS = 3  # the best of these counts: whatever else runs only ever makes it slower
SLOTS = {"vector": 1_000_000, "frames": 50_000}
INSERT, UPDATE = "insert", "sample + update"


@dataclass(frozen=True)
class Part:
    """One side of the contest, full to the brim."""

    insert_one: Callable[[], Any]
    insert_many: Callable[[], Any]
    draw: Callable[[int], Any]
    learn: Callable[[int], Any]


def cpu_rate(call: Callable[[], Any], seconds: float, clock: Callable[[], float] = time.process_time) -> float:
    """Calls per second of processor time."""
    call()
    best = 0.0
    for _ in range(TURNS):
        begin, calls = clock(), 0
        while (spent := clock() - begin) < seconds / TURNS:
            for _ in range(10):
                call()
            calls += 10
        best = max(best, calls / spent)
    return best


def figures(part: Part, seconds: float) -> dict[str, float]:
    """Every figure: steps or batches per second."""
    gc.disable()
    found = {
        f"{INSERT} 1": cpu_rate(part.insert_one, seconds),
        f"{INSERT} {MANY}": MANY * cpu_rate(part.insert_many, seconds),
    }
    for size in BATCHES:
        found[f"sample {size}"] = cpu_rate(lambda size=size: part.draw(size), seconds)  # type: ignore[misc]
        found[f"{UPDATE} {size}"] = cpu_rate(lambda size=size: part.learn(size), seconds)  # type: ignore[misc]
    gc.enable()
    return found


def tell(make: Callable[[str, int], Part], what: str, slots: int, seconds: float) -> None:
    """Measure one side and say the figures in one row."""
    say({"kind": "figures", "what": what, "slots": slots, **figures(make(what, slots), seconds)})
