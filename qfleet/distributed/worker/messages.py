"""Messages that workers of every role send; each role adds its own."""

from qfleet.data.wire_format import Message
from qfleet.system.worker_errors import FinalError


class Ready(Message):
    """The worker has started."""


class Stop(Message):
    """The worker shall end; where processes can be signalled or killed, that is used instead."""


class Done(Message):
    """The request was carried out."""


class PeerLost(Message):
    """The reply to a request that could not be done, because another worker is lost."""

    cause: str


class Failed(Message):
    """The worker has failed and handles nothing more; a process of this machine reports this in shared memory."""

    report: FinalError
