"""One shard of a parameter server: a block of the weights, its optimiser, and the rules for accepting gradients.

A state machine: `now` is passed in, the transport is elsewhere. The version counts optimiser steps. A gradient carries
the version it was computed from; its staleness is the number of steps made since. `max_staleness` 0 is synchronous: a
step needs one gradient of every worker (or of all but the slowest `spare`), all of the same version. With s > 0 every
gradient is a step of its own, unless its staleness is above s: then it is refused, and its worker computes another.
None accepts every gradient (Downpour, Dean et al. 2012). With a `window`, gradients are collected: a step is made when
there are that many of them, or when the first has waited `window_seconds`. A window may have no number, only a time.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Verdict: TypeAlias = Literal["applied", "waiting", "duplicate", "stale", "skipped"]
ShardStep: TypeAlias = Callable[[Tensor, float], None]  # the optimiser: a gradient [n], a factor of the learning rate


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's gradient of one block; `source` is (worker, incarnation, sequence)."""

    source: tuple[int, int, int]
    version: int
    gradient: Tensor


@dataclass(eq=False)
class Shard:
    """A block of weights [n]."""

    weights: Tensor
    optimizer_step: ShardStep
    workers: int
    _: KW_ONLY
    max_staleness: int | None = 0
    spare: int = 0
    window: int | None = None
    window_seconds: float = float("inf")
    slow_down: bool = False
    total: bool = False
    version: int = field(default=0, init=False)
    last_pushes: dict[int, tuple[int, int]] = field(default_factory=dict)  # by worker: incarnation and sequence
    waiting: list[Push] = field(default_factory=list)
    since: float = field(default=float("inf"), init=False)  # when the oldest waiting gradient came
    staleness: Counter[int] = field(default_factory=Counter)
    refused: Counter[Verdict] = field(default_factory=Counter)

    def push(self, push: Push, now: float) -> Verdict:
        """Accept or refuse a gradient; each is accepted at most once."""
        worker, incarnation, sequence = push.source
        if self.last_pushes.get(worker, (-1, -1)) >= (incarnation, sequence):
            return self.refuse("duplicate")
        self.last_pushes[worker] = (incarnation, sequence)
        if self.max_staleness is not None and self.version - push.version > self.max_staleness:
            return self.refuse("stale")
        if self.max_staleness == 0 and self.has_waiting(worker):
            return self.refuse("stale")  # a second gradient of the same version
        if self.collects and not bool(torch.isfinite(push.gradient).all()):
            return self.refuse("skipped")  # it must not spoil a step of gradients that were accepted already
        if not self.waiting:
            self.since = now
        self.waiting.append(push)
        return "applied" if self.step_if_due(now) else "waiting"

    def refuse(self, verdict: Verdict) -> Verdict:
        """Count a refusal."""
        self.refused[verdict] += 1
        return verdict

    @property
    def needed(self) -> int:
        """The number of gradients that a step needs."""
        if self.max_staleness == 0:
            return max(1, self.workers - self.spare)
        if self.window is None and self.window_seconds < float("inf"):
            return 1 << 62  # all that come in time
        return self.window or 1

    @property
    def collects(self) -> bool:
        """Is a step made of several gradients whose workers do not wait for it?"""
        return self.max_staleness != 0 and self.needed > 1

    def step_if_due(self, now: float) -> bool:
        """Make a step if enough gradients are here, or have waited long enough; returns whether one was made."""
        late = now - self.since >= self.window_seconds and self.max_staleness != 0
        if not self.waiting or not (len(self.waiting) >= self.needed or late):
            return False
        return self.apply_step()

    def apply_step(self) -> bool:
        """Make a step of all waiting gradients."""
        pushes = sorted(self.waiting, key=lambda push: push.source)  # the sum does not depend on their order
        ages = [self.version - push.version for push in pushes]
        self.staleness.update(ages)
        factor = 1.0 / max(1, max(ages)) if self.slow_down else 1.0
        self.optimizer_step(self.reduce([push.gradient for push in pushes]), factor)
        self.version += 1
        self.waiting = []
        self.since = float("inf")
        return True

    def reduce(self, gradients: list[Tensor]) -> Tensor:
        """Their mean or sum; a single one is not copied."""
        if len(gradients) == 1:
            return gradients[0]
        total = torch.stack(gradients).sum(0)
        return total if self.total else total.div_(len(gradients))

    def flush(self) -> None:
        """Make a step of the gradients collected in an open window, so that a pause or a save loses none."""
        if self.waiting and self.max_staleness != 0:
            self.apply_step()

    def drop_all(self) -> None:
        """Refuse all waiting gradients as stale, because no step will come for a while."""
        self.refused["stale"] += len(self.waiting)
        self.waiting = []
        self.since = float("inf")

    def drop(self, worker: int) -> None:
        """Refuse a worker's waiting gradient as stale, because it has waited long enough for a step."""
        self.refused["stale"] += sum(push.source[0] == worker for push in self.waiting)
        self.withdraw(worker)

    def remove_worker(self, worker: int, now: float) -> None:
        """Stop waiting for a worker that is lost."""
        self.workers -= 1
        if self.max_staleness == 0:  # else its gradients were accepted already
            self.withdraw(worker)
        self.step_if_due(now)

    def withdraw(self, worker: int) -> None:
        """Remove a worker's waiting gradients."""
        self.waiting = [push for push in self.waiting if push.source[0] != worker]
        if not self.waiting:
            self.since = float("inf")

    def has_waiting(self, worker: int) -> bool:
        """Does a gradient of this worker wait for a step?"""
        return any(push.source[0] == worker for push in self.waiting)

    def add_worker(self) -> None:
        """Wait for one more worker from now on."""
        self.workers += 1


def shard_bounds(num: int, shards: int) -> list[tuple[int, int]]:
    """Each shard's range [begin, end) of the flattened weights, evenly; never more shards than numbers."""
    shards = min(shards, num)
    edges = [num * at // shards for at in range(shards + 1)]
    return list(pairwise(edges))
