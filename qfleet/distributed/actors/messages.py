"""Messages of actors: faults of their environments; on Ray also their reports, the replies to them, and weights."""

from qfleet.data.wire_format import Count, Message
from qfleet.envs.workers.pool import EnvFault


class EnvFaultMessage(Message):
    """An environment failed; the actor goes on."""

    fault: EnvFault


class ActorReport(Message):
    """From an actor to the learner on Ray, in every call; the oldest rollout that was not accepted yet is beside it."""

    worker: Count
    incarnation: Count
    counters: dict[str, int]
    first_fault: Count = 0  # the serial number of the first fault in `faults`
    faults: tuple[EnvFaultMessage, ...] = ()


class ActorReply(Message):
    """The learner's reply to every report."""

    accepted: bool  # the rollout need not be sent again
    version: Count  # of the newest weights
    stop: bool
    env_steps: Count  # of all actors


class PublishedWeights(Message):
    """Weights for actors on Ray, as flat bytes in the array `flat`."""

    version: Count
