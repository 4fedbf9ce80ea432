"""The store: every step once, in a ring of rows. Shapes: R rows, L lanes, T rows of a rollout of B lanes."""

import math
from typing import Any

import numpy as np

from qfleet.data import Array, Rollout, Spec, State
from qfleet.replay.kernels import write_column, write_rows

ALL = slice(None)  # every lane
# Small observations get two rows per step, so that even one-step episodes (one `last` row each) fill the capacity;
# frames get 1/32 spare, because a game shorter than 32 steps is not worth 3 % of the memory.
SMALL_BYTES = 1024
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


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


def words_of(array: Array) -> Array:  # [T, B, ...] -> [T, B, D]
    """What lies behind rows and lanes as whole numbers, as few as its bytes allow: so they are copied and compared."""
    flat = numbers(array)
    return flat.view(WORDS[math.gcd(flat.shape[2] * flat.itemsize, 8)])


def numbers(array: Array) -> Array:  # [..., D]
    """What lies behind rows and lanes as one axis."""
    return array.reshape(*array.shape[:2], -1)


def plain(array: Array, kind: Any) -> Array:
    """As the compiled loops know it: numbers one after the other."""
    return np.ascontiguousarray(array, kind)


class Store:
    """Arrays indexed [row % R, lane]; rows count from the start of the run, in each lane by itself."""

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
        self.heads = np.zeros(lanes, np.int64)  # rows written so far
        self._words = (self.obs, words_of(self.obs))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one lane."""
        return sum(column[0, 0].nbytes for column in self.columns().values())

    @property
    def words(self) -> Array:  # [R, L, D]
        """Observations as whole words."""
        if self._words[0] is not self.obs:
            self._words = (self.obs, words_of(self.obs))
        return self._words[1]

    def columns(self) -> dict[str, Array]:
        """Every array by name."""
        named = {name: getattr(self, name) for name in ("obs", "action", "reward", "discount", "last")}
        return {**named, **self.extra()}

    def extra(self) -> dict[str, Array]:
        """The arrays that only some plans need."""
        extra = {"mask": self.mask, "state": self.state, "value": self.value, "gain": self.gain}
        return {name: column for name, column in extra.items() if column is not None}

    def write(self, rollout: Rollout, begin: int, end: int, lane: int = 0, gain: Array | None = None) -> int:
        """Write rows [begin, end) of a rollout into as many lanes as it has, from `lane` on; how many are steps.

        `gain` is the world's reward where the rollout's has a bonus.
        """
        where = (begin, end, self.heads, lane)
        for name, column in self.extra().items():
            source = gain if name == "gain" else getattr(rollout, name)
            new = plain(rollout.reward if source is None else source, column.dtype)
            write_column(numbers(column), numbers(new), *where)
        rows = (self.words, self.action, self.reward, self.discount, self.last)
        obs, action = words_of(plain(rollout.obs, self.obs.dtype)), plain(rollout.action, np.int64)
        reward, discount = plain(rollout.reward, np.float32), plain(rollout.discount, np.float32)
        steps: int = write_rows(*rows, obs, action, reward, discount, plain(rollout.last, np.bool_), *where)
        return steps

    def read(self, begin: int, end: int, lanes: slice = ALL) -> State:
        """Rows [begin, end) of these lanes as fresh arrays [T, B, ...]."""
        slots = np.arange(begin, end) % self.rows
        return {name: column[slots, lanes] for name, column in self.columns().items()}

    def restore(self, begin: int, end: int, values: State, lanes: slice = ALL) -> None:
        """Put rows [begin, end) of these lanes back where they were."""
        slots = np.arange(begin, end) % self.rows
        for name, column in self.columns().items():
            column[slots, lanes] = values[name]
