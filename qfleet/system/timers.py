"""Time per stage of the loop in nanoseconds, summed over laps. A lap costs one or two microseconds."""

from collections.abc import Callable
from time import monotonic_ns

STAGES = ("env", "infer", "insert", "sample", "update", "sync", "save", "eval", "idle", "compile")


class CompileTimer:
    """Compile time in this process: a stage of its own, subtracted from the stage in which it happened."""

    __slots__ = ("clock", "depth", "started_ns", "total_ns")

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self.clock = clock
        self.started_ns = 0
        self.depth = 0
        self.total_ns = 0

    def __enter__(self) -> None:
        """Start timing a compilation; nested ones are part of the outermost."""
        if self.depth == 0:
            self.started_ns = self.clock()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.total_ns += self.clock() - self.started_ns


COMPILE_TIMER = CompileTimer()


class Lap:
    """`with lap:` adds the time inside the block. Laps of one stopwatch must not nest: time would count twice."""

    __slots__ = ("clock", "compile_ns_at_start", "started_ns", "total_ns")

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.started_ns = 0
        self.compile_ns_at_start = 0
        self.total_ns = 0

    def __enter__(self) -> None:
        self.started_ns = self.clock()
        self.compile_ns_at_start = COMPILE_TIMER.total_ns

    def __exit__(self, *_: object) -> None:
        self.total_ns += self.clock() - self.started_ns - (COMPILE_TIMER.total_ns - self.compile_ns_at_start)


class Stopwatch:
    """A lap for each stage: `with watch.update: ...`. Time outside all laps counts in `wall` only."""

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self.clock = clock
        self.started_ns = clock()
        self.compile_ns_at_start = COMPILE_TIMER.total_ns
        # stepping environments, selecting actions
        self.env = Lap(clock)
        self.infer = Lap(clock)
        # experience into the replay, batches out of it
        self.insert = Lap(clock)
        self.sample = Lap(clock)
        # learning, and publishing the new weights
        self.update = Lap(clock)
        self.sync = Lap(clock)
        self.save = Lap(clock)
        self.eval = Lap(clock)
        self.idle = Lap(clock)  # waiting for experience

    def read(self) -> dict[str, int]:
        """Nanoseconds per stage, and `wall`: all time since the stopwatch was made."""
        laps: dict[str, int] = {stage: getattr(self, stage).total_ns for stage in STAGES if stage != "compile"}
        return {
            **laps,
            "compile": COMPILE_TIMER.total_ns - self.compile_ns_at_start,
            "wall": self.clock() - self.started_ns,
        }
