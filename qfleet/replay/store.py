"""The store: every step once, in a ring of rows. Shapes: R rows, L lanes, T rows of a rollout."""

import math

import numpy as np

from qfleet.data import Array, Rollout, Spec, State

# Small observations get two rows per step, so that even one-step episodes (one `last` row each) fill the capacity;
# frames get 1/32 spare, because a game shorter than 32 steps is not worth 3 % of the memory.
SMALL_BYTES = 1024


def ring_rows(capacity: int, spec: Spec, lanes: int, n_step: int) -> int:
    """How many rows the ring needs for `capacity` steps."""
    steps = math.ceil(capacity / lanes)
    spare = steps if row_bytes(spec) <= SMALL_BYTES else steps // 32
    return steps + spare + 2 * n_step + spec.stack + 2


def row_bytes(spec: Spec) -> int:
    """Bytes of one stored row of one lane."""
    mask = spec.num_actions if spec.masked else 0
    return math.prod(spec.obs) * np.dtype(spec.dtype).itemsize + mask + 4 + 4 + 4 + 1


class Store:
    """Arrays indexed [row % R, lane]; rows count from the start of the run."""

    def __init__(self, spec: Spec, lanes: int, rows: int) -> None:
        self.spec, self.lanes, self.rows = spec, lanes, rows
        self.obs = np.zeros((rows, lanes, *spec.obs), spec.dtype)
        self.action = np.zeros((rows, lanes), np.int32)
        self.reward = np.zeros((rows, lanes), np.float32)
        self.discount = np.zeros((rows, lanes), np.float32)
        self.last = np.zeros((rows, lanes), np.bool_)
        self.mask = np.zeros((rows, lanes, spec.num_actions), np.bool_) if spec.masked else None
        self.head = 0  # rows written so far

    def columns(self) -> dict[str, Array]:
        """Every array by name."""
        named = {name: getattr(self, name) for name in ("obs", "action", "reward", "discount", "last")}
        return named if self.mask is None else {**named, "mask": self.mask}

    def write(self, rollout: Rollout, time: int) -> int:
        """Write one row of a rollout; returns its number."""
        slot = self.head % self.rows
        self.obs[slot] = rollout.obs[time]
        self.action[slot] = rollout.action[time]
        self.reward[slot] = rollout.reward[time]
        self.discount[slot] = rollout.discount[time]
        self.last[slot] = rollout.last[time]
        if self.mask is not None and rollout.mask is not None:
            self.mask[slot] = rollout.mask[time]
        self.head += 1
        return self.head - 1

    def read(self, begin: int, end: int) -> State:
        """Rows [begin, end) as fresh arrays [T, L, ...]."""
        slots = np.arange(begin, end) % self.rows
        return {name: column[slots] for name, column in self.columns().items()}

    def restore(self, begin: int, end: int, values: State) -> None:
        """Put rows [begin, end) back where they were."""
        slots = np.arange(begin, end) % self.rows
        for name, column in self.columns().items():
            column[slots] = values[name]
