"""Where the time goes: nanoseconds per stage, added up by laps. A lap costs a microsecond or two."""

from collections.abc import Callable
from time import monotonic_ns

STAGES = ("env", "infer", "insert", "sample", "update", "sync", "save", "eval", "idle")


class Lap:
    """`with lap:` adds the time spent inside. Laps of one stopwatch do not nest: time would count twice."""

    __slots__ = ("begun", "clock", "spent")

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock, self.begun, self.spent = clock, 0, 0

    def __enter__(self) -> None:
        self.begun = self.clock()

    def __exit__(self, *_: object) -> None:
        self.spent += self.clock() - self.begun


class Stopwatch:
    """A lap for each stage: `with watch.update: ...`. What no lap covers is in `wall` alone."""

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self.clock, self.began = clock, clock()
        self.env, self.infer = Lap(clock), Lap(clock)  # stepping the worlds, choosing actions
        self.insert, self.sample = Lap(clock), Lap(clock)  # experience into the replay, batches out of it
        self.update, self.sync = Lap(clock), Lap(clock)  # learning, and showing the new weights
        self.save, self.eval, self.idle = Lap(clock), Lap(clock), Lap(clock)  # idle: nothing to learn from yet

    def read(self) -> dict[str, int]:
        """Nanoseconds by stage, and `wall`: all since the beginning."""
        laps: dict[str, int] = {stage: getattr(self, stage).spent for stage in STAGES}
        return {**laps, "wall": self.clock() - self.began}
