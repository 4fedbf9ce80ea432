"""Cuts: what an item of the store is. Steps stand alone, sequences are windows of rows; both are cut from one store.

Shapes: N items, L lanes, W rows of a window, D words of a stored observation. An item is row * L + lane.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from qfleet.data import Array, Batch, Sequences, Spec
from qfleet.nets import shrink
from qfleet.replay.kernels import cut, cut_sequences, fold_many, stack_places
from qfleet.replay.store import Store

# where blocks have to be unpacked for them
STEPS_AT_ONCE = 16
WINDOWS_AT_ONCE = 4


@dataclass(frozen=True)
class Fold:
    """How rewards are summed at this moment: n may shrink and gamma may move while a run goes on."""

    n: int
    gamma: float
    clip: bool = False
    rescale: bool = False  # errors are measured on the scale of rescaled values


class Cut(Protocol):
    """When items become ready, and how they are cut out."""

    @property
    def window(self) -> int:
        """Rows that an item needs after its first."""
        ...

    @property
    def stride(self) -> int:
        """Rows from the beginning of one item to that of the next in its lane."""
        ...

    @property
    def ends(self) -> bool:
        """Is an item over with its episode, ready at once and shorter? Then final rows begin none."""
        ...

    def items_in(self, steps: int) -> int:
        """How many items so many steps make."""
        ...

    def cut(
        self, store: Store, items: Array, fold: Fold, weight: Array, ids: Array, over: Any = None
    ) -> Batch | Sequences:
        """The items as something to learn from; written over what an earlier cut of as many items answered."""
        ...

    def priority(self, store: Store, items: Array, fold: Fold) -> Array:
        """How wrong the actor was about each item [N], by the values it saw itself (Horgan et al. 2018)."""
        ...


@dataclass(frozen=True)
class StepCut:
    """Single steps with up to n rewards; `n` is the largest n that the plan can reach."""

    n: int

    @property
    def window(self) -> int:
        """n rows."""
        return self.n

    @property
    def stride(self) -> int:
        """Every step is one."""
        return 1

    @property
    def ends(self) -> bool:
        """A step has fewer rewards at the end of its episode."""
        return True

    def items_in(self, steps: int) -> int:
        """One each."""
        return steps

    def cut(
        self, store: Store, items: Array, fold: Fold, weight: Array, ids: Array, over: Batch | None = None
    ) -> Batch:
        """A batch of steps."""
        batch = over or blank_batch(store.spec, len(items))
        next_rows = np.empty(len(items), np.int64)
        rows = (store.table, store.heads, store.action, store.reward, store.discount, store.last)
        shape = (len(items), store.spec.stack, math.prod(store.spec.obs))
        words = store.frames.dtype
        obs = batch.obs.reshape(shape).view(words)
        next_obs = batch.next_obs.reshape(shape).view(words)
        out = (obs, batch.action, batch.reward, batch.discount, next_obs, next_rows)
        for begin, end in portions(store, len(items), STEPS_AT_ONCE):
            show_steps(store, items[begin:end], fold)
            cut(store.frames, *rows, items, begin, end, fold.n, fold.gamma, fold.clip, *out)
        batch.weight = weight
        batch.ids = ids
        batch.next_mask, batch.mask = masks_of(store, items, next_rows)
        return batch

    def priority(self, store: Store, items: Array, fold: Fold) -> Array:
        """The n-step TD error."""
        return actor_error(store, items, fold)


@dataclass(frozen=True)
class SequenceCut:
    """Windows of burn_in + length + n rows, one beginning every `stride` rows in every lane.

    Windows run through the ends of episodes: their `last` rows are marked, and the memory is blank after them.
    """

    n: int
    burn_in: int
    length: int
    stride: int
    eta: float = 0.9

    @property
    def rows(self) -> int:
        """W: rows of a window."""
        return self.burn_in + self.length + self.n

    @property
    def window(self) -> int:
        """All but the first."""
        return self.rows - 1

    @property
    def ends(self) -> bool:
        """No: windows are all of one length."""
        return False

    def items_in(self, steps: int) -> int:
        """One per stride."""
        return -(-steps // self.stride)

    def cut(
        self, store: Store, items: Array, fold: Fold, weight: Array, ids: Array, over: Sequences | None = None
    ) -> Sequences:
        """Windows side by side."""
        batch = over or blank_sequences(store.spec, self.rows, self.length, len(items))
        rows = (store.table, store.heads, store.action, store.reward, store.discount, store.last)
        shape = (self.rows, len(items), store.spec.stack, math.prod(store.spec.obs))
        obs = batch.obs.reshape(shape).view(store.frames.dtype)
        out = (obs, batch.action, batch.gain, batch.last, batch.reward, batch.discount, batch.ahead)
        for begin, end in portions(store, len(items), WINDOWS_AT_ONCE):
            show_windows(store, items[begin:end], self.rows)
            cut_sequences(store.frames, *rows, items, begin, end, self.burn_in, fold.n, fold.gamma, fold.clip, *out)
        first = items // store.lanes
        lanes = items % store.lanes
        slots = (first + np.arange(self.rows)[:, None]) % store.rows
        if store.state is not None:
            batch.state = store.state[slots[0], lanes]
        if store.mask is not None:
            batch.mask = store.mask[slots, lanes]
        if store.gain is not None:
            batch.gain = store.gain[slots, lanes]  # a memory saw the world's reward when it acted
        batch.weight = weight
        batch.ids = ids
        return batch

    def priority(self, store: Store, items: Array, fold: Fold) -> Array:
        """eta max |delta| + (1 - eta) mean |delta| over the rows learned from."""
        rows = np.arange(self.burn_in, self.burn_in + self.length)[:, None] * store.lanes
        every = items[None, :] + rows  # [L, N]
        used = ~store.last[every // store.lanes % store.rows, every % store.lanes]
        errors = actor_error(store, every.ravel(), fold).reshape(every.shape) * used
        mixed: Array = self.eta * errors.max(0) + (1.0 - self.eta) * errors.sum(0) / np.maximum(used.sum(0), 1)
        return mixed


def masks_of(store: Store, items: Array, next_rows: Array) -> tuple[Array | None, Array | None]:
    """Which actions were allowed where each step leads, and where it began."""
    if store.mask is None:
        return None, None
    lanes = items % store.lanes
    return store.mask[next_rows % store.rows, lanes], store.mask[items // store.lanes % store.rows, lanes]


def cut_places(store: Store, items: Array, fold: Fold, weight: Array, ids: Array) -> Batch:
    """The same batch of steps, with the places of its observations [N, stack] instead of what they show."""
    num = len(items)
    rows = items // store.lanes
    lanes = items % store.lanes
    (reward, discount) = np.empty((2, num), np.float32)
    ahead = np.empty(num, np.int64)
    columns = (store.reward, store.discount, store.last)
    fold_many(*columns, items, fold.n, fold.gamma, fold.clip, reward, discount, ahead)
    obs, next_obs = np.empty((2, num, store.spec.stack), np.int64)
    stack_places(store.last, store.heads, rows, lanes, obs)
    stack_places(store.last, store.heads, ahead, lanes, next_obs)
    action = store.action[rows % store.rows, lanes].astype(np.int64)
    return Batch(obs, action, reward, discount, next_obs, weight, ids, *masks_of(store, items, ahead))


def portions(store: Store, num: int, at_once: int) -> list[tuple[int, int]]:
    """The parts of so many items that are cut together: all, unless blocks have to be unpacked for them."""
    if store.packed is None:
        return [(0, num)]
    return [(begin, min(begin + at_once, num)) for begin in range(0, num, at_once)]


def show_steps(store: Store, items: Array, fold: Fold) -> None:
    """Have the frames at hand that these steps show and lead to."""
    if store.packed is None:
        return
    ends = np.empty(len(items), np.int64)
    reward, discount = np.empty((2, len(items)), np.float32)
    fold_many(store.reward, store.discount, store.last, items, fold.n, fold.gamma, fold.clip, reward, discount, ends)
    rows = np.concatenate([items // store.lanes, ends])
    back = np.arange(store.spec.stack)[:, None]
    store.packed.show(rows - back, np.tile(items % store.lanes, 2), store.heads)


def show_windows(store: Store, items: Array, rows: int) -> None:
    """Have the frames at hand that these windows show."""
    if store.packed is not None:
        along = np.arange(1 - store.spec.stack, rows)[:, None]
        store.packed.show(items // store.lanes + along, items % store.lanes, store.heads)


def blank_batch(spec: Spec, num: int) -> Batch:
    """Room for so many steps."""
    obs, next_obs = (np.empty((num, *spec.input_shape), spec.dtype) for _ in range(2))
    reward, discount, weight = (np.empty(num, np.float32) for _ in range(3))
    action, ids = (np.empty(num, np.int64) for _ in range(2))
    return Batch(obs, action, reward, discount, next_obs, weight, ids)


def blank_sequences(spec: Spec, rows: int, length: int, num: int) -> Sequences:
    """Room for so many windows."""
    gain, reward, discount = (np.empty((each, num), np.float32) for each in (rows, length, length))
    return Sequences(
        obs=np.empty((rows, num, *spec.input_shape), spec.dtype),
        action=np.empty((rows, num), np.int64),
        gain=gain,
        last=np.empty((rows, num), np.bool_),
        state=np.zeros((num, 0), np.float32),
        reward=reward,
        discount=discount,
        ahead=np.empty((length, num), np.int64),
        weight=np.empty(num, np.float32),
        ids=np.empty(num, np.int64),
    )


def actor_error(store: Store, items: Array, fold: Fold) -> Array:
    """|R + discount * best value ahead - value of the action taken| [N], all by the actor's own network.

    Values and rewards are returns; a learner of rescaled values measures its errors on their scale, so this does too.
    """
    if store.value is None:
        raise ValueError("this store keeps no values")
    num = len(items)
    lanes = items % store.lanes
    reward = np.empty(num, np.float32)
    discount = np.empty(num, np.float32)
    ahead = np.empty(num, np.int64)
    columns = (store.reward, store.discount, store.last)
    fold_many(*columns, items, fold.n, fold.gamma, fold.clip, reward, discount, ahead)
    goal = reward + discount * store.value[ahead % store.rows, lanes, 1]
    seen = store.value[items // store.lanes % store.rows, lanes, 0]
    error: Array = np.abs(shrink(goal) - shrink(seen) if fold.rescale else goal - seen)
    return error
