"""Which learner uses which transitions of a batch: each is used by exactly one, as far as possible of own shards."""

import numpy as np

from qfleet.data import Array
from qfleet.datasets.epochs.order import EpochOrder
from qfleet.datasets.epochs.queues import deal_out, owners_of_queues


def owners_of(order: EpochOrder, positions: Array, owners: Array, shares: tuple[float, ...]) -> Array:  # [N]
    """The learner that uses each of these positions.

    Learners have whole queues of shards where these divide nearly by their shares: then nobody reads what is another's.
    Where they do not, or a learner would have nothing of this batch, every learner gets as many as in `owners`, and
    neighbours share a queue.
    """
    queues, _ = order.places(positions)
    whole = owners_of_queues(order.sizes, shares, queue_groups(order))
    if whole is not None:
        found: Array = whole[queues]
        if len(np.unique(found)) == len(shares):
            return found
    return deal_out(owners, queues)


def queue_groups(order: EpochOrder) -> Array:  # [Q]
    """The learner that each queue was prepared for; 0 for all if they were not."""
    if not order.groups:
        return np.zeros(len(order.queues), np.int64)
    names = sorted(set(order.groups))
    return np.array([names.index(order.groups[queue[0]]) for queue in order.queues])
