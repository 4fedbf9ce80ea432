"""The process of a parameter server's shard, which holds a block of the weights and their optimiser.

For each learner there is a shared memory region with room for a gradient and for weights, and a socket. A learner
writes its gradient and pushes; the shard replies when its rule (`sync/gradient_rule.py`) allows, after writing its
weights.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import get_args

import msgspec
import numpy as np
import torch
from torch import Tensor

from qfleet.data import Array
from qfleet.distributed.parameter_server.messages import ConnectLearner, ReadShard, ReleaseWaiting, ShardCounts
from qfleet.distributed.worker.messages import Ready
from qfleet.distributed.worker.transport import RingTransport
from qfleet.learn import make_optimizer
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.sync.gradient_rule import Push, Verdict
from qfleet.sync.make import make_shard
from qfleet.sync.strategies import copy_into, flatten_tensors
from qfleet.system.shared_memory import SharedMemory, shared_memory_from_descriptor

PUSH = struct.Struct("<qqd")  # sequence, version, rate
REPLY = struct.Struct("<Bq")  # verdict, version
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
DESCRIPTOR_SECONDS = 5.0  # descriptors follow their message at once
POLL_MILLISECONDS = 500
SendVerdict = Callable[[Verdict], None]


@dataclass
class ShardSetup:
    """Everything a shard is started with."""

    plan: bytes  # as JSON
    sync: bytes  # the plan's strategy, as JSON
    state: SharedMemory  # a row [n] for weights and for every moment: initial, and as of the last `ReadShard`
    pieces: list[int]  # how many numbers of each parameter

    @property
    def num(self) -> int:
        """Numbers in the block."""
        return sum(self.pieces)


class ShardMailbox:
    """The shard's end of a learner's connection."""

    def __init__(self, rank: int, region: SharedMemory, sock: socket.socket, num: int) -> None:
        self.rank = rank
        self.region = region
        self.sock = sock
        self.gradient, self.weights = gradient_and_weights(region, num)

    def reply(self, verdict: Verdict, version: int, weights: Tensor) -> None:
        """Write the newest weights, then send the verdict; a learner that is gone is noticed elsewhere."""
        self.weights.copy_(weights)
        with suppress(OSError):
            self.sock.send(REPLY.pack(VERDICTS.index(verdict), version), socket.MSG_DONTWAIT)


def shard_main(setup: ShardSetup, transport: RingTransport) -> None:
    """Serve until the driver is gone."""
    torch.set_num_threads(1)
    with suppress(ConnectionError):  # the driver is gone
        ShardServer(setup, transport).run(os.getppid())


class WeightBlock:
    """A block of weights [n], its optimiser, the rule for pushed gradients, and the replies that wait for a step."""

    def __init__(self, plan: Plan, sync: Serving, pieces: list[int]) -> None:
        self.pieces = pieces
        self.sync = sync
        weights = torch.empty(sum(pieces))
        self.optimizer = make_optimizer(plan.optim, list(torch.split(weights, pieces)))
        self.state_tensors = [self.optimizer.parameters, *self.optimizer.moments.values()]
        self.skipped: set[int] = set()  # versions whose step was not made, because it was not finite
        self.rate = 0.0
        self.shard = make_shard(sync, weights, self.step)
        self.waiting: dict[int, SendVerdict] = {}  # by rank
        # With spare learners a slow one may wait for a step while rank 0 evaluates, or waits for experience.
        self.max_wait_seconds = plan.learners.timeout_seconds / 2 if self.shard.spare else float("inf")

    @property
    def is_synchronous(self) -> bool:
        """Does a push get its reply only when the step was made?"""
        return self.sync.max_staleness == 0

    def step(self, gradient: Tensor, factor: float) -> None:
        """The optimiser's step, skipped if the gradient is not finite."""
        if not bool(torch.isfinite(gradient).all()):
            self.skipped.add(self.shard.version + 1)
            return
        self.optimizer.learning_rate = self.rate * factor
        self.optimizer.step(list(torch.split(gradient, self.pieces)))

    def verdict(self, version: int) -> Verdict:
        """Was the step to this version applied or skipped?"""
        return "skipped" if version in self.skipped else "applied"

    def push(self, push: Push, rate: float, send_verdict: SendVerdict) -> None:
        """Take a gradient; reply at once, or after its step if the learner waits for it."""
        self.rate = rate
        verdict = self.shard.push(push, time.monotonic())
        if verdict != "applied" and not (verdict == "waiting" and self.is_synchronous):
            send_verdict(verdict)
            return
        self.waiting[push.source[0]] = send_verdict
        if verdict == "applied":
            self.reply_to_waiting(self.verdict(self.shard.version))

    def close_window(self) -> None:
        """Make the step of a window of gradients if its time is over."""
        if self.shard.step_if_due(time.monotonic()):
            self.reply_to_waiting(self.verdict(self.shard.version))

    def reply_to_waiting(self, verdict: Verdict) -> None:
        """Reply to all learners that wait for a step."""
        for send_verdict in self.waiting.values():
            send_verdict(verdict)
        self.waiting.clear()

    def release(self) -> None:
        """Drop all waiting gradients, and reply to their learners without a step."""
        self.shard.drop_all()
        self.reply_to_waiting("stale")

    def release_one(self, rank: int) -> None:
        """Drop a learner's waiting gradient, and reply to it without a step."""
        self.shard.drop(rank)
        self.waiting.pop(rank)("stale")

    def remove_learner(self, rank: int) -> None:
        """A learner left: make a step that waited for it only."""
        self.waiting.pop(rank, None)
        version = self.shard.version
        self.shard.remove_worker(rank, time.monotonic())
        if self.shard.version > version:
            self.reply_to_waiting(self.verdict(self.shard.version))

    def load(self, rows: list[Array]) -> None:
        """Load weights [n] and moments."""
        for tensors, row in zip(self.state_tensors, rows, strict=True):
            write_row(row, tensors)

    def counts(self) -> ShardCounts:
        """Its version, and counts of gradients taken, stale and refused."""
        shard = self.shard
        # Gradients that were not finite are taken too: their learner counts them among those it has computed.
        taken = shard.staleness.total() + len(shard.waiting) + shard.refused["skipped"]
        return ShardCounts(shard.version, taken, dict(shard.staleness), dict(shard.refused))


class ShardServer:
    """Serves a block of weights to learners, and requests of the driver."""

    def __init__(self, setup: ShardSetup, transport: RingTransport) -> None:
        self.setup = setup
        self.transport = transport
        sync = msgspec.json.decode(setup.sync, type=Serving)
        plan = msgspec.json.decode(setup.plan, type=Plan)
        self.block = WeightBlock(plan, sync, setup.pieces)
        self.block.load(self.rows())
        self.shard = self.block.shard
        self.mailboxes: dict[int, ShardMailbox] = {}
        self.poller = select.poll()
        self.poller.register(transport.fileno(), select.POLLIN)

    def rows(self) -> list[Array]:
        """The rows that driver and shard share."""
        return rows(self.setup.state, len(self.block.state_tensors), self.setup.num)

    def run(self, parent: int) -> None:
        """Serve until the parent is gone."""
        self.transport.send(Ready())
        while os.getppid() == parent:
            for fd, _ in self.poller.poll(self.poll_milliseconds()):
                if fd == self.transport.fileno():
                    self.handle_request()
                else:
                    self.receive_push(self.mailboxes[fd])
            self.block.close_window()
            self.release_overdue()

    def poll_milliseconds(self) -> float:
        """How long to poll: until the window of gradients closes, or the driver may be gone."""
        if self.block.is_synchronous:  # no window: the step waits for all learners
            return POLL_MILLISECONDS
        limit = self.shard.since + self.shard.window_seconds - time.monotonic()
        return min(POLL_MILLISECONDS, max(0.0, 1_000 * limit))

    def receive_push(self, mailbox: ShardMailbox) -> None:
        """Receive a learner's push and reply now or after the step; remove a learner that left."""
        try:
            data = mailbox.sock.recv(PUSH.size, socket.MSG_WAITALL)
        except OSError:  # it was killed before it read the last reply
            data = b""
        if len(data) < PUSH.size:
            self.disconnect(mailbox)
            return
        sequence, version, rate = PUSH.unpack(data)
        # After an immediate reply the learner may overwrite its gradient before the step is made.
        gradient = mailbox.gradient if self.block.is_synchronous else mailbox.gradient.clone()
        self.block.push(Push((mailbox.rank, 0, sequence), version, gradient), rate, partial(self.reply, mailbox))

    def reply(self, mailbox: ShardMailbox, verdict: Verdict) -> None:
        """Reply to a learner with the newest weights."""
        mailbox.reply(verdict, self.shard.version, self.shard.weights)

    def release_overdue(self) -> None:
        """Reply to learners that have waited too long for a gradient of rank 0."""
        waited = time.monotonic() - self.shard.since
        if waited < self.block.max_wait_seconds or self.shard.has_waiting(0):
            return
        for rank in [rank for rank in self.block.waiting if rank]:
            self.block.release_one(rank)

    def disconnect(self, mailbox: ShardMailbox) -> None:
        """A learner left: close its connection, and wait for it no more."""
        self.poller.unregister(mailbox.sock.fileno())
        del self.mailboxes[mailbox.sock.fileno()]
        mailbox.sock.close()
        self.block.remove_learner(mailbox.rank)

    def handle_request(self) -> None:
        """Handle a request of the driver: connect a learner, release waiting ones, or write the state."""
        parts = self.transport.receive(0.0)
        match None if parts is None else parts[0]:
            case None:
                return
            case ConnectLearner(rank):
                self.connect(rank)
            case ReleaseWaiting():
                self.block.release()
            case ReadShard():
                self.shard.flush()
                for tensors, row in zip(self.block.state_tensors, self.rows(), strict=True):
                    read_row(tensors, row)
        self.transport.send(self.block.counts())

    def connect(self, rank: int) -> None:
        """Receive the memory and the socket of a learner, and wait for its gradients from now on."""
        memory = self.transport.receive_descriptor(DESCRIPTOR_SECONDS)
        sock = self.transport.receive_descriptor(DESCRIPTOR_SECONDS)
        region = shared_memory_from_descriptor(memory, mailbox_bytes(self.setup.num))
        mailbox = ShardMailbox(rank, region, socket.socket(fileno=sock), self.setup.num)
        self.mailboxes[mailbox.sock.fileno()] = mailbox
        self.poller.register(mailbox.sock.fileno(), select.POLLIN)
        self.shard.add_worker()


@torch.no_grad()
def write_row(row: Array, tensors: list[Tensor]) -> None:
    """Copy a row into tensors: all its numbers, or one step count each."""
    if tensors[0].dim():
        copy_into(torch.from_numpy(row), tensors)
    else:
        for count, tensor in zip(row, tensors, strict=False):
            tensor.fill_(float(count))


def read_row(tensors: list[Tensor], row: Array) -> None:
    """Copy tensors into a row."""
    values = flatten_tensors(tensors).numpy()
    row[: len(values)] = values


def mailbox_bytes(num: int) -> int:
    """The size of a region for a gradient [n] and weights [n]."""
    return 8 * num


def gradient_and_weights(region: SharedMemory, num: int) -> tuple[Tensor, Tensor]:
    """A region as a gradient [n] and weights [n]."""
    both = torch.from_numpy(np.frombuffer(region.view, np.float32, 2 * num).reshape(2, num))
    return both[0], both[1]


def rows(region: SharedMemory, num_rows: int, num: int) -> list[Array]:
    """A region as rows [n]."""
    return list(np.frombuffer(region.view, np.float32, num_rows * num).reshape(num_rows, num))
