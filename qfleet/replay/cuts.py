"""Cuts: how items become batches. An item is a single step or a window of rows; both are cut from one store.

Shapes: N items, L lanes, W rows of a window, D integers of a stored observation. An item is row * L + lane.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from qfleet.data import Array, Batch, Sequences, Spec
from qfleet.nets import signed_hyperbolic
from qfleet.replay.kernels import NStep, cut_sequences, cut_steps, n_step_sums, stack_indices
from qfleet.replay.store import Store

# Items per call where blocks have to be unpacked for them.
STEPS_PER_CALL = 16
WINDOWS_PER_CALL = 4


@dataclass(frozen=True)
class NStepReturn:
    """How the rewards of n steps are summed: R = sum_i gamma^i r_i. n and gamma may change during a run."""

    n: int
    gamma: float
    clip: bool = False
    rescale: bool = False  # measure errors on the scale of rescaled values

    @property
    def numbers(self) -> NStep:
        """The numbers as the compiled loops take them."""
        return self.n, self.gamma, self.clip


@dataclass(frozen=True)
class StepCut:
    """Single steps with up to n rewards; `n` is the largest n that the plan can reach."""

    n: int
    stride = 1  # rows between the beginnings of consecutive items of a lane: every step is an item
    # An item ends with its episode, with fewer rewards, and is then complete; so none begins in a final row.
    ends = True

    @property
    def window(self) -> int:
        """Rows that an item needs after its first: n."""
        return self.n

    def items_in(self, steps: int) -> int:
        """The number of items in `steps` steps: as many."""
        return steps

    def cut(
        self, store: Store, items: Array, n_step: NStepReturn, weight: Array, ids: Array, out: Batch | None = None
    ) -> Batch:
        """The items as a batch; `out` is an earlier batch of as many items, whose memory is reused."""
        batch = out or empty_batch(store.spec, len(items), overlap=self.n == 1 and store.spec.stack > 1)
        next_rows = np.empty(len(items), np.int64)
        obs, next_obs = flat_frames(batch, store.frames.dtype)
        depth = store.spec.stack
        cut = (obs, batch.action, batch.reward, batch.discount, next_obs, next_rows)
        for begin, end in chunks(store, len(items), STEPS_PER_CALL):
            unpack_steps(store, items[begin:end], n_step)
            cut_steps(store.frames, store.kernel_columns, items, begin, end, n_step.numbers, depth, cut)
        batch.weight = weight
        batch.ids = ids
        batch.next_mask, batch.mask = masks_of(store, items, next_rows)
        return batch

    def priority(self, store: Store, items: Array, n_step: NStepReturn) -> Array:
        """The n-step TD error of each item [N], from the values that the actor computed (Horgan et al. 2018)."""
        return actor_error(store, items, n_step)


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
    ends = False  # all windows have the same length

    @property
    def rows(self) -> int:
        """W: rows of a window."""
        return self.burn_in + self.length + self.n

    @property
    def window(self) -> int:
        """Rows that an item needs after its first."""
        return self.rows - 1

    def items_in(self, steps: int) -> int:
        """The number of items in `steps` steps: one per stride."""
        return -(-steps // self.stride)

    def cut(
        self, store: Store, items: Array, n_step: NStepReturn, weight: Array, ids: Array, out: Sequences | None = None
    ) -> Sequences:
        """The windows as a batch; `out` is an earlier batch of as many, whose memory is reused."""
        batch = out or empty_sequences(store.spec, self.rows, self.length, len(items))
        obs = batch.obs.reshape(-1).view(store.frames.dtype)
        depth = store.spec.stack
        cut = (obs, batch.action, batch.gain, batch.last, batch.reward, batch.discount, batch.ahead)
        for begin, end in chunks(store, len(items), WINDOWS_PER_CALL):
            unpack_windows(store, items[begin:end], self.rows)
            window = (self.burn_in, n_step.numbers, depth)
            cut_sequences(store.frames, store.kernel_columns, items, begin, end, *window, cut)
        first = items // store.lanes
        lanes = items % store.lanes
        slots = (first + np.arange(self.rows)[:, None]) % store.rows
        if store.state is not None:
            batch.state = store.state[slots[0], lanes]
        if store.mask is not None:
            batch.mask = store.mask[slots, lanes]
        if store.gain is not None:
            batch.gain = store.gain[slots, lanes]  # the recurrent policy saw the reward without a bonus
        batch.weight = weight
        batch.ids = ids
        return batch

    def priority(self, store: Store, items: Array, n_step: NStepReturn) -> Array:
        """eta max |delta| + (1 - eta) mean |delta| over the rows learned from."""
        rows = np.arange(self.burn_in, self.burn_in + self.length)[:, None] * store.lanes
        steps = items[None, :] + rows  # [L, N]
        used = ~store.last[steps // store.lanes % store.rows, steps % store.lanes]
        errors = actor_error(store, steps.ravel(), n_step).reshape(steps.shape) * used
        mixed: Array = self.eta * errors.max(0) + (1.0 - self.eta) * errors.sum(0) / np.maximum(used.sum(0), 1)
        return mixed


Cut: TypeAlias = StepCut | SequenceCut  # when items are complete, and how they are cut into batches


def masks_of(store: Store, items: Array, next_rows: Array) -> tuple[Array | None, Array | None]:
    """The actions allowed after each step, and before it."""
    if store.mask is None:
        return None, None
    lanes = items % store.lanes
    return store.mask[next_rows % store.rows, lanes], store.mask[items // store.lanes % store.rows, lanes]


def cut_indices(store: Store, items: Array, n_step: NStepReturn, weight: Array, ids: Array) -> Batch:
    """The batch that `StepCut` cuts, with frame indices [N, stack] instead of observations."""
    rows = items // store.lanes
    lanes = items % store.lanes
    reward, discount, ahead = sum_rewards(store, items, n_step)
    obs, next_obs = np.empty((2, len(items), store.spec.stack), np.int64)
    stack_indices(store.last, store.heads, rows, lanes, obs)
    stack_indices(store.last, store.heads, ahead, lanes, next_obs)
    action = store.action[rows % store.rows, lanes].astype(np.int64)
    return Batch(obs, action, reward, discount, next_obs, weight, ids, *masks_of(store, items, ahead))


def sum_rewards(store: Store, items: Array, n_step: NStepReturn) -> tuple[Array, Array, Array]:
    """n-step reward [N] and discount [N] of these items, and the row [N] that each bootstraps from."""
    reward, discount = np.empty((2, len(items)), np.float32)
    next_rows = np.empty(len(items), np.int64)
    n_step_sums(store.kernel_columns, items, n_step.numbers, (reward, discount, next_rows))
    return reward, discount, next_rows


def chunks(store: Store, num: int, size: int) -> list[tuple[int, int]]:
    """Ranges of `num` items that are cut together: all at once, or `size` each if blocks have to be unpacked."""
    if store.packed is None:
        return [(0, num)]
    return [(begin, min(begin + size, num)) for begin in range(0, num, size)]


def unpack_steps(store: Store, items: Array, n_step: NStepReturn) -> None:
    """Unpack the frames of these steps' observations and next observations, if frames are compressed."""
    if store.packed is None:
        return
    rows = np.concatenate([items // store.lanes, sum_rewards(store, items, n_step)[2]])
    back = np.arange(store.spec.stack)[:, None]
    store.packed.unpack_rows(rows - back, np.tile(items % store.lanes, 2), store.heads)


def unpack_windows(store: Store, items: Array, rows: int) -> None:
    """Unpack the frames of these windows, if frames are compressed."""
    if store.packed is not None:
        offsets = np.arange(1 - store.spec.stack, rows)[:, None]
        store.packed.unpack_rows(items // store.lanes + offsets, items % store.lanes, store.heads)


def empty_batch(spec: Spec, num: int, *, overlap: bool = False) -> Batch:
    """An uninitialised batch of `num` steps; its stacks of observations and next observations may overlap.

    They are then all but the last and all but the first frame of stacks with one frame more.
    """
    if overlap:
        frames = np.empty((num, spec.stack + 1, *spec.obs), spec.dtype)
        obs = frames[:, :-1]
        next_obs = frames[:, 1:]
    else:
        obs, next_obs = (np.empty((num, *spec.input_shape), spec.dtype) for _ in range(2))
    reward, discount, weight = (np.empty(num, np.float32) for _ in range(3))
    action, ids = (np.empty(num, np.int64) for _ in range(2))
    return Batch(obs, action, reward, discount, next_obs, weight, ids)


def flat_frames(batch: Batch, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """The memory of observations and of next observations as such integers, the latter empty if they overlap."""
    if batch.obs.base is not None:
        return batch.obs.base.reshape(-1).view(dtype), np.empty(0, dtype)
    return batch.obs.reshape(-1).view(dtype), batch.next_obs.reshape(-1).view(dtype)


def empty_sequences(spec: Spec, rows: int, length: int, num: int) -> Sequences:
    """An uninitialised batch of `num` windows."""
    return Sequences(
        obs=np.empty((rows, num, *spec.input_shape), spec.dtype),
        action=np.empty((rows, num), np.int64),
        gain=np.empty((rows, num), np.float32),
        last=np.empty((rows, num), np.bool_),
        state=np.zeros((num, 0), np.float32),
        reward=np.empty((length, num), np.float32),
        discount=np.empty((length, num), np.float32),
        ahead=np.empty((length, num), np.int64),
        weight=np.empty(num, np.float32),
        ids=np.empty(num, np.int64),
    )


def actor_error(store: Store, items: Array, n_step: NStepReturn) -> Array:
    """|R + discount * max value of the bootstrap row - value of the action taken| [N], all by the actor's own network.

    Values and rewards are returns; a learner of rescaled values measures its errors on their scale, so this does too.
    """
    if store.value is None:
        raise ValueError("this store keeps no values")
    lanes = items % store.lanes
    reward, discount, ahead = sum_rewards(store, items, n_step)
    target = reward + discount * store.value[ahead % store.rows, lanes, 1]
    value = store.value[items // store.lanes % store.rows, lanes, 0]
    error: Array = np.abs(signed_hyperbolic(target) - signed_hyperbolic(value) if n_step.rescale else target - value)
    return error
