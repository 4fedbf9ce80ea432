"""The filter of duplicates: a step with enough equal live steps is not queued. Shapes: N items, L lanes.

Two steps are equal if the learner sees no difference: observation (all frames of its stack), action, n-step reward
and discount, next observation, and the actions allowed in both. They are compared by a 64-bit hash: among a million
different steps two share a hash with a probability of about 10^12 / 2^65, three in a hundred million, and then one of
them cannot be drawn while the other can. The oldest copies stay; when one is removed, the next copy is let in.
"""

from collections import Counter, deque

import numpy as np
from numba import njit

from qfleet.data import Array, State
from qfleet.data.state_reader import saved_count, saved_numbers
from qfleet.replay.cuts import NStepReturn, unpack_steps
from qfleet.replay.kernels import Columns, NStep, frame_at, n_step_sum
from qfleet.replay.store import Store

# Odd numbers near 2^64 times the golden ratio and the square root of 3: multiplying by them loses nothing.
FIRST = np.uint64(0x9E3779B97F4A7C15)
FACTOR = np.uint64(0xBB67AE8584CAA73B)
SHIFT = np.uint64(32)


@njit(cache=True)
def mix(state: np.uint64, value: np.uint64) -> np.uint64:
    """Mix one more value into the hash; for a given value different states stay different."""
    state = (state ^ value) * FACTOR
    return state ^ (state >> SHIFT)


@njit(cache=True)
def mix_stack(
    state: np.uint64, frames: Array, table: Array, heads: Array, last: Array, row: int, lane: int, depth: int
) -> np.uint64:
    """Mix in the frames that lead up to `row`, newest first, zeros before the episode's first one."""
    rows = last.shape[0]
    blank = False
    for _ in range(depth):
        frame = 0 if blank else frame_at(table, heads, rows, row, lane)
        for d in range(frames.shape[1]):
            state = mix(state, np.uint64(0) if blank else np.uint64(frames[frame, d]))
        blank = blank or row == 0 or last[(row - 1) % rows, lane]
        row -= 1
    return state


@njit(cache=True)
def hash_steps(
    frames: Array, columns: Columns, depth: int, mask: Array, items: Array, n_step: NStep, keys: Array, still: Array
) -> None:
    """A key for each of N items, and whether its step changed nothing; `mask` may be empty."""
    table, heads, action, reward, discount, last = columns
    rows, lanes = last.shape
    summed = np.empty(2, np.float64)
    for i in range(items.shape[0]):
        row = items[i] // lanes
        lane = items[i] % lanes
        total, discount_product, end = n_step_sum(reward, discount, last, row, lane, n_step)
        # Adding 0 makes -0 equal to 0.
        summed[0] = total + 0.0
        summed[1] = discount_product + 0.0
        bits = summed.view(np.uint64)
        here = mix_stack(FIRST, frames, table, heads, last, row, lane, depth)
        there = mix_stack(FIRST, frames, table, heads, last, end, lane, depth)
        key = mix(mix(FIRST, here), there)
        key = mix(key, np.uint64(action[row % rows, lane]))
        for choice in range(mask.shape[2]):
            key = mix(key, np.uint64(mask[row % rows, lane, choice]) + np.uint64(2 * mask[end % rows, lane, choice]))
        keys[i] = np.int64(mix(mix(key, bits[0]), bits[1]))
        still[i] = here == there and total == 0.0 and discount_product > 0.0


class DuplicateFilter:
    """Counts the copies of each step among the live items and rejects further ones."""

    def __init__(self, copies: int = 1, *, still: bool = False) -> None:
        self.copies = copies
        self.still = still
        self.keys: deque[int] = deque()  # hashes of the live items, oldest first
        self.copies_of: dict[int, int] = {}
        self.offered = self.kept_out = 0  # since the run began

    @property
    def share(self) -> float:
        """The share of all items that were rejected."""
        return self.kept_out / self.offered if self.offered else 0.0

    def reject_copies(self, store: Store, n_step: NStepReturn, items: Array, begin: int, end: int) -> int:
        """Compact the new items [begin, end) of the ring `items` to those that are accepted; returns their end."""
        slots = len(items)
        new = items[np.arange(begin, end) % slots]
        keys, still = self.hash_items(store, n_step, new)
        accepted = begin
        for item, key, idle in zip(new.tolist(), keys.tolist(), still.tolist(), strict=True):
            if (idle and self.still) or (count := self.copies_of.get(key, 0)) >= self.copies:
                continue
            self.copies_of[key] = count + 1
            self.keys.append(key)
            items[accepted % slots] = item
            accepted += 1
        self.offered += end - begin
        self.kept_out += end - accepted
        return accepted

    def hash_items(self, store: Store, n_step: NStepReturn, items: Array) -> tuple[Array, Array]:  # [N] keys, [N] bool
        """The items' hashes, and whether each step changed nothing."""
        keys = np.empty(len(items), np.int64)
        still = np.empty(len(items), np.bool_)
        mask = np.zeros((store.rows, store.lanes, 0), np.bool_) if store.mask is None else store.mask
        unpack_steps(store, items, n_step)
        hash_steps(store.frames, store.kernel_columns, store.spec.stack, mask, items, n_step.numbers, keys, still)
        return keys, still

    def remove_oldest(self, num: int) -> None:
        """Forget the `num` oldest items, which can no longer be drawn: copies of them are accepted again."""
        for _ in range(num):
            key = self.keys.popleft()
            if self.copies_of[key] == 1:
                del self.copies_of[key]
            else:
                self.copies_of[key] -= 1

    def state_dict(self) -> State:
        """The keys of the live items, and the counts."""
        keys = np.fromiter(self.keys, np.int64, len(self.keys))
        return {"keys": keys, "offered": self.offered, "kept_out": self.kept_out}

    def load_state_dict(self, state: State, num: int) -> None:
        """Restore the keys of `num` live items, and the counts."""
        keys = saved_numbers(state, "keys", (num,), -(2**63), 2**63 - 1).tolist()
        self.offered = saved_count(state, "offered")
        self.kept_out = saved_count(state, "kept_out", self.offered)
        self.keys = deque(keys)
        self.copies_of = dict(Counter(keys))
