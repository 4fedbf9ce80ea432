"""Compiled loops of the replay: how rows come in and what they make ready.

Shapes: R rows of a ring, L lanes, D words of a stored observation, T rows of a rollout of B lanes. An item is a
(row, lane) pair written as one number, row * L + lane; rows count from the start of the run, in each lane by itself.
"""

from numba import njit

from qfleet.data import Array


@njit(cache=True)
def look_up(items: Array, serials: Array, out: Array) -> None:
    """The items with these serial numbers."""
    for i in range(serials.shape[0]):
        out[i] = items[serials[i] % items.shape[0]]


@njit(cache=True)
def write_rows(
    frames: Array,
    action: Array,
    reward: Array,
    discount: Array,
    last: Array,
    new_obs: Array,
    new_action: Array,
    new_reward: Array,
    new_discount: Array,
    new_last: Array,
    begin: int,
    end: int,
    heads: Array,
    lane: int,
    seen: bool,
) -> int:
    """Write rows [begin, end) of a rollout into its B lanes from `lane` on, each at its head, and move the heads.

    `seen`: with what they show, which is written elsewhere if it is to be packed. Answers how many rows are steps.
    """
    rows = last.shape[0]
    width = new_last.shape[1]
    steps = 0
    for time in range(begin, end):
        for i in range(width):
            slot = (heads[lane + i] + time - begin) % rows
            at = lane + i
            if seen:
                for word in range(frames.shape[1]):
                    frames[slot * last.shape[1] + at, word] = new_obs[time, i, word]
            action[slot, at] = new_action[time, i]
            reward[slot, at] = new_reward[time, i]
            discount[slot, at] = new_discount[time, i]
            last[slot, at] = new_last[time, i]
            steps += not new_last[time, i]
    heads[lane : lane + width] += end - begin
    return steps


@njit(cache=True)
def write_column(column: Array, new: Array, begin: int, end: int, heads: Array, lane: int) -> None:
    """The same for one column of D numbers; the heads stay where they are."""
    rows = column.shape[0]
    for time in range(begin, end):
        for i in range(new.shape[1]):
            column[(heads[lane + i] + time - begin) % rows, lane + i] = new[time, i]


@njit(cache=True)
def admit(
    last: Array,
    heads: Array,
    begin: int,
    end: int,
    num: int,
    window: int,
    stride: int,
    ends: bool,
    depth: int,
    first: Array,
    items: Array,
    serials: Array,
    head: int,
) -> tuple[int, int]:
    """Queue the items that the newest `num` rows of lanes [begin, end) completed: row by row, lane by lane.

    `first[lane]` is where the lane's next item begins, `serials` [R, L] the serial number of the item that begins at a
    place, or -1. With `ends` an item is over with its episode. Answers the new head, and the largest serial number
    of the items that lost a row (of a stack of `depth`), or -1.
    """
    rows, lanes = last.shape
    gone = -1
    for time in range(num):
        for lane in range(begin, end):
            row = heads[lane] - num + time
            # The item whose first frame stood where this row stands now.
            gone = max(gone, serials[(row + depth - 1) % rows, lane])
            serials[row % rows, lane] = -1
            if ends and last[row % rows, lane]:
                head = flush(row, lane, lanes, first, items, head)
            elif row - first[lane] == window:
                items[head % items.shape[0]] = first[lane] * lanes + lane
                head += 1
                first[lane] += stride
    return head, gone


@njit(cache=True)
def flush(row: int, lane: int, lanes: int, first: Array, items: Array, head: int) -> int:
    """The episode is over: its tail becomes ready with shorter windows, and `row` is not a step."""
    for begin in range(first[lane], row):
        items[head % items.shape[0]] = begin * lanes + lane
        head += 1
    first[lane] = row + 1
    return head


@njit(cache=True)
def seal(
    last: Array, heads: Array, begin: int, end: int, ends: bool, first: Array, items: Array, head: int
) -> tuple[int, int]:
    """Make the newest rows of lanes [begin, end) final and begin anew after them; the new head, and how many were."""
    rows, lanes = last.shape
    turned = 0
    for lane in range(begin, end):
        newest = heads[lane] - 1
        if newest >= 0 and not last[newest % rows, lane]:
            last[newest % rows, lane] = True
            turned += 1
            if ends:
                head = flush(newest, lane, lanes, first, items, head)
        first[lane] = newest + 1
    return head, turned


@njit(cache=True)
def number(items: Array, serials: Array, begin: int, end: int) -> None:
    """Note the serial numbers [begin, end) where their items begin."""
    rows, lanes = serials.shape
    for serial in range(begin, end):
        item = items[serial % items.shape[0]]
        serials[item // lanes % rows, item % lanes] = serial
