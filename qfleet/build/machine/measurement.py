"""Measures what this machine is good at, for the table in `table`; `python -m` measures what is missing in it.

Another program may be running meanwhile. So all ways of an update are measured in turn, the fastest round of each
counts, and rounds in which a thread of ours had to wait for a core do not. If too few rounds are left, nothing is kept.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import torch

from qfleet.build.isolated_call import call_isolated
from qfleet.build.machine.examples import (
    EXAMPLES,
    TEXTS,
    Contestant,
    LayoutContestant,
    LearnerContestant,
    example_plan,
    ways_of,
)
from qfleet.build.machine.table import (
    CHANNELS_LAST,
    COMPILED,
    COMPILING,
    CONTIGUOUS,
    GRIDS,
    LAYOUT,
    NEVER_SECONDS,
    ONE_THREAD,
    PICTURES,
    VECTORS,
    MachineTable,
    Seconds,
    read_table,
    write_table,
)
from qfleet.build.threads import torch_threads
from qfleet.system.cores import machine_cores

Show = Callable[[str], object]

NUM_ROUNDS = 6
MIN_ROUNDS = 2  # that nothing disturbed
ROUND_SECONDS = 0.03
MIN_CALLS = 2  # of a round
WARM_CALLS = 3
MAX_WAITING_SHARE = 0.05  # of a round, that threads of this process waited for a core
EXAMPLE_SECONDS = 6.0  # the longest for one example; a slow machine makes fewer rounds
COMPILE_SECONDS = 45.0  # the longest for compiling one example
MACHINE_SECONDS = 120.0  # what all of it takes at most
LIMIT_SHARE = 0.02  # of a run's expected time, for compiling before it
RUN_LIMIT_SECONDS = 30.0  # and in all
MIN_COMPILE_SECONDS = 20.0  # with less time a compiler is not started


class ContentionClock(Protocol):
    """The time, and how long threads of this process have waited for a core."""

    def now(self) -> float:
        """Seconds since some moment."""

    def waited(self) -> float:
        """Seconds that threads of this process have waited, since some moment."""


class ProcessClock:
    """The clock, and what Linux counts for each thread; elsewhere the time that the calling thread was not running."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def waited(self) -> float:
        """Seconds that threads of this process have waited, since some moment."""
        waits = []
        for file in Path("/proc/self/task").glob("*/schedstat"):
            with suppress(OSError, ValueError, IndexError):  # a thread that has just ended
                waits.append(int(file.read_text().split()[1]))
        return sum(waits) / 1e9 if waits else time.perf_counter() - time.thread_time()


def measure_example(name: str, clock: ContentionClock) -> Seconds | None:
    """Seconds of an example's update in every way; None if another program disturbed that."""
    example = EXAMPLES[name]
    contestants = {
        way: LearnerContestant(example_plan(example, **settings), example.spec)
        for way, settings in ways_of(name, machine_cores()).items()
    }
    try:
        return race(contestants, clock)
    finally:
        for contestant in contestants.values():
            contestant.close()


def measure_layouts(clock: ContentionClock) -> Seconds | None:
    """Seconds of convolutions in both layouts; None if another program disturbed that."""
    layouts = {CHANNELS_LAST: torch.channels_last, CONTIGUOUS: torch.contiguous_format}
    return race({name: LayoutContestant(EXAMPLES[PICTURES], layout) for name, layout in layouts.items()}, clock)


def race(contestants: Mapping[str, Contestant], clock: ContentionClock) -> Seconds | None:
    """Seconds of each contestant's update in the fastest undisturbed round; None if one of them had too few."""
    found = dict[str, list[float]]()
    begin = clock.now()
    for contestant in contestants.values():
        with torch_threads(contestant.threads):
            for _ in range(WARM_CALLS):
                contestant.update()
    for number in range(NUM_ROUNDS):
        if number >= MIN_ROUNDS and clock.now() - begin > EXAMPLE_SECONDS:
            break
        for name, contestant in contestants.items():
            with torch_threads(contestant.threads):
                seconds = round_seconds(contestant, clock)
            found.setdefault(name, []).extend([] if seconds is None else [seconds])
    enough = all(len(rounds) >= MIN_ROUNDS for rounds in found.values())
    return {name: min(rounds) for name, rounds in found.items()} if enough else None


def round_seconds(contestant: Contestant, clock: ContentionClock) -> float | None:
    """Seconds of an update in one round; None if it was disturbed."""
    begin = clock.now()
    waited = clock.waited()
    num = 0
    while num < MIN_CALLS or clock.now() - begin < ROUND_SECONDS:
        contestant.update()
        num += 1
    spent = clock.now() - begin
    disturbed = clock.waited() - waited > MAX_WAITING_SHARE * spent
    return None if disturbed or contestant.is_hindered() else spent / num


def measure_compiled(name: str, limit_seconds: float) -> Seconds:
    """Seconds to compile an example's update, and of the compiled update; nothing if that took too long.

    It is compiled in a process of its own, which can be ended by its limit and by Ctrl-C (a compiler in this process
    would take it for its own error), and with an empty cache.
    """
    with tempfile.TemporaryDirectory(prefix="qfleet-compile-") as folder:
        found = call_isolated(compile_seconds, (name, folder), limit_seconds)
    return dict(zip((COMPILING, COMPILED), found or (), strict=False))


def compile_seconds(name: str, folder: str) -> list[float]:
    """Seconds to compile and of a compiled update, without end if there is no compiler; empty if it was disturbed."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    example = EXAMPLES[name]
    contestant = LearnerContestant(example_plan(example, compile=True, threads=1, parallel="tasks"), example.spec)
    begin = time.perf_counter()
    contestant.update()
    spent = time.perf_counter() - begin
    if contestant.learner.compiled_update is None:
        return [NEVER_SECONDS, NEVER_SECONDS]
    found = race({COMPILED: contestant}, ProcessClock())
    return [] if found is None else [spent, found[COMPILED]]


def measure_for_run(table: MachineTable, name: str, updates: int, show: Show) -> MachineTable:
    """The table with what a long run needs of an example, kept for later runs."""
    show(f"measuring how long an update takes, to choose runtime.* (at most {RUN_LIMIT_SECONDS:.0f} s)")
    if not table.seconds(name):
        table = add_example(table, name, ProcessClock(), show)
    plain = table.seconds(name).get(f"float32 {ONE_THREAD}", 0.0)
    limit_seconds = min(RUN_LIMIT_SECONDS, LIMIT_SHARE * updates * plain)
    if name != PICTURES and limit_seconds >= MIN_COMPILE_SECONDS:
        table = add_compiled(table, name, limit_seconds, show)
    write_table(table)
    return table


def add_example(table: MachineTable, name: str, clock: ContentionClock, show: Show) -> MachineTable:
    """The table with an example measured, unless another program disturbed that."""
    found = measure_layouts(clock) if name == LAYOUT else measure_example(name, clock)
    if found is None:
        show(f"not measured: another program used the processor ({TEXTS[name]})")
        return table
    return table.with_example(name, found, time_now())


def add_compiled(table: MachineTable, name: str, limit_seconds: float, show: Show) -> MachineTable:
    """The table with an example compiled, unless that took too long or was disturbed."""
    show(f"compiling the update, to measure what that saves (at most {limit_seconds:.0f} s)")
    found = measure_compiled(name, limit_seconds)
    if not found:
        show(f"not measured: the compiler was not done within {limit_seconds:.0f} s, or disturbed ({TEXTS[name]})")
    return table.with_example(name, found, time_now()) if found and table.seconds(name) else table


def measure_machine(table: MachineTable, show: Show, *, compile: bool = True) -> MachineTable:
    """The table with everything measured again; what another program disturbed stays as it was."""
    clock = ProcessClock()
    for name in (*EXAMPLES, LAYOUT):
        table = add_example(table, name, clock, show)
    for name in (GRIDS, VECTORS) if compile else ():
        table = add_compiled(table, name, COMPILE_SECONDS, show)
    return table


def time_now() -> str:
    """The time, for the table."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def main() -> None:
    """Measure what the table does not hold, without compiling: the set-up calls this."""
    table = read_table()
    missing = [name for name in (*EXAMPLES, LAYOUT) if not table.seconds(name)]
    for name in missing:
        table = add_example(table, name, ProcessClock(), print)
    if missing:
        write_table(table)


if __name__ == "__main__":
    main()
