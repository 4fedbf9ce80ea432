"""Messages between the driver and a parameter-server shard. Every request is answered with the shard's counts."""

from qfleet.data.wire_format import Count, Message
from qfleet.sync.gradient_rule import Verdict

# Requests


class ConnectLearner(Message):
    """A learner will push gradients; on this machine its memory and its socket follow as descriptors."""

    rank: Count


class ReleaseWaiting(Message):
    """Reply to all learners that wait for a step: none is coming for a while."""


class ReadShard(Message):
    """Write weights and moments into the memory that the driver shares, or into the arrays of the reply."""


ShardRequest = ConnectLearner | ReleaseWaiting | ReadShard


class ShardCounts(Message):
    """The shard's version, the gradients it has taken, how stale they were, and those refused with the reason."""

    version: Count
    taken: Count
    staleness: dict[int, Count]
    refused: dict[Verdict, Count]
