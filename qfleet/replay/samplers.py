"""Samplers choose items by serial number; the live ones, which can be drawn, are [tail, head)."""

from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import numpy as np

from qfleet.data import Array, State
from qfleet.data.state_reader import FLOATS, saved_array, saved_count, saved_value
from qfleet.replay.tree import tree_draw, tree_fill, tree_levels, tree_set, update_sums


@dataclass(frozen=True, slots=True)
class SamplerTotals:
    """The population of a draw: the number of live items and the sum `mass` of their p^alpha.

    Importance weights are (items x p^alpha / mass)^-beta, divided by the largest of the draw, which is `top`.
    """

    items: int
    mass: float
    beta: float = 0.0
    top: float = 1.0


class Sampler(Protocol):
    """Draws serial numbers of live items with their importance weights."""

    def set_live(self, tail: int, head: int) -> None:
        """Set the range of live items to [tail, head)."""

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Serial numbers [N] and weights [N]."""

    def update(self, serials: Array, priority: Array) -> None:
        """Set priorities; those of items that were removed are ignored."""

    def totals(self) -> SamplerTotals:
        """The population of the last draw, before any change."""

    def state_dict(self) -> State:
        """The state to be saved."""

    def load_state_dict(self, state: State) -> None:
        """Restore; `set_live` has been called with the same tail and head before."""


class Uniform:
    """Every live item is equally likely."""

    def __init__(self) -> None:
        self.tail = self.head = 0

    def set_live(self, tail: int, head: int) -> None:
        """Set the range of live items to [tail, head)."""
        self.tail = tail
        self.head = head

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Serial numbers [N] with replacement, and their weights [N], which are all one."""
        return rng.integers(self.tail, self.head, num), np.ones(num, np.float32)

    def update(self, serials: Array, priority: Array) -> None:
        """Ignored: there are no priorities."""

    def totals(self) -> SamplerTotals:
        """The population of the last draw, before any change; every item has mass 1."""
        return SamplerTotals(self.head - self.tail, float(self.head - self.tail))

    def state_dict(self) -> State:
        """Empty."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing to restore."""


@dataclass(eq=False)
class Prioritized:
    """Proportional prioritised replay (Schaul et al. 2016, section 3.3), on a float64 sum tree.

    P(i) = p_i^alpha / sum_k p_k^alpha, weight_i = (N P(i))^-beta / max_j weight_j, one draw per equal slice of the
    total. New items get the largest priority ever seen. Beta is annealed by the number of draws, one per update.
    """

    capacity: int
    _: KW_ONLY
    alpha: float = 0.6
    beta_start: float = 0.4
    beta_end: float = 1.0
    beta_updates: int = 100_000
    eps: float = 1e-6

    def __post_init__(self) -> None:
        self.levels = tree_levels(self.capacity)
        self.tree = np.zeros(self.levels[-1], np.float64)
        self.tail = self.head = self.draws = 0
        self.largest = 1.0
        # the last draw
        self.drawn = np.zeros(0, np.int64)
        self.drawn_beta = self.beta_start

    @property
    def leaves(self) -> Array:  # [capacity]
        """p^alpha of the item whose serial number is congruent to the index, 0 where there is none."""
        return self.tree[: self.capacity]

    @property
    def beta(self) -> float:
        """The current exponent of the importance weights."""
        done = min(1.0, self.draws / self.beta_updates)
        return self.beta_start + done * (self.beta_end - self.beta_start)

    def set_live(self, tail: int, head: int) -> None:
        """Set the range of live items to [tail, head)."""
        removed = min(tail, self.head) - self.tail
        if removed:
            tree_fill(self.tree, self.levels, self.tail, removed, self.capacity, 0.0)
        begin = max(self.head, tail)
        if head > begin:
            tree_fill(self.tree, self.levels, begin, head - begin, self.capacity, self.largest**self.alpha)
        self.tail = tail
        self.head = head

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Serial numbers [N] by priority, and their importance weights [N]."""
        serials = np.empty(num, np.int64)
        weight = np.empty(num, np.float32)
        live = (self.tail, self.head, self.capacity)
        beta = self.beta
        tree_draw(self.tree, self.levels, rng.random(num), live, beta, serials, weight)
        self.draws += 1
        self.drawn = serials
        self.drawn_beta = beta
        return serials, weight

    def update(self, serials: Array, priority: Array) -> None:
        """Set priorities; those of items that were removed are ignored."""
        values = np.ascontiguousarray(priority, np.float32)
        where = (self.tree, self.levels, serials, values, self.tail, self.capacity)
        self.largest = max(self.largest, tree_set(*where, self.eps, self.alpha))

    def totals(self) -> SamplerTotals:
        """The population of the last draw, before any change; its least likely item has the largest weight."""
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
        """Restore the leaves of [tail, head), which `set_live` has set, and recompute the sums, which are bit-equal."""
        live = np.arange(self.tail, self.head) % self.capacity
        leaves = saved_array(state, "leaves", FLOATS, (len(live),))
        if len(leaves) and leaves.min() < 0.0:
            raise ValueError("leaves: a priority is negative")
        self.tree[:] = 0.0
        self.leaves[live] = leaves
        update_sums(self.tree, self.levels, 0, self.capacity - 1)
        self.largest = float(saved_value(state, "largest"))
        self.draws = saved_count(state, "draws")
