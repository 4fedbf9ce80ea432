"""A compiled loop that cuts single steps of a decoded file into batches.

Shapes: R rows of a file, D integers of a stored observation, N steps that are cut. A file is no ring and has one lane,
and each column is read for all steps before the next one is: the waits for memory then overlap.
"""

from numba import njit

from qfleet.data import Array
from qfleet.replay.kernels import Arrays, NStep, stack_into


@njit(cache=True)
def copy_rows(frames: Array, places: Array, rows: Array, out: Array) -> None:
    """Copy observations of these rows to these places of a batch."""
    width = frames.shape[1]
    for i in range(places.shape[0]):
        at = places[i]
        for d in range(width):
            out[at * width + d] = frames[rows[at], d]


@njit(cache=True)
def cut_rows(
    columns: Arrays, items: Array, numbers: Array, places: Array, n_step: NStep, depth: int, out: Arrays
) -> None:
    """Cut steps of a file to these places of a batch; `items` are the rows of all its steps, in order.

    With an empty `out_next` the stacks of an observation and of the next one overlap, as in the replay's own loops.
    `out_ends` receives the row that each step bootstraps from.
    """
    frames, table, heads, action, reward, discount, last = columns
    out_obs, out_action, out_reward, out_discount, out_next, out_rows, out_ends = out
    n, gamma, clip = n_step
    num = numbers.shape[0]
    for i in range(num):
        out_rows[places[i]] = items[numbers[i]]
    for i in range(num):
        out_action[places[i]] = action[out_rows[places[i]], 0]
    for i in range(num):
        out_reward[places[i]] = reward[out_rows[places[i]], 0]
    for i in range(num):
        out_discount[places[i]] = discount[out_rows[places[i]], 0]
    for i in range(num):
        at = places[i]
        end = out_rows[at]
        total = 0.0
        product = 1.0
        for step in range(n):
            step_reward = float(reward[end, 0])
            if clip:
                step_reward = min(max(step_reward, -1.0), 1.0)
            total += product * step_reward
            product *= gamma * discount[end, 0]
            end += 1
            if step + 1 < n and last[end, 0]:
                break
        out_reward[at] = total
        out_discount[at] = product
        out_ends[at] = end
    if depth == 1:
        copy_rows(frames, places, out_rows, out_obs)
        copy_rows(frames, places, out_ends, out_next)
        return
    overlap = out_next.shape[0] == 0
    stacked = depth + 1 if overlap else depth
    for i in range(num):
        at = places[i]
        if overlap:
            stack_into(frames, table, heads, last, out_ends[at], 0, out_obs, at * stacked, stacked)
        else:
            stack_into(frames, table, heads, last, out_rows[at], 0, out_obs, at * stacked, stacked)
            stack_into(frames, table, heads, last, out_ends[at], 0, out_next, at * stacked, stacked)
