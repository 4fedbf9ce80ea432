"""The loop of a worker that handles requests, and the Protocol of what it serves."""

import os
from typing import Any, Protocol

from qfleet.data.wire_format import Arrays, Parts
from qfleet.distributed.worker.messages import Ready, Stop
from qfleet.distributed.worker.transport import Transport
from qfleet.system.child_process import limit_log

POLL_SECONDS = 1.0


class Worker(Protocol):
    """What a process of its own serves."""

    def handle(self, message: Any, arrays: Arrays) -> Parts | None:
        """Handle a message; the reply, or None if this kind of message has none."""

    def work_when_idle(self) -> bool:
        """Called while no message waits; False if there was nothing to do."""

    def close(self) -> None:
        """Free everything before the process ends."""


def serve(worker: Worker, transport: Transport) -> None:
    """Handle messages one after the other, until the parent process is gone or sends `Stop`."""
    parent = os.getppid()
    transport.send(Ready())
    busy = False
    while os.getppid() == parent:
        if (parts := transport.receive(0.0 if busy else POLL_SECONDS)) is not None:
            if isinstance(parts[0], Stop):
                break
            if (reply := worker.handle(*parts)) is not None:
                transport.send(*reply)
            limit_log()
        busy = worker.work_when_idle()
    worker.close()
