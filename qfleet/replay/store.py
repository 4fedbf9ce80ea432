"""The store: every step once, in a ring of rows. Shapes: R rows, L lanes, T rows of a rollout."""

import math

import numpy as np

from qfleet.data import Array, Rollout, Spec, State

# Small observations get two rows per step, so that even one-step episodes (one `last` row each) fill the capacity;
# frames get 1/32 spare, because a game shorter than 32 steps is not worth 3 % of the memory.
SMALL_BYTES = 1024


def ring_rows(capacity: int, spec: Spec, lanes: int, window: int) -> int:
    """How many rows the ring needs for `capacity` steps of which each needs `window` rows more."""
    steps = math.ceil(capacity / lanes)
    spare = steps if row_bytes(spec) <= SMALL_BYTES else steps // 32
    return steps + spare + 2 * window + spec.stack + 2


def row_bytes(spec: Spec) -> int:
    """Bytes of one stored row of one lane."""
    mask = spec.num_actions if spec.masked else 0
    memory = 4 * math.prod(spec.state) if spec.state else 0
    number = np.dtype(action_type(spec)).itemsize
    return math.prod(spec.obs) * np.dtype(spec.dtype).itemsize + mask + memory + number + 4 + 4 + 1


def action_type(spec: Spec) -> type[np.int32] | type[np.int64]:
    """Joint actions of many dimensions need longer numbers."""
    return np.int32 if spec.num_actions < 2**31 else np.int64


class Store:
    """Arrays indexed [row % R, lane]; rows count from the start of the run."""

    def __init__(self, spec: Spec, lanes: int, rows: int, *, values: bool = False, gains: bool = False) -> None:
        self.spec, self.lanes, self.rows = spec, lanes, rows
        self.obs = np.zeros((rows, lanes, *spec.obs), spec.dtype)
        self.action = np.zeros((rows, lanes), action_type(spec))
        self.reward = np.zeros((rows, lanes), np.float32)
        self.discount = np.zeros((rows, lanes), np.float32)
        self.last = np.zeros((rows, lanes), np.bool_)
        self.mask = np.zeros((rows, lanes, spec.num_actions), np.bool_) if spec.masked else None
        self.state = np.zeros((rows, lanes, *spec.state), np.float32) if spec.state else None
        self.value = np.zeros((rows, lanes, 2), np.float32) if values else None
        self.gain = np.zeros((rows, lanes), np.float32) if gains else None  # what the world gave, without a bonus
        self.head = 0  # rows written so far

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one lane."""
        return sum(column[0, 0].nbytes for column in self.columns().values())

    def columns(self) -> dict[str, Array]:
        """Every array by name."""
        named = {name: getattr(self, name) for name in ("obs", "action", "reward", "discount", "last")}
        extra = {"mask": self.mask, "state": self.state, "value": self.value, "gain": self.gain}
        return {**named, **{name: column for name, column in extra.items() if column is not None}}

    def write(self, rollout: Rollout, time: int, gain: Array | None = None) -> int:
        """Write one row of a rollout; returns its number. `gain` is the world's reward where the row's has a bonus."""
        slot = self.head % self.rows
        for name, column in self.columns().items():
            source = gain if name == "gain" else getattr(rollout, name)
            column[slot] = (rollout.reward if source is None else source)[time]
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
