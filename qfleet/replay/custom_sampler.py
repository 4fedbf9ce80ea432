"""A sampler of the user's own, and the check of its draws."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qfleet.data import Array, State
from qfleet.data.state_reader import saved_tree
from qfleet.errors import UsageError
from qfleet.replay.samplers import SamplerTotals


class CustomSampler(Protocol):
    """A sampler of the user's own. Items have serial numbers in the order of their arrival, which never repeat."""

    def set_live(self, tail: int, head: int) -> None:
        """Items tail, tail + 1, ..., head - 1 can be drawn from now on; older ones were removed."""

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Serial numbers [num] of live items, and their importance weights [num]; all randomness is from `rng`."""

    def update(self, serials: Array, priority: Array) -> None:
        """The learner's priorities [N] of items that were drawn; some may have been removed meanwhile."""

    def state_dict(self) -> State:
        """All that must survive a restart: numbers, texts and NumPy arrays in dicts."""

    def load_state_dict(self, state: State) -> None:
        """Restore it; `set_live` has been called with the same tail and head before."""


@dataclass(eq=False)
class CheckedSampler:
    """A user's own sampler, whose draws are checked."""

    custom: CustomSampler
    tail: int = 0
    head: int = 0

    def set_live(self, tail: int, head: int) -> None:
        """Set the range of live items to [tail, head)."""
        self.tail = tail
        self.head = head
        self.custom.set_live(tail, head)

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """What the user's sampler draws, if all of it is live."""
        serials, weight = (np.asarray(each) for each in self.custom.draw(num, rng))
        if serials.shape != (num,) or serials.dtype.kind not in "iu" or weight.shape != (num,):
            raise UsageError(
                f"the sampler drew {serials.dtype} of shape {serials.shape} with weights of shape {weight.shape}",
                f"It was asked for {num} items.",
                f"Return two arrays [{num}]: serial numbers as integers, and weights.",
            )
        if ((serials < self.tail) | (serials >= self.head)).any():
            raise UsageError(
                f"the sampler drew item {serials[(serials < self.tail) | (serials >= self.head)][0]}",
                f"Only items {self.tail} to {self.head - 1} can be drawn now.",
                "Draw from the range that set_live was called with last.",
            )
        if not (np.isfinite(weight).all() and (weight >= 0.0).all()):
            raise UsageError(
                "the sampler returned weights that are negative or not finite",
                "An item's loss is multiplied by its weight.",
                "Return ones if all items count alike.",
            )
        return serials.astype(np.int64), weight.astype(np.float32)

    def update(self, serials: Array, priority: Array) -> None:
        """Pass priorities on."""
        self.custom.update(serials, priority)

    def totals(self) -> SamplerTotals:
        """The population of the last draw; the sampler's own weights are used as they are."""
        return SamplerTotals(self.head - self.tail, float(self.head - self.tail))

    def state_dict(self) -> State:
        """The user's sampler's state."""
        return {"custom": self.custom.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Restore it."""
        self.custom.load_state_dict(saved_tree(state, "custom"))
