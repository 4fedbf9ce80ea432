"""Compiled loops of the replay: writing rows and queueing the items that they complete.

Shapes: R rows of a ring, L lanes, D integers of a stored observation, T rows of a rollout of B lanes. An item is a
(row, lane) pair written as one number, row * L + lane; rows count from the start of the run, in each lane by itself.
"""

from typing import TypeAlias

from numba import njit

from qfleet.data import Array

Row: TypeAlias = tuple[Array, Array, Array, Array, Array]  # observations, action, reward, discount, last
CutRule: TypeAlias = tuple[int, int, bool]  # a cut's window, stride and ends
Queue: TypeAlias = tuple[Array, Array, Array]  # first, items, serials of a `Replay`


@njit(cache=True)
def gather_items(items: Array, serials: Array, out: Array) -> None:
    """The items with these serial numbers."""
    for i in range(serials.shape[0]):
        out[i] = items[serials[i] % items.shape[0]]


@njit(cache=True)
def write_rows(columns: Row, new: Row, begin: int, end: int, heads: Array, lane: int, write_frames: bool) -> int:
    """Write rows [begin, end) of a rollout into its B lanes from `lane` on, each at its head, and move the heads.

    Without `write_frames` the observations are left out (compressed ones live elsewhere). Returns the number of steps.
    """
    frames, action, reward, discount, last = columns
    new_obs, new_action, new_reward, new_discount, new_last = new
    rows = last.shape[0]
    width = new_last.shape[1]
    steps = 0
    for time in range(begin, end):
        for i in range(width):
            slot = (heads[lane + i] + time - begin) % rows
            at = lane + i
            if write_frames:
                for d in range(frames.shape[1]):
                    frames[slot * last.shape[1] + at, d] = new_obs[time, i, d]
            action[slot, at] = new_action[time, i]
            reward[slot, at] = new_reward[time, i]
            discount[slot, at] = new_discount[time, i]
            last[slot, at] = new_last[time, i]
            steps += not new_last[time, i]
    heads[lane : lane + width] += end - begin
    return steps


@njit(cache=True)
def write_column(column: Array, new: Array, begin: int, end: int, heads: Array, lane: int) -> None:
    """Write one column of D numbers in the same places; the heads do not move."""
    rows = column.shape[0]
    for time in range(begin, end):
        for i in range(new.shape[1]):
            column[(heads[lane + i] + time - begin) % rows, lane + i] = new[time, i]


@njit(cache=True)
def queue_completed(
    last: Array, heads: Array, begin: int, end: int, num: int, cut: CutRule, queue: Queue, depth: int, head: int
) -> tuple[int, int]:
    """Queue the items that the newest `num` rows of lanes [begin, end) completed: row by row, lane by lane.

    `first[lane]` is the row where the lane's next item begins, `serials` [R, L] the serial number of the item that
    begins in a row, or -1. With `ends` an item ends with its episode. Returns the new head, and the largest serial
    number of the items of which a row (of a stack of `depth`) was overwritten, or -1.
    """
    window, stride, ends = cut
    first, items, serials = queue
    rows, lanes = last.shape
    overwritten = -1
    for time in range(num):
        for lane in range(begin, end):
            row = heads[lane] - num + time
            # The item whose first frame this row overwrites.
            overwritten = max(overwritten, serials[(row + depth - 1) % rows, lane])
            serials[row % rows, lane] = -1
            if ends and last[row % rows, lane]:
                head = queue_episode_tail(row, lane, lanes, first, items, head)
            elif row - first[lane] == window:
                items[head % items.shape[0]] = first[lane] * lanes + lane
                head += 1
                first[lane] += stride
    return head, overwritten


@njit(cache=True)
def queue_episode_tail(row: int, lane: int, lanes: int, first: Array, items: Array, head: int) -> int:
    """Queue the last items of an episode, whose windows are shorter; `row` is its final observation, not a step."""
    for begin in range(first[lane], row):
        items[head % items.shape[0]] = begin * lanes + lane
        head += 1
    first[lane] = row + 1
    return head


@njit(cache=True)
def seal(
    last: Array, heads: Array, begin: int, end: int, ends: bool, first: Array, items: Array, head: int
) -> tuple[int, int]:
    """Mark the newest rows of lanes [begin, end) as `last`; returns the new head and the number of rows marked."""
    rows, lanes = last.shape
    marked = 0
    for lane in range(begin, end):
        newest = heads[lane] - 1
        if newest >= 0 and not last[newest % rows, lane]:
            last[newest % rows, lane] = True
            marked += 1
            if ends:
                head = queue_episode_tail(newest, lane, lanes, first, items, head)
        first[lane] = newest + 1
    return head, marked


@njit(cache=True)
def record_serials(items: Array, serials: Array, begin: int, end: int) -> None:
    """Write the serial numbers [begin, end) into the rows where their items begin."""
    rows, lanes = serials.shape
    for serial in range(begin, end):
        item = items[serial % items.shape[0]]
        serials[item // lanes % rows, item % lanes] = serial
