"""The engine of this machine: workers in processes of their own."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TypeAlias

from qfleet.datasets.prepare import LocalEngine, Work
from qfleet.distributed.preparing.messages import DoOrder, PreparingReply, PreparingRequest, as_arrays, content_of
from qfleet.distributed.preparing.worker import preparing_main
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.distributed.worker.local import MIN_SLOT_BYTES, RingSizes, launch_local
from qfleet.errors import QfleetError
from qfleet.system.child_process import fork_server
from qfleet.system.cores import thread_variables
from qfleet.system.silence import SilenceTimer
from qfleet.system.worker_errors import FinalError, WorkerFailed, WorkerHung, WorkerLost
from qfleet.system.worker_process import WorkerOptions

START_SECONDS = 60.0
ORDER_SECONDS = 3600.0  # for one order: a unit of work has at most some gigabytes
ROOM_SECONDS = 60.0
POLL_SECONDS = 0.2
ATTEMPTS = 5  # at one order, or at starting a worker
Launch: TypeAlias = Callable[[Work, int], WorkerHandle]


def launch_worker(work: Work, number: int) -> WorkerHandle:
    """Start a worker on this machine; it has one thread."""
    sizes = RingSizes(PreparingRequest, PreparingReply, MIN_SLOT_BYTES, MIN_SLOT_BYTES)
    options = WorkerOptions(variables=thread_variables(1))
    times = {"start_seconds": START_SECONDS, "room_seconds": ROOM_SECONDS}
    context = fork_server("qfleet.distributed.preparing.worker")
    return launch_local(
        context, f"prepare-{number}", preparing_main, work, sizes, number=number, options=options, **times
    )


@dataclass(frozen=True)
class ProcessEngine:
    """Some workers, each with one order at a time. One that is lost is replaced, and its order done again."""

    jobs: int
    launch: Launch = launch_worker

    def map(self, work: Work, orders: Sequence[bytes]) -> Iterator[bytes]:
        """The answers, in the order of the orders; a single one is worked on here."""
        if len(orders) == 1:
            yield from LocalEngine().map(work, orders)
            return
        shift = _Shift(work, orders, self.launch)
        try:
            for number in range(min(self.jobs, len(orders))):
                shift.start(number)
            for number in range(len(orders)):
                yield shift.answer(number)
        finally:
            shift.stop()


@dataclass(eq=False)
class _Shift:
    """The workers that do some orders, and how far they are."""

    work: Work
    orders: Sequence[bytes]
    launch: Launch
    workers: dict[int, WorkerHandle] = field(default_factory=dict)
    doing: dict[int, tuple[int, SilenceTimer]] = field(default_factory=dict)  # the order of a worker, since when
    answers: dict[int, bytes] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)  # by order; -1: at the start

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.orders)))

    def start(self, number: int) -> None:
        self.workers[number] = self.launch(self.work, number)

    def answer(self, number: int) -> bytes:
        """The answer to an order, when it is there."""
        while number not in self.answers:
            for worker in list(self.workers.values()):
                self._turn(worker)
            if number not in self.answers:
                wait([worker.transport for worker in self.workers.values()], POLL_SECONDS)  # type: ignore[misc]
        return self.answers.pop(number)

    def _turn(self, worker: WorkerHandle) -> None:
        """Receive the answer of a worker, and send it another order."""
        try:
            self._receive(worker)
            if worker.ready and worker.number not in self.doing and self.waiting:
                order = self.waiting.popleft()
                self.doing[worker.number] = (order, SilenceTimer(time.monotonic()))
                worker.ask(DoOrder(), as_arrays(self.orders[order]))
        except WorkerLost as cause:
            self._replace(worker, cause)

    def _receive(self, worker: WorkerHandle) -> None:
        if worker.number not in self.doing:
            return worker.check()
        order, since = self.doing[worker.number]
        if (parts := worker.poll_reply(0.0)) is not None:
            self.answers[order] = content_of(parts[1])
            del self.doing[worker.number]
        elif since.elapsed(time.monotonic()) > ORDER_SECONDS:
            raise WorkerHung(f"it did not answer for {ORDER_SECONDS:g} s")
        return None

    def _replace(self, worker: WorkerHandle, cause: WorkerLost) -> None:
        worker.stop()
        order, _ = self.doing.pop(worker.number, (-1, None))
        self.failures[order] = self.failures.get(order, 0) + 1
        if isinstance(cause, WorkerFailed):
            raise failed(cause.report)
        if self.failures[order] >= ATTEMPTS:
            raise QfleetError(
                f"the preparation lost {ATTEMPTS} workers at the same work",
                f"The last one: {cause}.",
                "If memory is short, use fewer processes: --jobs 1. The same command goes on with the same result.",
            )
        if order >= 0:
            self.waiting.appendleft(order)
        self.start(worker.number)

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.stop()


def failed(report: FinalError) -> QfleetError:
    """The error of a worker that met something unexpected."""
    return QfleetError(
        f"a worker of the preparation failed: {report.what}",
        report.why or "It did not expect this error, which would come again.",
        report.fix or "Run the same command with --jobs 1 and --debug, and report what it prints.",
    )
