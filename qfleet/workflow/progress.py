"""What a workflow says while it works: a line when a stage begins or ends, and how far it is."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

EVERY_SECONDS = 5.0
Say = Callable[[str], object]
Show = Callable[[int, int], object]


@dataclass(eq=False)
class StageProgress:
    """How far a stage is, said every few seconds."""

    stage: str
    say: Say
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    said: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()
        self.said = self.began

    def show(self, done: int, num: int | None, unit: str) -> None:
        """Show how many are done, of `num` if that is known."""
        now = self.clock()
        if now - self.said < EVERY_SECONDS or not done:
            return
        self.said = now
        rate = done / (now - self.began)
        if num is None:
            self.say(f"{self.stage:<9} {done:,} {unit}, {rate:,.0f}/s")
            return
        left = max(0, num - done) / rate
        self.say(f"{self.stage:<9} {done:,} of {num:,} {unit}, {rate:,.0f}/s, {time_text(left)} left")


def time_text(seconds: float) -> str:
    """A duration in words: 42 s, 3 min 10 s, 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
