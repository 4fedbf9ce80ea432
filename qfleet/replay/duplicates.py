"""Keeping copies out: a step that is equal to enough others that can be drawn is not queued. Shapes: N items, L lanes.

Two steps are equal if what is learned from them is: observation (all frames of its stack), action, folded reward and
discount, the observation they lead to, and the actions allowed in both. They are compared by a hash of 64 bits, into
which every word is multiplied and mixed: among a million different steps two share a hash with a probability of about
10^12 / 2^65, three in a hundred million, and then one of them cannot be drawn while the other can. The oldest copies
stay; when one leaves, the next that comes in takes its place.
"""

from collections import Counter, deque

import numpy as np
from numba import njit

from qfleet.data import Array, State
from qfleet.data.state_reader import saved_count, saved_numbers
from qfleet.replay.cuts import Fold, show_steps
from qfleet.replay.kernels import fold, frame_at
from qfleet.replay.store import Store

# Odd numbers near 2^64 times the golden ratio and the square root of 3: multiplying by them loses nothing.
FIRST = np.uint64(0x9E3779B97F4A7C15)
FACTOR = np.uint64(0xBB67AE8584CAA73B)
SHIFT = np.uint64(32)


@njit(cache=True)
def mixed(state: np.uint64, word: np.uint64) -> np.uint64:
    """One more word in the hash; for a given word different states stay different."""
    state = (state ^ word) * FACTOR
    return state ^ (state >> SHIFT)


@njit(cache=True)
def mixed_stack(
    state: np.uint64, frames: Array, table: Array, heads: Array, last: Array, row: int, lane: int, depth: int
) -> np.uint64:
    """The frames that lead up to `row`, newest first, zeros before the episode's first one."""
    rows = last.shape[0]
    at = row
    begun = False
    for _ in range(depth):
        frame = 0 if begun else frame_at(table, heads, rows, at, lane)
        for word in range(frames.shape[1]):
            state = mixed(state, np.uint64(0) if begun else np.uint64(frames[frame, word]))
        begun = begun or at == 0 or last[(at - 1) % rows, lane]
        at -= 1
    return state


@njit(cache=True)
def hash_steps(
    frames: Array,
    table: Array,
    heads: Array,
    depth: int,
    action: Array,
    reward: Array,
    discount: Array,
    last: Array,
    mask: Array,
    items: Array,
    n: int,
    gamma: float,
    clip: bool,
    keys: Array,
    still: Array,
) -> None:
    """A key for each of N items, and whether it changed nothing; `mask` may be empty."""
    rows, lanes = last.shape
    folded = np.empty(2, np.float64)
    for i in range(items.shape[0]):
        row = items[i] // lanes
        lane = items[i] % lanes
        total, keep, end = fold(reward, discount, last, row, lane, n, gamma, clip)
        # Adding 0 makes -0 equal to 0.
        folded[0] = total + 0.0
        folded[1] = keep + 0.0
        bits = folded.view(np.uint64)
        here = mixed_stack(FIRST, frames, table, heads, last, row, lane, depth)
        there = mixed_stack(FIRST, frames, table, heads, last, end, lane, depth)
        key = mixed(mixed(FIRST, here), there)
        key = mixed(key, np.uint64(action[row % rows, lane]))
        for choice in range(mask.shape[2]):
            key = mixed(key, np.uint64(mask[row % rows, lane, choice]) + np.uint64(2 * mask[end % rows, lane, choice]))
        keys[i] = np.int64(mixed(mixed(key, bits[0]), bits[1]))
        still[i] = here == there and total == 0.0 and keep > 0.0


class Duplicates:
    """Counts the copies of each step among the live ones and turns further ones away."""

    def __init__(self, copies: int = 1, *, still: bool = False) -> None:
        self.copies = copies
        self.still = still
        self.keys: deque[int] = deque()  # of the live items, oldest first
        self.copies_of: dict[int, int] = {}
        self.offered = self.kept_out = 0  # since the run began

    @property
    def share(self) -> float:
        """The share of all items that were kept out."""
        return self.kept_out / self.offered if self.offered else 0.0

    def keep(self, store: Store, fold: Fold, items: Array, begin: int, end: int) -> int:
        """Look at the newcomers [begin, end) of the ring `items`: those that may stay close up. Answers the new end."""
        slots = len(items)
        new = items[np.arange(begin, end) % slots]
        keys, still = self.look(store, fold, new)
        kept = begin
        for item, key, idle in zip(new.tolist(), keys.tolist(), still.tolist(), strict=True):
            if (idle and self.still) or (count := self.copies_of.get(key, 0)) >= self.copies:
                continue
            self.copies_of[key] = count + 1
            self.keys.append(key)
            items[kept % slots] = item
            kept += 1
        self.offered += end - begin
        self.kept_out += end - kept
        return kept

    def look(self, store: Store, fold: Fold, items: Array) -> tuple[Array, Array]:  # [N] keys, [N] bool
        """The items' hashes, and whether each changed nothing."""
        keys = np.empty(len(items), np.int64)
        still = np.empty(len(items), np.bool_)
        mask = np.zeros((store.rows, store.lanes, 0), np.bool_) if store.mask is None else store.mask
        columns = (store.action, store.reward, store.discount, store.last, mask)
        show_steps(store, items, fold)
        how = (fold.n, fold.gamma, fold.clip)
        hash_steps(store.frames, store.table, store.heads, store.spec.stack, *columns, items, *how, keys, still)
        return keys, still

    def leave(self, num: int) -> None:
        """The `num` oldest items can no longer be drawn, so copies of them may come in again."""
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
        """Take them back, for so many live items."""
        keys = saved_numbers(state, "keys", (num,), -(2**63), 2**63 - 1).tolist()
        self.offered = saved_count(state, "offered")
        self.kept_out = saved_count(state, "kept_out", self.offered)
        self.keys = deque(keys)
        self.copies_of = dict(Counter(keys))
