"""The store: each step once, in a ring of rows. Shapes: R rows, L lanes, T rows of a rollout of B lanes."""

import math

import numpy as np

from qfleet.data import Array, Rollout, Spec, State
from qfleet.replay.intake import write_column, write_rows
from qfleet.replay.kernels import BLOCK, Columns
from qfleet.replay.packed import CompressedFrames, CompressionSavings

ALL = slice(None)  # every lane
# Small observations get two rows per step, so that even one-step episodes (one `last` row each) fill the capacity;
# frames get 1/32 spare, because a game shorter than 32 steps is not worth 3 % of the memory.
SMALL_BYTES = 1024
UINTS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def ring_rows(capacity: int, spec: Spec, lanes: int, window: int) -> int:
    """Rows of a ring for `capacity` steps, each of which needs `window` rows more."""
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
    """The dtype of stored actions: joint actions of many dimensions need 64 bits."""
    return np.int32 if spec.num_actions < 2**31 else np.int64


def as_uints(array: Array) -> Array:  # [T, B, ...] -> [T, B, D]
    """A view of each row as the widest unsigned integers that its bytes allow: fewest to copy and compare."""
    flat = flatten_rows(array)
    return flat.view(UINTS[math.gcd(flat.shape[2] * flat.itemsize, 8)])


def flatten_rows(array: Array) -> Array:  # [T, B, ...] -> [T, B, D]
    """All axes behind rows and lanes as one."""
    return array.reshape(*array.shape[:2], math.prod(array.shape[2:]))


class Store:
    """Arrays indexed [row % R, lane]; rows count from the start of the run, in each lane by itself.

    With `pack` the observations are kept in compressed blocks instead.
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
        self.gain = np.zeros((rows, lanes), np.float32) if gains else None  # the reward without a bonus
        extra = {"mask": self.mask, "state": self.state, "value": self.value, "gain": self.gain}
        self.extra = {name: column for name, column in extra.items() if column is not None}  # that only some plans need
        self.heads = np.zeros(lanes, np.int64)  # rows written so far
        self.num_restores = 0  # how often rows were replaced other than by `write`
        blank = as_uints(np.zeros((1, 1, *spec.obs), spec.dtype))[0, 0]
        self.packed = CompressedFrames(lanes, rows, blank) if pack else None
        self.table = np.zeros((0, lanes), np.int64) if self.packed is None else self.packed.table
        self._frames: tuple[Array, Array] = (blank, blank)  # `obs`, and its view as integers

    @property
    def kernel_columns(self) -> Columns:
        """The arrays that the compiled loops read besides `frames`."""
        return self.table, self.heads, self.action, self.reward, self.discount, self.last

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one lane, before compression."""
        packed = 0 if self.packed is None else frame_bytes(self.spec)
        return packed + sum(int(column[0, 0].nbytes) for column in self.columns().values())

    @property
    def frames(self) -> Array:  # [F, D]
        """Observations one after the other, as `frame_at` indexes them."""
        if self.packed is not None:
            return self.packed.frames
        if self._frames[0] is not self.obs:
            self._frames = (self.obs, as_uints(self.obs).reshape(self.rows * self.lanes, -1))
        return self._frames[1]

    def columns(self) -> dict[str, Array]:
        """Every array by name, without compressed observations."""
        names = ("obs", "action", "reward", "discount", "last")[0 if self.packed is None else 1 :]
        return {**{name: getattr(self, name) for name in names}, **self.extra}

    def max_write_rows(self, begin: int, end: int) -> int:
        """The most rows that one `write` to these lanes can take: compressed ones end with a block."""
        return self.rows if self.packed is None else BLOCK - int((self.heads[begin:end] % BLOCK).max())

    def write(self, rollout: Rollout, begin: int, end: int, lane: int = 0, gain: Array | None = None) -> int:
        """Write rows [begin, end) of a rollout into its lanes, from `lane` on; returns the number of steps.

        `gain` is the environment's reward where the rollout's includes a bonus.
        """
        where = (begin, end, self.heads, lane)
        for name, column in self.extra.items():
            source = gain if name == "gain" else getattr(rollout, name)
            if name == "value" and source is None:
                raise ValueError("the rollout has no values, and this store keeps them")
            new = np.ascontiguousarray(rollout.reward if source is None else source, column.dtype)
            write_column(flatten_rows(column), flatten_rows(new), *where)
        obs = as_uints(np.ascontiguousarray(rollout.obs, self.obs.dtype))
        if self.packed is not None:
            write_column(self.packed.open_blocks, obs, *where)
        rows = (self.frames, self.action, self.reward, self.discount, self.last)
        action = np.ascontiguousarray(rollout.action, np.int64)
        last = np.ascontiguousarray(rollout.last, np.bool_)
        reward = np.ascontiguousarray(rollout.reward, np.float32)
        discount = np.ascontiguousarray(rollout.discount, np.float32)
        steps: int = write_rows(rows, (obs, action, reward, discount, last), *where, self.packed is None)
        if self.packed is not None:
            self.packed.pack_complete(self.heads, lane, lane + last.shape[1])
        return steps

    def read(self, begin: int, end: int, lanes: slice = ALL) -> State:
        """Copies of rows [begin, end) of these lanes [T, B, ...]."""
        slots = np.arange(begin, end) % self.rows
        found = {name: column[slots, lanes] for name, column in self.columns().items()}
        if self.packed is not None:
            frames = self.packed.read(begin, end, range(self.lanes)[lanes], self.heads)
            found["obs"] = frames.view(self.obs.dtype).reshape(*frames.shape[:2], *self.spec.obs)
        return found

    def restore(self, begin: int, end: int, values: State, lanes: slice = ALL) -> None:
        """Put rows [begin, end) of these lanes back where they were."""
        slots = np.arange(begin, end) % self.rows
        self.num_restores += 1
        for name, column in self.columns().items():
            column[slots, lanes] = values[name]
        if self.packed is not None:
            frames = as_uints(np.ascontiguousarray(values["obs"], self.obs.dtype))
            self.packed.restore(begin, end, range(self.lanes)[lanes], frames)

    def compression_savings(self) -> CompressionSavings | None:
        """What compression saves and costs, if frames are compressed."""
        return None if self.packed is None else self.packed.compression_savings()
