"""A sum tree with sixteen branches per node, for sampling in proportion to priorities. Shapes: M leaves, N draws.

The leaves come first, then the sums of each sixteen of them, the sums of these, and at the end the total. Sixteen
numbers are two cache lines: a million leaves are five levels away from the root, not twenty.
"""

import numpy as np
from numba import njit

from qfleet.data import Array

BRANCHES = 16


def tree_levels(leaves: int) -> Array:  # [levels + 1]
    """Where each level begins, the leaves first; the last number is the size of the whole tree."""
    begins = [0]
    size = leaves
    while size > 1:
        size = -(-size // BRANCHES)
        begins.append(begins[-1] + size * BRANCHES)
    return np.array([*begins, begins[-1] + 1], np.int64)


@njit(cache=True)
def branch_sum(tree: Array, begin: int) -> float:
    """The sum of sixteen neighbours, by four accumulators: one alone would wait for the result of every addition."""
    a = tree[begin]
    b = tree[begin + 1]
    c = tree[begin + 2]
    d = tree[begin + 3]
    for at in range(begin + 4, begin + BRANCHES, 4):
        a += tree[at]
        b += tree[at + 1]
        c += tree[at + 2]
        d += tree[at + 3]
    total: float = (a + b) + (c + d)
    return total


@njit(cache=True)
def update_sums(tree: Array, levels: Array, first: int, last: int) -> None:
    """Recompute the sums above leaves [first, last]."""
    for level in range(levels.shape[0] - 2):
        first //= BRANCHES
        last //= BRANCHES
        for node in range(first, last + 1):
            tree[levels[level + 1] + node] = branch_sum(tree, levels[level] + node * BRANCHES)


@njit(cache=True)
def tree_set(
    tree: Array, levels: Array, serials: Array, priority: Array, tail: int, modulus: int, eps: float, alpha: float
) -> float:
    """Write (priority + eps)^alpha into the leaves of live serial numbers; returns the largest priority + eps."""
    largest = 0.0
    for i in range(serials.shape[0]):
        if serials[i] >= tail:
            size = float(priority[i]) + eps
            largest = max(largest, size)
            tree[serials[i] % modulus] = size**alpha
    reach = 1
    for level in range(levels.shape[0] - 2):
        reach *= BRANCHES
        before = -1
        for i in range(serials.shape[0]):
            node = serials[i] % modulus // reach
            # Drawn serial numbers are in the order of their leaves, so neighbours share their sums.
            if serials[i] >= tail and node != before:
                tree[levels[level + 1] + node] = branch_sum(tree, levels[level] + node * BRANCHES)
                before = node
    return largest


@njit(cache=True)
def tree_fill(tree: Array, levels: Array, first: int, num: int, modulus: int, value: float) -> None:
    """Write the same value into `num` leaves from `first` on, wrapping at `modulus`."""
    while num > 0:
        begin = first % modulus
        end = min(begin + num, modulus)
        tree[begin:end] = value
        update_sums(tree, levels, begin, end - 1)
        first += end - begin
        num -= end - begin


@njit(cache=True)
def branch_at(tree: Array, begin: int, position: float) -> tuple[int, float]:
    """The branch, never an empty one, in which a position of the cumulative sum falls, and the position within it."""
    chosen = 0
    for branch in range(BRANCHES):
        mass = tree[begin + branch]
        if mass > 0.0:
            chosen = branch
            if position < mass:
                return chosen, position
            position -= mass
    return chosen, np.inf  # rounding led past the end: the last leaf that is not zero


@njit(cache=True)
def tree_find(tree: Array, levels: Array, positions: Array, leaves: Array) -> None:
    """Find the leaf of each position in [0, total) of the cumulative sum; overwrites the positions.

    All go down one level before any goes down the next, and touch their branches first: the cache misses then overlap.
    """
    leaves[:] = 0
    for level in range(levels.shape[0] - 3, -1, -1):
        begin = levels[level]
        seen = 0.0
        for i in range(positions.shape[0]):
            at = begin + leaves[i] * BRANCHES
            seen += tree[at] + tree[at + BRANCHES // 2]
        if seen < 0.0:
            break  # never true; without a use of `seen` the compiler would remove the reads above
        for i in range(positions.shape[0]):
            branch, positions[i] = branch_at(tree, begin + leaves[i] * BRANCHES, positions[i])
            leaves[i] = leaves[i] * BRANCHES + branch


@njit(cache=True)
def tree_draw(
    tree: Array, levels: Array, jitter: Array, live: tuple[int, int, int], beta: float, serials: Array, weight: Array
) -> None:
    """Draw once from each of N equal slices of the total; weights are (N P)^-beta, normalised. Overwrites `jitter`.

    `live` is (tail, head, number of leaves).
    """
    tail, head, modulus = live
    num = jitter.shape[0]
    total = tree[-1]
    largest = 0.0
    for i in range(num):
        jitter[i] = (i + jitter[i]) * (total / num)
    tree_find(tree, levels, jitter, serials)
    for i in range(num):
        jitter[i] = ((head - tail) * (tree[serials[i]] / total)) ** -beta
        largest = max(largest, jitter[i])
        # A leaf belongs to the one live serial number that is congruent to it.
        serials[i] = tail + (serials[i] - tail) % modulus
    for i in range(num):
        weight[i] = jitter[i] / largest
