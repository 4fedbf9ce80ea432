"""Samplers choose which live items are learned from. Items have serial numbers; the live ones are [tail, head)."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qfleet.data import Array, State
from qfleet.data.state_reader import FLOATS, saved_array, saved_count, saved_value
from qfleet.replay.tree import sum_up, tree_draw, tree_fill, tree_levels, tree_set


@dataclass(frozen=True, slots=True)
class SamplerTotals:
    """What there is to draw from: items of so much mass, drawn in proportion to their part of it.

    Importance weights are (items x an item's part of the mass)^-beta, over the largest of its draw, which was `top`.
    """

    items: int
    mass: float
    beta: float = 0.0
    top: float = 1.0


class Sampler(Protocol):
    """Told of every item that comes and goes; draws serial numbers with their importance weights."""

    def move(self, tail: int, head: int) -> None:
        """The live items are now [tail, head)."""
        ...

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Serial numbers [N] and weights [N]."""
        ...

    def update(self, serials: Array, priority: Array) -> None:
        """New priorities; those of items that have left are dropped."""
        ...

    def stock(self) -> SamplerTotals:
        """What there is to draw from, right after a draw."""
        ...

    def state_dict(self) -> State:
        """What must survive a restart."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Take it back; `move` has been called with the same tail and head before."""
        ...


class Uniform:
    """Every live item is equally likely."""

    def __init__(self) -> None:
        self.tail = self.head = 0

    def move(self, tail: int, head: int) -> None:
        """The live items are now [tail, head)."""
        self.tail = tail
        self.head = head

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Serial numbers with replacement; all weights are one."""
        return rng.integers(self.tail, self.head, num), np.ones(num, np.float32)

    def update(self, serials: Array, priority: Array) -> None:
        """Priorities mean nothing here."""

    def stock(self) -> SamplerTotals:
        """Every item counts the same."""
        return SamplerTotals(self.head - self.tail, float(self.head - self.tail))

    def state_dict(self) -> State:
        """Nothing of its own."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing of its own."""


class Prioritized:
    """Proportional prioritised replay (Schaul et al. 2016, section 3.3), on a float64 sum tree.

    P(i) = p_i^alpha / sum_k p_k^alpha, weight_i = (N P(i))^-beta / max_j weight_j, one draw per equal slice of the
    total. New items get the largest priority ever seen. Beta moves with the number of draws, one per update.
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float = 0.6,
        beta_start: float = 0.4,
        beta_end: float = 1.0,
        beta_updates: int = 100_000,
        eps: float = 1e-6,
    ) -> None:
        self.capacity = capacity
        self.alpha = alpha
        self.eps = eps
        self.beta_start = beta_start
        self.beta_end = beta_end
        self.beta_updates = beta_updates
        self.levels = tree_levels(capacity)
        self.tree = np.zeros(self.levels[-1], np.float64)
        self.tail = self.head = self.draws = 0
        self.largest = 1.0
        # the last draw
        self.drawn = np.zeros(0, np.int64)
        self.drawn_beta = beta_start

    @property
    def leaves(self) -> Array:  # [capacity]
        """P^alpha of the item whose serial number is congruent to the place, 0 where there is none."""
        return self.tree[: self.capacity]

    @property
    def beta(self) -> float:
        """The exponent of the importance weights at this moment."""
        done = min(1.0, self.draws / self.beta_updates)
        return self.beta_start + done * (self.beta_end - self.beta_start)

    def move(self, tail: int, head: int) -> None:
        """The live items are now [tail, head)."""
        gone = min(tail, self.head) - self.tail
        if gone:
            tree_fill(self.tree, self.levels, self.tail, gone, self.capacity, 0.0)
        begin = max(self.head, tail)
        if head > begin:
            tree_fill(self.tree, self.levels, begin, head - begin, self.capacity, self.largest**self.alpha)
        self.tail = tail
        self.head = head

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Serial numbers by priority, and their importance weights."""
        serials = np.empty(num, np.int64)
        weight = np.empty(num, np.float32)
        live = (self.tail, self.head, self.capacity)
        beta = self.beta
        tree_draw(self.tree, self.levels, rng.random(num), *live, beta, serials, weight)
        self.draws += 1
        self.drawn = serials
        self.drawn_beta = beta
        return serials, weight

    def update(self, serials: Array, priority: Array) -> None:
        """New priorities; those of items that have left are dropped."""
        values = np.ascontiguousarray(priority, np.float32)
        where = (self.tree, self.levels, serials, values, self.tail, self.capacity)
        self.largest = max(self.largest, tree_set(*where, self.eps, self.alpha))

    def stock(self) -> SamplerTotals:
        """The mass is the sum of all p^alpha; the largest weight belongs to the least likely item drawn."""
        items = self.head - self.tail
        mass = float(self.tree[-1])
        beta = self.drawn_beta
        if not len(self.drawn):
            return SamplerTotals(items, mass, beta)
        least = float(self.leaves[self.drawn % self.capacity].min())
        return SamplerTotals(items, mass, beta, (items * least / mass) ** -beta)

    def state_dict(self) -> State:
        """Leaves in serial order, and the counters."""
        live = np.arange(self.tail, self.head) % self.capacity
        return {"leaves": self.leaves[live], "largest": self.largest, "draws": self.draws}

    def load_state_dict(self, state: State) -> None:
        """Write the leaves back and sum them up: the inner sums come out bit-equal."""
        live = np.arange(self.tail, self.head) % self.capacity
        leaves = saved_array(state, "leaves", FLOATS, (len(live),))
        if len(leaves) and leaves.min() < 0.0:
            raise ValueError("leaves: a priority is negative")
        self.tree[:] = 0.0
        self.leaves[live] = leaves
        sum_up(self.tree, self.levels, 0, self.capacity - 1)
        self.largest = float(saved_value(state, "largest"))
        self.draws = saved_count(state, "draws")
