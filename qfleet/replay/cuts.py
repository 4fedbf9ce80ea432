"""Cuts: what an item of the store is. Steps stand alone, sequences are windows of rows; both are cut from one store.

Shapes: N items, L lanes, W rows of a window, D numbers per stored observation. An item is row * L + lane.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qfleet.data import Array, Batch, Sequences
from qfleet.nets import shrink
from qfleet.replay.kernels import cut, cut_sequences, fold_many
from qfleet.replay.store import Store


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

    def cut(self, store: Store, items: Array, fold: Fold, weight: Array, ids: Array) -> Batch | Sequences:
        """The items as something to learn from."""
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

    def cut(self, store: Store, items: Array, fold: Fold, weight: Array, ids: Array) -> Batch:
        """A batch of steps."""
        num, spec = len(items), store.spec
        flat = store.flat
        obs, next_obs = (np.empty((num, spec.stack, flat.shape[2]), spec.dtype) for _ in range(2))
        action, next_rows = np.empty(num, np.int64), np.empty(num, np.int64)
        reward, discount = np.empty(num, np.float32), np.empty(num, np.float32)
        rows = (flat, store.action, store.reward, store.discount, store.last)
        cut(*rows, items, fold.n, fold.gamma, fold.clip, obs, action, reward, discount, next_obs, next_rows)
        shape, lanes = (num, *spec.input_shape), items % store.lanes
        masks: list[Array | None] = [None, None]
        if store.mask is not None:
            masks = [store.mask[at % store.rows, lanes] for at in (next_rows, items // store.lanes)]
        return Batch(obs.reshape(shape), action, reward, discount, next_obs.reshape(shape), weight, ids, *masks)

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

    def cut(self, store: Store, items: Array, fold: Fold, weight: Array, ids: Array) -> Sequences:
        """Windows side by side."""
        num, spec = len(items), store.spec
        flat = store.flat
        obs = np.empty((self.rows, num, spec.stack, flat.shape[2]), spec.dtype)
        action, last = np.empty((self.rows, num), np.int64), np.empty((self.rows, num), np.bool_)
        gain, reward, discount = (np.empty((rows, num), np.float32) for rows in (self.rows, self.length, self.length))
        ahead = np.empty((self.length, num), np.int64)
        rows = (flat, store.action, store.reward, store.discount, store.last)
        folding = (self.burn_in, fold.n, fold.gamma, fold.clip)
        cut_sequences(*rows, items, *folding, obs, action, gain, last, reward, discount, ahead)
        first, lanes = items // store.lanes, items % store.lanes
        state = np.zeros((num, 0), np.float32) if store.state is None else store.state[first % store.rows, lanes]
        slots = (first + np.arange(self.rows)[:, None]) % store.rows
        mask = None if store.mask is None else store.mask[slots, lanes]
        if store.gain is not None:
            gain = store.gain[slots, lanes]  # a memory saw the world's reward when it acted
        shaped = obs.reshape((self.rows, num, *spec.input_shape))
        return Sequences(shaped, action, gain, last, state, reward, discount, ahead, weight, ids, mask)

    def priority(self, store: Store, items: Array, fold: Fold) -> Array:
        """eta max |delta| + (1 - eta) mean |delta| over the rows learned from."""
        rows = np.arange(self.burn_in, self.burn_in + self.length)[:, None] * store.lanes
        every = items[None, :] + rows  # [L, N]
        used = ~store.last[every // store.lanes % store.rows, every % store.lanes]
        errors = actor_error(store, every.ravel(), fold).reshape(every.shape) * used
        mixed: Array = self.eta * errors.max(0) + (1.0 - self.eta) * errors.sum(0) / np.maximum(used.sum(0), 1)
        return mixed


def actor_error(store: Store, items: Array, fold: Fold) -> Array:
    """|R + discount * best value ahead - value of the action taken| [N], all by the actor's own network.

    Values and rewards are returns; a learner of rescaled values measures its errors on their scale, so this does too.
    """
    if store.value is None:
        raise ValueError("this store keeps no values")
    num, lanes = len(items), items % store.lanes
    reward, discount, ahead = np.empty(num, np.float32), np.empty(num, np.float32), np.empty(num, np.int64)
    columns = (store.reward, store.discount, store.last)
    fold_many(*columns, items, fold.n, fold.gamma, fold.clip, reward, discount, ahead)
    goal = reward + discount * store.value[ahead % store.rows, lanes, 1]
    seen = store.value[items // store.lanes % store.rows, lanes, 0]
    error: Array = np.abs(shrink(goal) - shrink(seen) if fold.rescale else goal - seen)
    return error
