"""Channels inside one process: a bounded queue of rollouts and the latest weights."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from qfleet.data import Rollout


@dataclass(eq=False)
class RolloutQueue:
    """A Channel of a few slots."""

    slots: int
    waiting: deque[Rollout] = field(default_factory=deque)

    def put(self, rollout: Rollout) -> bool:
        """Append a rollout; False if the queue is full."""
        if len(self.waiting) == self.slots:
            return False
        self.waiting.append(rollout)
        return True

    def get(self) -> Rollout | None:
        """The oldest rollout, if any."""
        return self.waiting.popleft() if self.waiting else None


@dataclass(eq=False)
class LatestWeights:
    """A weights board that passes weights by reference: reader and writer share them."""

    version: int = 0
    weights: Any = None

    def publish(self, version: int, weights: Any) -> None:
        """Replace the weights."""
        self.version = version
        self.weights = weights

    def read(self, newer_than: int) -> tuple[int, Any] | None:
        """The newest weights, if they are newer."""
        return (self.version, self.weights) if self.version > newer_than else None
