"""The store: every step once, in a ring of rows. Shapes: R rows, L lanes, T rows of a rollout of B lanes."""

import math
from typing import Any

import numpy as np

from qfleet.data import Array, Rollout, Spec, State
from qfleet.replay.intake import write_column, write_rows
from qfleet.replay.kernels import BLOCK
from qfleet.replay.packed import CompressedFrames, CompressionSavings

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
    return frame_bytes(spec) + mask + memory + number + 4 + 4 + 1


def frame_bytes(spec: Spec) -> int:
    """Bytes of one stored observation."""
    return math.prod(spec.obs) * np.dtype(spec.dtype).itemsize


def action_type(spec: Spec) -> type[np.int32] | type[np.int64]:
    """Joint actions of many dimensions need longer numbers."""
    return np.int32 if spec.num_actions < 2**31 else np.int64


def words_of(array: Array) -> Array:  # [T, B, ...] -> [T, B, D]
    """What lies behind rows and lanes as whole numbers, as few as its bytes allow: so they are copied and compared."""
    flat = numbers(array)
    return flat.view(WORDS[math.gcd(flat.shape[2] * flat.itemsize, 8)])


def numbers(array: Array) -> Array:  # [..., D]
    """What lies behind rows and lanes as one axis."""
    return array.reshape(*array.shape[:2], math.prod(array.shape[2:]))


def plain(array: Array, kind: Any) -> Array:
    """As the compiled loops know it: numbers one after the other."""
    return np.ascontiguousarray(array, kind)


class Store:
    """Arrays indexed [row % R, lane]; rows count from the start of the run, in each lane by itself.

    With `pack` the observations lie in compressed blocks instead.
    """

    def __init__(
        self, spec: Spec, lanes: int, rows: int, *, values: bool = False, gains: bool = False, pack: bool = False
    ) -> None:
        self.spec = spec
        self.lanes = lanes
        self.rows = rows
        self.obs = np.zeros((0 if pack else rows, lanes, *spec.obs), spec.dtype)
        self.action = np.zeros((rows, lanes), action_type(spec))
        self.reward = np.zeros((rows, lanes), np.float32)
        self.discount = np.zeros((rows, lanes), np.float32)
        self.last = np.zeros((rows, lanes), np.bool_)
        self.mask = np.zeros((rows, lanes, spec.num_actions), np.bool_) if spec.masked else None
        self.state = np.zeros((rows, lanes, *spec.state), np.float32) if spec.state else None
        self.value = np.zeros((rows, lanes, 2), np.float32) if values else None
        self.gain = np.zeros((rows, lanes), np.float32) if gains else None  # what the world gave, without a bonus
        self.heads = np.zeros(lanes, np.int64)  # rows written so far
        self.restored = 0  # how often its rows became others at once
        blank = words_of(np.zeros((1, 1, *spec.obs), spec.dtype))[0, 0]
        self.packed = CompressedFrames(lanes, rows, blank) if pack else None
        self.table = np.zeros((0, lanes), np.int64) if self.packed is None else self.packed.table
        self._frames: tuple[Array, Array] = (blank, blank)  # observations, and their words

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one lane, as it is when it is not packed."""
        packed = 0 if self.packed is None else frame_bytes(self.spec)
        return packed + sum(int(column[0, 0].nbytes) for column in self.columns().values())

    @property
    def frames(self) -> Array:  # [F, D]
        """Observations one after the other, in the order that `frame_at` knows."""
        if self.packed is not None:
            return self.packed.frames
        if self._frames[0] is not self.obs:
            self._frames = (self.obs, words_of(self.obs).reshape(self.rows * self.lanes, -1))
        return self._frames[1]

    def columns(self) -> dict[str, Array]:
        """Every array by name; packed observations are none."""
        names = ("obs", "action", "reward", "discount", "last")[0 if self.packed is None else 1 :]
        return {**{name: getattr(self, name) for name in names}, **self.extra()}

    def extra(self) -> dict[str, Array]:
        """The arrays that only some plans need."""
        extra = {"mask": self.mask, "state": self.state, "value": self.value, "gain": self.gain}
        return {name: column for name, column in extra.items() if column is not None}

    def room(self, begin: int, end: int) -> int:
        """How many rows of these lanes can be written at once."""
        return self.rows if self.packed is None else BLOCK - int((self.heads[begin:end] % BLOCK).max())

    def write(self, rollout: Rollout, begin: int, end: int, lane: int = 0, gain: Array | None = None) -> int:
        """Write rows [begin, end) of a rollout into as many lanes as it has, from `lane` on; how many are steps.

        `gain` is the world's reward where the rollout's has a bonus.
        """
        where = (begin, end, self.heads, lane)
        for name, column in self.extra().items():
            source = gain if name == "gain" else getattr(rollout, name)
            if name == "value" and source is None:
                raise ValueError("a rollout tells no values, and they are to be stored")
            new = plain(rollout.reward if source is None else source, column.dtype)
            write_column(numbers(column), numbers(new), *where)
        obs = words_of(plain(rollout.obs, self.obs.dtype))
        if self.packed is not None:
            write_column(self.packed.open, obs, *where)
        rows = (self.frames, self.action, self.reward, self.discount, self.last)
        action = plain(rollout.action, np.int64)
        last = plain(rollout.last, np.bool_)
        reward = plain(rollout.reward, np.float32)
        discount = plain(rollout.discount, np.float32)
        steps: int = write_rows(*rows, obs, action, reward, discount, last, *where, self.packed is None)
        if self.packed is not None:
            self.packed.close(self.heads, lane, lane + last.shape[1])
        return steps

    def read(self, begin: int, end: int, lanes: slice = ALL) -> State:
        """Rows [begin, end) of these lanes as fresh arrays [T, B, ...]."""
        slots = np.arange(begin, end) % self.rows
        found = {name: column[slots, lanes] for name, column in self.columns().items()}
        if self.packed is not None:
            frames = self.packed.read(begin, end, range(self.lanes)[lanes], self.heads)
            found["obs"] = frames.view(self.obs.dtype).reshape(*frames.shape[:2], *self.spec.obs)
        return found

    def restore(self, begin: int, end: int, values: State, lanes: slice = ALL) -> None:
        """Put rows [begin, end) of these lanes back where they were."""
        slots = np.arange(begin, end) % self.rows
        self.restored += 1
        for name, column in self.columns().items():
            column[slots, lanes] = values[name]
        if self.packed is not None:
            frames = words_of(plain(values["obs"], self.obs.dtype))
            self.packed.restore(begin, end, range(self.lanes)[lanes], frames)

    def saving(self) -> CompressionSavings | None:
        """What packing saves and costs, if anything is packed."""
        return None if self.packed is None else self.packed.saving()
