"""A sampler of your own: a part of each batch comes from the newest items (as in Wang and Ross 2019, simplified).

python examples/custom_sampler.py
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import qfleet


@dataclass
class RecentFirst:
    """`share` of a batch is drawn from the newest `newest` items, the rest from all; items count alike."""

    share: float = 0.25
    newest: int = 1_000
    tail: int = field(default=0, init=False)
    head: int = field(default=0, init=False)
    draws: int = field(default=0, init=False)

    def set_live(self, tail: int, head: int) -> None:
        """Items tail, ..., head - 1 can be drawn; the largest number is the newest item."""
        self.tail = tail
        self.head = head

    def draw(self, num: int, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
        """Serial numbers [num] and weights [num]."""
        recent = round(self.share * num)
        first = max(self.tail, self.head - self.newest)
        newest = rng.integers(first, self.head, recent)
        any_age = rng.integers(self.tail, self.head, num - recent)
        self.draws += 1
        return np.concatenate([newest, any_age]), np.ones(num, np.float32)

    def update(self, serials: NDArray[Any], priority: NDArray[Any]) -> None:
        """TD errors of what was drawn: not used here."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; the range of items comes by `set_live`."""
        return {"draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self.draws = state["draws"]


if __name__ == "__main__":
    run = qfleet.train("CartPole-v1", sampler=RecentFirst(), overrides={"until.steps": 6_000})
    print(run, run.result())
