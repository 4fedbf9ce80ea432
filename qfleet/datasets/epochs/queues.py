"""Queues: the shards of a data set in several lists, of each of which one shard is open at a time."""

from collections.abc import Sequence

import numpy as np

from qfleet.data import Array

MAX_UNEVEN = 1.1  # of the time of the learner that is done last, beside the mean


def make_queues(counts: Sequence[int], num: int, groups: Sequence[int] = ()) -> list[Array]:
    """The shards in about `num` queues with nearly equal numbers of transitions.

    `groups` are the numbers of the learners that the shards were prepared for: shards of different groups are never in
    one queue, so there are as many queues as groups at least.
    """
    numbers = np.asarray(groups if len(groups) else np.zeros(len(counts), np.int64))
    found = []
    names = np.unique(numbers)
    for group in names.tolist():
        members = np.flatnonzero(numbers == group)
        found += _spread(members, np.asarray(counts)[members], max(1, num // len(names)))
    return found


def _spread(members: Array, counts: Array, num: int) -> list[Array]:
    """The largest first, each to the queue with the fewest transitions so far (Graham 1969)."""
    num = min(num, len(members))
    loads = [0] * num
    queues: list[list[int]] = [[] for _ in range(num)]
    for at in np.argsort(-counts, kind="stable").tolist():
        chosen = loads.index(min(loads))
        loads[chosen] += int(counts[at])
        queues[chosen].append(int(members[at]))
    return [np.array(sorted(queue)) for queue in queues]


def owners_of_queues(sizes: Array, shares: tuple[float, ...], groups: Array) -> Array | None:  # [Q], [P], [Q] -> [Q]
    """The learner that reads each queue, if whole queues divide nearly by the shares; else None.

    Queues that were prepared for as many learners as there are go to these.
    """
    if len(set(shares)) == 1 and len(shares) == groups.max(initial=0) + 1 > 1:
        return groups
    wanted = np.asarray(shares) / sum(shares)
    loads = np.zeros(len(shares))
    owners = np.zeros(len(sizes), np.int64)
    for queue in np.argsort(-sizes, kind="stable").tolist():
        owners[queue] = rank = int(np.argmin((loads + sizes[queue]) / wanted))
        loads[rank] += sizes[queue]
    even = (loads / wanted).max() <= MAX_UNEVEN * sizes.sum() and len(sizes) >= len(shares)
    return owners if even else None


def deal_out(owners: Array, queues: Array) -> Array:  # [N], [N] -> [N]
    """As many transitions for each learner as in `owners`, but neighbours in as few queues as possible."""
    found = np.empty_like(owners)
    found[np.argsort(queues, kind="stable")] = np.sort(owners)
    return found
