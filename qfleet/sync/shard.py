"""One part of a parameter server: a block of the weights, its optimiser, and the rules for gradients that come in.

A state machine: `now` is passed in, carriers live elsewhere. The version counts the steps made. A gradient says which
version it was computed from; its staleness is how many steps were made since. `max_staleness` 0 is synchronous: the
step is made of one gradient of everybody (or of all but the slowest `spare`), all of the same version. With s every
gradient is a step of its own, unless it is older than s: then it is refused, and its worker computes another. None
takes everything (Downpour, Dean et al. 2012). With a `window` what arrived makes one step every so many gradients, or
when the first of them has waited `window_seconds`; without a number, of all that came in that time.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Verdict: TypeAlias = Literal["applied", "waiting", "duplicate", "stale", "skipped"]
Step: TypeAlias = Callable[[Tensor, float], None]  # the optimiser: a gradient [n], and a factor for the learning rate


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's gradient of one block; `source` is (worker, incarnation, sequence)."""

    source: tuple[int, int, int]
    version: int
    gradient: Tensor


class Shard:
    """A block of weights [n]."""

    def __init__(
        self,
        weights: Tensor,
        step: Step,
        workers: int,
        *,
        max_staleness: int | None = 0,
        spare: int = 0,
        window: int | None = None,
        window_seconds: float = float("inf"),
        slow_down: bool = False,
        total: bool = False,
    ) -> None:
        self.weights = weights
        self.own = step
        self.workers = workers
        self.spare = spare
        self.max_staleness = max_staleness
        self.window = window
        self.window_seconds = window_seconds
        self.slow_down = slow_down
        self.total = total
        self.version = 0
        self.heard: dict[int, tuple[int, int]] = {}  # of every worker its incarnation and last sequence taken in
        self.waiting: list[Push] = []
        self.since = float("inf")  # when the oldest of those waiting came
        self.staleness: Counter[int] = Counter()
        self.refused: Counter[Verdict] = Counter()

    def push(self, push: Push, now: float) -> Verdict:
        """Take a gradient in, once."""
        worker, incarnation, sequence = push.source
        if self.heard.get(worker, (-1, -1)) >= (incarnation, sequence):
            return self.refuse("duplicate")
        self.heard[worker] = (incarnation, sequence)
        if self.max_staleness is not None and self.version - push.version > self.max_staleness:
            return self.refuse("stale")
        if self.max_staleness == 0 and self.holds(worker):
            return self.refuse("stale")  # of the same version: one of each is enough
        if self.collects and not bool(torch.isfinite(push.gradient).all()):
            return self.refuse("skipped")  # others were told that theirs is taken: it must not spoil the step
        if not self.waiting:
            self.since = now
        self.waiting.append(push)
        return "applied" if self.tend(now) else "waiting"

    def refuse(self, verdict: Verdict) -> Verdict:
        """Count it."""
        self.refused[verdict] += 1
        return verdict

    @property
    def needed(self) -> int:
        """Gradients that make a step."""
        if self.max_staleness == 0:
            return max(1, self.workers - self.spare)
        if self.window is None and self.window_seconds < float("inf"):
            return 1 << 62  # whatever comes in time
        return self.window or 1

    @property
    def collects(self) -> bool:
        """Is a step made of several gradients that nobody waits for?"""
        return self.max_staleness != 0 and self.needed > 1

    def tend(self, now: float) -> bool:
        """Make the step if enough is there, or has waited long enough; was one made?"""
        late = now - self.since >= self.window_seconds and self.max_staleness != 0
        if not self.waiting or not (len(self.waiting) >= self.needed or late):
            return False
        return self.make()

    def make(self) -> bool:
        """A step of all that waits."""
        pushes = sorted(self.waiting, key=lambda push: push.source)  # the same sum in whatever order they came
        ages = [self.version - push.version for push in pushes]
        self.staleness.update(ages)
        factor = 1.0 / max(1, max(ages)) if self.slow_down else 1.0
        self.own(self.joined([push.gradient for push in pushes]), factor)
        self.version += 1
        self.waiting = []
        self.since = float("inf")
        return True

    def joined(self, gradients: list[Tensor]) -> Tensor:
        """Their mean, or sum; one alone is both, and is not copied."""
        if len(gradients) == 1:
            return gradients[0]
        total = torch.stack(gradients).sum(0)
        return total if self.total else total.div_(len(gradients))

    def settle(self) -> None:
        """Everybody is at rest: what was taken in for a window makes a step now, so that nothing is lost with us."""
        if self.waiting and self.max_staleness != 0:
            self.make()

    def release(self) -> None:
        """No step is coming for a while: what waits for one is done without."""
        self.refused["stale"] += len(self.waiting)
        self.waiting = []
        self.since = float("inf")

    def excuse(self, worker: int) -> None:
        """One has waited long enough for a step: what it brought is done without."""
        self.refused["stale"] += sum(push.source[0] == worker for push in self.waiting)
        self.withdraw(worker)

    def leave(self, worker: int, now: float) -> None:
        """A worker is gone for now: nobody waits for it."""
        self.workers -= 1
        if self.max_staleness == 0:  # else it was told that what it brought is taken
            self.withdraw(worker)
        self.tend(now)

    def withdraw(self, worker: int) -> None:
        """What it brought is not there any more."""
        self.waiting = [push for push in self.waiting if push.source[0] != worker]
        if not self.waiting:
            self.since = float("inf")

    def holds(self, worker: int) -> bool:
        """Does something of this worker's wait for a step?"""
        return any(push.source[0] == worker for push in self.waiting)

    def enlist(self) -> None:
        """One more."""
        self.workers += 1


def cuts_of(num: int, shards: int) -> list[tuple[int, int]]:
    """Numbers [begin, end) of all weights in one vector for each shard: as many each, whatever tensor they are of.

    Never more shards than numbers.
    """
    shards = min(shards, num)
    edges = [num * at // shards for at in range(shards + 1)]
    return list(pairwise(edges))
