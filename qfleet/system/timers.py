"""Where the time goes: nanoseconds per stage, added up by laps. A lap costs a microsecond or two."""

from collections.abc import Callable
from time import monotonic_ns

STAGES = ("env", "infer", "insert", "sample", "update", "sync", "save", "eval", "idle", "compile")


class Compilers:
    """Nanoseconds that compilers took in this process: a stage of its own, and no part of the stage they ran in."""

    __slots__ = ("begun", "clock", "depth", "spent")

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self.clock = clock
        self.begun = 0
        self.depth = 0
        self.spent = 0

    def __enter__(self) -> None:
        """Something is compiled; what that needs may be compiled within."""
        if self.depth == 0:
            self.begun = self.clock()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.spent += self.clock() - self.begun


COMPILERS = Compilers()


class Lap:
    """`with lap:` adds the time spent inside. Laps of one stopwatch do not nest: time would count twice."""

    __slots__ = ("begun", "clock", "compiled", "spent")

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.begun = 0
        self.compiled = 0
        self.spent = 0

    def __enter__(self) -> None:
        self.begun = self.clock()
        self.compiled = COMPILERS.spent

    def __exit__(self, *_: object) -> None:
        self.spent += self.clock() - self.begun - (COMPILERS.spent - self.compiled)


class Stopwatch:
    """A lap for each stage: `with watch.update: ...`. What no lap covers is in `wall` alone."""

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self.clock = clock
        self.began = clock()
        self.compiled = COMPILERS.spent
        # stepping the worlds, choosing actions
        self.env = Lap(clock)
        self.infer = Lap(clock)
        # experience into the replay, batches out of it
        self.insert = Lap(clock)
        self.sample = Lap(clock)
        # learning, and showing the new weights
        self.update = Lap(clock)
        self.sync = Lap(clock)
        # idle: nothing to learn from yet
        self.save = Lap(clock)
        self.eval = Lap(clock)
        self.idle = Lap(clock)

    def read(self) -> dict[str, int]:
        """Nanoseconds by stage, and `wall`: all since the beginning."""
        laps: dict[str, int] = {stage: getattr(self, stage).spent for stage in STAGES if stage != "compile"}
        return {**laps, "compile": COMPILERS.spent - self.compiled, "wall": self.clock() - self.began}
