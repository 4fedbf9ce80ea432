"""A worker that prepares data: one order after the other."""

from typing import Any

from qfleet.data.wire_format import Arrays, Parts
from qfleet.datasets.prepare import Work
from qfleet.distributed.preparing.messages import OrderDone, as_arrays, content_of
from qfleet.distributed.worker.serve import serve
from qfleet.distributed.worker.transport import RingTransport


class PreparingWorker:
    """Does the work of each order that it is sent."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def handle(self, message: Any, arrays: Arrays) -> Parts:
        """The answer to an order."""
        return OrderDone(), as_arrays(self.work(content_of(arrays)))

    def work_when_idle(self) -> bool:
        """There is nothing to do between orders."""
        return False

    def close(self) -> None:
        """Nothing must be freed before the process ends."""


def preparing_main(work: Work, transport: RingTransport) -> None:
    """Do orders until the parent process ends."""
    serve(PreparingWorker(work), transport)
