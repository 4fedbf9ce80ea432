"""Compiled loops of the replay: what becomes ready, how items are cut, and the sum tree.

Shapes: R rows of a ring, L lanes, D numbers per stored observation, N items, n the n-step length.
An item is a (row, lane) pair written as one number, row * L + lane; rows count from the start of the run and never
repeat, their place in the ring is row % R.
"""

from numba import njit

from qfleet.data import Array


@njit(cache=True)
def write_rows(
    obs: Array,
    action: Array,
    reward: Array,
    discount: Array,
    last: Array,
    new_obs: Array,
    new_action: Array,
    new_reward: Array,
    new_discount: Array,
    new_last: Array,
    heads: Array,
    lane: int,
) -> None:
    """Write T rows of B lanes from `lane` on, each at its lane's own head; the heads stay where they are."""
    rows = last.shape[0]
    for time in range(new_last.shape[0]):
        for i in range(new_last.shape[1]):
            slot, at = (heads[lane + i] + time) % rows, lane + i
            obs[slot, at] = new_obs[time, i]
            action[slot, at] = new_action[time, i]
            reward[slot, at] = new_reward[time, i]
            discount[slot, at] = new_discount[time, i]
            last[slot, at] = new_last[time, i]


@njit(cache=True)
def write_column(column: Array, new: Array, heads: Array, lane: int) -> None:
    """The same for one column of D numbers."""
    rows = column.shape[0]
    for time in range(new.shape[0]):
        for i in range(new.shape[1]):
            column[(heads[lane + i] + time) % rows, lane + i] = new[time, i]


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


@njit(cache=True)
def fold(
    reward: Array,
    discount: Array,
    last: Array,
    row: int,
    lane: int,
    n: int,
    gamma: float,
    clip: bool,
) -> tuple[float, float, int]:
    """Sum up to n rewards from `row` on: the folded reward, the folded discount, and the row to bootstrap from."""
    rows = last.shape[0]
    total, keep = 0.0, 1.0
    for step in range(n):
        slot = (row + step) % rows
        gain = float(reward[slot, lane])
        if clip:
            gain = min(max(gain, -1.0), 1.0)
        total += keep * gain
        keep *= gamma * discount[slot, lane]
        if last[(row + step + 1) % rows, lane]:
            return total, keep, row + step + 1
    return total, keep, row + n


@njit(cache=True)
def stack_into(obs: Array, last: Array, row: int, lane: int, out: Array) -> None:
    """Copy the frames that lead up to `row`, zeros before the episode's first one."""
    rows, depth = obs.shape[0], out.shape[0]
    at = row
    for place in range(depth - 1, -1, -1):
        out[place] = obs[at % rows, lane]
        if at == 0 or last[(at - 1) % rows, lane]:
            out[:place] = 0
            return
        at -= 1


@njit(cache=True)
def cut(
    obs: Array,
    action: Array,
    reward: Array,
    discount: Array,
    last: Array,
    items: Array,
    n: int,
    gamma: float,
    clip: bool,
    out_obs: Array,
    out_action: Array,
    out_reward: Array,
    out_discount: Array,
    out_next: Array,
    next_rows: Array,
) -> None:
    """Cut N items out of the ring into a batch; `next_rows` tells which row each bootstraps from."""
    rows, lanes = last.shape
    for i in range(items.shape[0]):
        row, lane = items[i] // lanes, items[i] % lanes
        total, keep, end = fold(reward, discount, last, row, lane, n, gamma, clip)
        stack_into(obs, last, row, lane, out_obs[i])
        stack_into(obs, last, end, lane, out_next[i])
        out_action[i] = action[row % rows, lane]
        out_reward[i] = total
        out_discount[i] = keep
        next_rows[i] = end


@njit(cache=True)
def fold_many(
    reward: Array,
    discount: Array,
    last: Array,
    items: Array,
    n: int,
    gamma: float,
    clip: bool,
    out_reward: Array,
    out_discount: Array,
    next_rows: Array,
) -> None:
    """Fold the rewards of N items and tell which row each bootstraps from."""
    lanes = last.shape[1]
    for i in range(items.shape[0]):
        row, lane = items[i] // lanes, items[i] % lanes
        out_reward[i], out_discount[i], next_rows[i] = fold(reward, discount, last, row, lane, n, gamma, clip)


@njit(cache=True)
def cut_sequences(
    obs: Array,
    action: Array,
    reward: Array,
    discount: Array,
    last: Array,
    items: Array,
    burn_in: int,
    n: int,
    gamma: float,
    clip: bool,
    out_obs: Array,
    out_action: Array,
    out_gain: Array,
    out_last: Array,
    out_reward: Array,
    out_discount: Array,
    out_ahead: Array,
) -> None:
    """Cut windows of W rows out of the ring, time-major; the L rows after the burn-in get folded rewards."""
    rows, lanes = last.shape
    for i in range(items.shape[0]):
        begin, lane = items[i] // lanes, items[i] % lanes
        for w in range(out_last.shape[0]):
            slot = (begin + w) % rows
            stack_into(obs, last, begin + w, lane, out_obs[w, i])
            out_action[w, i] = action[slot, lane]
            out_gain[w, i] = reward[slot, lane]
            out_last[w, i] = last[slot, lane]
        for at in range(out_reward.shape[0]):
            row = begin + burn_in + at
            if last[row % rows, lane]:
                # A final observation: nothing was done there. It points at itself, and the view leaves it out.
                out_reward[at, i], out_discount[at, i], out_ahead[at, i] = 0.0, 0.0, burn_in + at
                continue
            total, keep, end = fold(reward, discount, last, row, lane, n, gamma, clip)
            out_reward[at, i], out_discount[at, i], out_ahead[at, i] = total, keep, end - begin


@njit(cache=True)
def tree_set(tree: Array, leaves: Array, values: Array) -> None:
    """Write leaves and renew the sums above them. tree[1] is the root, tree[size + i] leaf i, size a power of two."""
    size = tree.shape[0] // 2
    for i in range(leaves.shape[0]):
        node = size + leaves[i]
        tree[node] = values[i]
        node //= 2
        while node >= 1:
            tree[node] = tree[2 * node] + tree[2 * node + 1]
            node //= 2


@njit(cache=True)
def tree_fill(tree: Array, first: int, num: int, modulus: int, value: float) -> None:
    """Write the same value into `num` leaves from `first` on, wrapping at `modulus`."""
    size = tree.shape[0] // 2
    for i in range(num):
        node = size + (first + i) % modulus
        tree[node] = value
        node //= 2
        while node >= 1:
            tree[node] = tree[2 * node] + tree[2 * node + 1]
            node //= 2


@njit(cache=True)
def tree_find(tree: Array, marks: Array, out: Array) -> None:
    """For each mark in [0, root) the leaf whose share of the total it falls into; never a leaf of zero."""
    size = tree.shape[0] // 2
    for i in range(marks.shape[0]):
        mark, node = marks[i], 1
        while node < size:
            node *= 2
            # Rounding may leave a mark at or past the left sum with nothing on the right: stay left then.
            if mark >= tree[node] and tree[node + 1] > 0.0:
                mark -= tree[node]
                node += 1
        out[i] = node - size


@njit(cache=True)
def tree_sum(tree: Array) -> None:
    """Recompute every inner node from the leaves."""
    for node in range(tree.shape[0] // 2 - 1, 0, -1):
        tree[node] = tree[2 * node] + tree[2 * node + 1]
