"""The learner's connection to a replay in another process, on this machine or on another."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

from qfleet.data import Batch, Sequences, Spec
from qfleet.data.array_messages import as_batch
from qfleet.data.wire_format import Arrays, Message
from qfleet.distributed.replay.messages import BatchReply, Draw, NoBatch
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.system.shared_memory import SharedMemory
from qfleet.system.worker_errors import WorkerDied, WorkerFailed, WorkerLost, raise_usage_error

Reply = TypeVar("Reply", bound=Message)
LaunchReplay: TypeAlias = Callable[[str | None], WorkerHandle]  # takes the file that records operations


@dataclass(eq=False)
class ReplayConnection:
    """Starts the process of a replay and exchanges messages with it, in order.

    A replay that is lost is ended at once. Until the next start, everything raises the same WorkerLost.
    """

    launch: LaunchReplay
    spec: Spec
    batch_limit_bytes: int
    hung_seconds: float
    region: SharedMemory | None = None  # of the rows, if they are in shared memory
    handle: WorkerHandle | None = field(default=None, init=False)
    lost: WorkerLost | None = field(default=None, init=False)
    has_ever_started: bool = field(default=False, init=False)
    num_drawn: int = field(default=0, init=False)  # batches that were asked for and have not arrived
    # Batches that came before the reply to a request.
    received: deque[Batch | Sequences | None] = field(default_factory=deque, init=False)

    # Lifecycle

    def start(self, history: Path | None) -> None:
        """Start an empty replay, which records its operations in this file; end any process before it."""
        self.stop()
        self.handle = self.launch(None if history is None else str(history))

    def stop(self) -> None:
        """End the process."""
        if self.handle is not None:
            self.handle.stop()
        self.handle = None
        self.lost = None
        self.num_drawn = 0
        self.received.clear()

    def close(self) -> None:
        """End the process and free its memory."""
        self.stop()
        if self.region is not None:
            self.region.close()

    @contextmanager
    def using_handle(self) -> Iterator[WorkerHandle]:
        """The handle of the process; if it is lost inside the block, it is ended and the loss remembered."""
        handle = self.handle
        if handle is None:
            raise self.lost or WorkerDied("it was stopped")
        try:
            yield handle
        except WorkerLost as lost:
            self.stop()
            self.lost = lost
            # A restart cannot fix the user's mistake. Later it can: a node that has just lost a replay may not have
            # its memory back yet.
            if isinstance(lost, WorkerFailed) and not (self.has_ever_started or handle.ready):
                raise_usage_error(lost.report)
            raise
        finally:
            self.has_ever_started |= handle.ready

    # Messages

    def send(self, message: Message, arrays: Arrays | None = None) -> None:
        """Send a message that has no reply."""
        with self.using_handle() as handle:
            handle.send(message, arrays)

    def request(self, message: Message, kind: type[Reply], arrays: Arrays | None = None) -> tuple[Reply, Arrays]:
        """Send a request and wait for its reply; all messages before it are handled first."""
        with self.using_handle() as handle:
            handle.ask(message, arrays)
            while self.num_drawn:
                self.receive_drawn(handle)
            return handle.reply(kind, self.hung_seconds)

    @property
    def num_due(self) -> int:
        """Batches that were asked for and not taken."""
        return self.num_drawn + len(self.received)

    def draw(self, size: int) -> None:
        """Ask for a batch."""
        with self.using_handle() as handle:
            handle.ask(Draw(size))
            self.num_drawn += 1

    def receive_batch(self) -> Batch | Sequences | None:
        """The oldest batch asked for and not taken yet; None if the replay had no items."""
        with self.using_handle() as handle:
            if not self.received:
                self.receive_drawn(handle)
            return self.received.popleft()

    def receive_drawn(self, handle: WorkerHandle) -> None:
        """Receive the next batch."""
        message, arrays = handle.reply(BatchReply | NoBatch, self.hung_seconds)
        self.num_drawn -= 1
        self.received.append(None if isinstance(message, NoBatch) else self.checked_batch(message, arrays))

    def checked_batch(self, message: BatchReply, arrays: Arrays) -> Batch | Sequences:
        """The batch that was drawn, if it is one of this replay and not larger than any that it can draw."""
        num_bytes = sum(array.nbytes for array in arrays.values())
        if num_bytes > self.batch_limit_bytes:
            raise WorkerDied(f"it sent an invalid batch: {num_bytes} bytes, expected {self.batch_limit_bytes} at most")
        return self.valid_batch(message, arrays)

    def valid_batch(self, message: BatchReply, arrays: Arrays) -> Batch | Sequences:
        """The batch of a message, if it is one of this replay."""
        try:
            return as_batch(message.form, arrays, self.spec)
        except ValueError as error:
            raise WorkerDied(f"it sent an invalid batch: {error}") from error

    def discard_batches(self) -> None:
        """Discard the batches that were asked for."""
        while self.num_drawn:
            self.receive_batch()
        self.received.clear()
