"""Compiled loops of the replay: cutting items into batches.

Shapes: R rows of a ring, L lanes, D integers of a stored observation, N items, n the n-step length.
An item is a (row, lane) pair written as one number, row * L + lane; rows count from the start of the run and never
repeat; their slot in the ring is row % R.
"""

from typing import Any, TypeAlias

from numba import njit
from numba.core import event

from qfleet.data import Array
from qfleet.replay.memory_copy import copy_frames
from qfleet.system.timers import COMPILE_TIMER

BLOCK = 16  # rows of one lane that are compressed together
Arrays: TypeAlias = tuple[Array, ...]
Columns: TypeAlias = Arrays  # a store's table, heads, action, reward, discount, last
NStep: TypeAlias = tuple[int, float, bool]  # n, gamma, and whether rewards are clipped to [-1, 1]


class CompileTime(event.Listener):
    """Reports numba's compile time to the stopwatches of this process: the first run on a machine waits for it."""

    def on_start(self, event: Any) -> None:
        """Compilation has begun."""
        COMPILE_TIMER.__enter__()

    def on_end(self, event: Any) -> None:
        """Compilation has ended."""
        COMPILE_TIMER.__exit__()


event.register("numba:compile", CompileTime())  # type: ignore[no-untyped-call]


@njit(cache=True)
def n_step_sum(
    reward: Array, discount: Array, last: Array, row: int, lane: int, n_step: NStep
) -> tuple[float, float, int]:
    """Sum up to n rewards from `row` on: the n-step reward and discount, and the row to bootstrap from."""
    n, gamma, clip = n_step
    rows = last.shape[0]
    total = 0.0
    discount_product = 1.0
    for step in range(n):
        slot = (row + step) % rows
        step_reward = float(reward[slot, lane])
        if clip:
            step_reward = min(max(step_reward, -1.0), 1.0)
        total += discount_product * step_reward
        discount_product *= gamma * discount[slot, lane]
        if last[(row + step + 1) % rows, lane]:
            return total, discount_product, row + step + 1
    return total, discount_product, row + n


@njit(cache=True)
def frame_at(table: Array, heads: Array, rows: int, row: int, lane: int) -> int:
    """Index of a row's frame: in the ring, or among the unpacked blocks if frames are compressed (with a table)."""
    lanes: int = heads.shape[0]
    if table.shape[0] == 0:
        return row % rows * lanes + lane
    block = row // BLOCK
    if block == heads[lane] // BLOCK:
        return row % BLOCK * lanes + lane
    first: int = table[block % table.shape[0], lane]
    return first + row % BLOCK


@njit(cache=True)
def stack_into(
    frames: Array, table: Array, heads: Array, last: Array, row: int, lane: int, out: Array, place: int, depth: int
) -> None:
    """Copy the `depth` frames that lead up to `row` to `place` and the places after it.

    Those before the episode's first frame become zeros.
    """
    rows, lanes = last.shape
    earlier = depth - 1  # frames before `row` that belong to its episode
    for back in range(1, depth):
        if row < back or last[(row - back) % rows, lane]:
            earlier = back - 1
            break
    first = place + depth - 1 - earlier
    out[place * frames.shape[1] : first * frames.shape[1]] = 0
    if table.shape[0]:
        for at in range(earlier + 1):
            copy_frames(frames, frame_at(table, heads, rows, row - earlier + at, lane), 1, out, first + at)
    elif lanes == 1 and row % rows >= earlier:
        copy_frames(frames, row % rows - earlier, earlier + 1, out, first)
    else:
        for at in range(earlier + 1):  # forwards, as memory is read fastest
            copy_frames(frames, (row - earlier + at) % rows * lanes + lane, 1, out, first + at)


@njit(cache=True)
def stack_indices(last: Array, heads: Array, row: Array, lane: Array, out: Array) -> None:
    """Indices of the frames that lead up to each of N rows; the index behind all others stands for a blank frame."""
    rows = last.shape[0]
    depth = out.shape[1]
    lanes = heads.shape[0]
    for i in range(row.shape[0]):
        out[i, :] = rows * lanes
        for back in range(depth):
            if row[i] < back or (back and last[(row[i] - back) % rows, lane[i]]):
                break
            out[i, depth - 1 - back] = (row[i] - back) % rows * lanes + lane[i]


@njit(cache=True)
def cut_steps(
    frames: Array, columns: Columns, items: Array, begin: int, stop: int, n_step: NStep, depth: int, out: Arrays
) -> None:
    """Cut items [begin, stop) of N into a batch; `next_rows` receives the row that each bootstraps from.

    Stacks of `depth` frames are written one after the other. With an empty `out_next`, both stacks of an item overlap
    in `out_obs`: they are all but the last and all but the first of depth + 1 frames.
    """
    table, heads, action, reward, discount, last = columns
    out_obs, out_action, out_reward, out_discount, out_next, next_rows = out
    rows, lanes = last.shape
    overlap = out_next.shape[0] == 0
    places = depth + 1 if overlap else depth
    for i in range(begin, stop):
        # Touch every column for all items first: the cache misses then overlap.
        slot = items[i] // lanes % rows
        lane = items[i] % lanes
        out_action[i] = action[slot, lane]
        out_reward[i] = reward[slot, lane]
        out_discount[i] = discount[slot, lane]
        next_rows[i] = last[slot, lane]
        if table.shape[0] == 0:
            out_obs[i * places * frames.shape[1]] = frames[slot * lanes + lane, 0]
    for i in range(begin, stop):
        row = items[i] // lanes
        lane = items[i] % lanes
        total, discount_product, end = n_step_sum(reward, discount, last, row, lane, n_step)
        if overlap:
            stack_into(frames, table, heads, last, end, lane, out_obs, i * places, places)
        else:
            stack_into(frames, table, heads, last, row, lane, out_obs, i * places, places)
            stack_into(frames, table, heads, last, end, lane, out_next, i * places, places)
        out_reward[i] = total
        out_discount[i] = discount_product
        next_rows[i] = end


@njit(cache=True)
def n_step_sums(columns: Columns, items: Array, n_step: NStep, out: Arrays) -> None:
    """Sum the rewards of N items: their n-step rewards, discounts, and the row that each bootstraps from."""
    _, _, _, reward, discount, last = columns
    out_reward, out_discount, next_rows = out
    lanes = last.shape[1]
    for i in range(items.shape[0]):
        row = items[i] // lanes
        lane = items[i] % lanes
        out_reward[i], out_discount[i], next_rows[i] = n_step_sum(reward, discount, last, row, lane, n_step)


@njit(cache=True)
def cut_sequences(
    frames: Array,
    columns: Columns,
    items: Array,
    begin: int,
    stop: int,
    burn_in: int,
    n_step: NStep,
    depth: int,
    out: Arrays,
) -> None:
    """Cut windows [begin, stop) of N, W rows each, time-major; the L rows after the burn-in get n-step rewards."""
    table, heads, action, reward, discount, last = columns
    out_obs, out_action, out_gain, out_last, out_reward, out_discount, out_ahead = out
    rows, lanes = last.shape
    for i in range(begin, stop):
        first = items[i] // lanes
        lane = items[i] % lanes
        for w in range(out_last.shape[0]):
            slot = (first + w) % rows
            stack_into(frames, table, heads, last, first + w, lane, out_obs, (w * items.shape[0] + i) * depth, depth)
            out_action[w, i] = action[slot, lane]
            out_gain[w, i] = reward[slot, lane]
            out_last[w, i] = last[slot, lane]
        for at in range(out_reward.shape[0]):
            row = first + burn_in + at
            if last[row % rows, lane]:
                # A final observation has no action. It points at itself, and the view leaves it out.
                out_reward[at, i] = 0.0
                out_discount[at, i] = 0.0
                out_ahead[at, i] = burn_in + at
                continue
            total, discount_product, end = n_step_sum(reward, discount, last, row, lane, n_step)
            out_reward[at, i] = total
            out_discount[at, i] = discount_product
            out_ahead[at, i] = end - first
