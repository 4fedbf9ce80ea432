"""The inside of a parameter server's shard: a process that holds a block of the weights and their optimiser.

For each learner there is a region with room for a gradient and for weights, and a socket. Who pushes writes its
gradient and says so; the shard answers when its rule says so (`sync/shard.py`), after it has written its weights.
"""

import os
import select
import signal
import socket
import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, get_args

import msgspec
import numpy as np
import torch
from torch import Tensor

from qfleet.data import Array
from qfleet.distributed.actors.main import logging_to
from qfleet.learn import make_optimizer
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.sync.make import make_shard
from qfleet.sync.shard import Push, Verdict
from qfleet.sync.strategies import flat, place
from qfleet.system.child_process import die_with_parent
from qfleet.system.shared_memory import SharedMemory, region_of

PUSH, REPLY = struct.Struct("<qqd"), struct.Struct("<Bq")  # sequence, version, rate; verdict, version
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
READY = b"+"
FAILED = b"-"
WORDS_BYTES = 1_000
LISTEN_MILLISECONDS = 500


@dataclass
class ShardSetup:
    """Everything a shard needs to know."""

    plan: bytes  # as JSON
    sync: bytes  # the agreement, as JSON
    state: SharedMemory  # a row [n] for weights and for every moment, to begin with and whenever they are asked for
    pieces: list[int]  # how many numbers of each parameter
    orders: Connection

    @property
    def num(self) -> int:
        """Numbers in all."""
        return sum(self.pieces)


class ShardMailbox:
    """A learner's end at the shard."""

    def __init__(self, rank: int, region: SharedMemory, line: socket.socket, num: int) -> None:
        self.rank = rank
        self.region = region
        self.line = line
        self.gradient, self.weights = halves(region, num)

    def answer(self, verdict: Verdict, version: int, weights: Tensor) -> None:
        """Show the newest weights, then say so; who is gone does not hear it."""
        self.weights.copy_(weights)
        try:
            self.line.send(REPLY.pack(VERDICTS.index(verdict), version), socket.MSG_DONTWAIT)
        except OSError:
            return


def hold(post: ShardSetup) -> None:
    """The life of a shard's process."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with logging_to(None):
        try:
            ShardServer(post).run(os.getppid())
        except Exception as error:
            post.orders.send_bytes(FAILED + f"{type(error).__name__}: {error}".encode()[:WORDS_BYTES])
            raise


class WeightBlock:
    """A block of weights [n], its optimiser, and the rules for gradients that come in."""

    def __init__(self, plan: Plan, sync: Serving, pieces: list[int]) -> None:
        self.pieces = pieces
        self.sync = sync
        weights = torch.empty(sum(pieces))
        self.optimizer = make_optimizer(plan.optim, list(torch.split(weights, pieces)))
        self.kept = [self.optimizer.parameters, *self.optimizer.moments.values()]
        self.skipped: set[int] = set()  # versions whose step was not made, because it was not finite
        self.rate = 0.0
        self.shard = make_shard(sync, weights, self.step)
        # With spare learners one that is behind may wait for a step while rank 0 judges, or waits for experience.
        self.hold_seconds = plan.learners.timeout_seconds / 2 if self.shard.spare else float("inf")

    @property
    def waits(self) -> bool:
        """Is an answer given only when the step was made?"""
        return self.sync.max_staleness == 0

    def step(self, gradient: Tensor, factor: float) -> None:
        """The optimiser's step, unless somebody had nothing to give."""
        if not bool(torch.isfinite(gradient).all()):
            self.skipped.add(self.shard.version + 1)
            return
        self.optimizer.learning_rate = self.rate * factor
        self.optimizer.step(list(torch.split(gradient, self.pieces)))

    def verdict(self, version: int) -> Verdict:
        """What the step that led to a version was."""
        return "skipped" if version in self.skipped else "applied"

    def load(self, rows: list[Array]) -> None:
        """Begin with these weights [n] and moments."""
        for tensors, row in zip(self.kept, rows, strict=True):
            write(row, tensors)

    def counts(self) -> dict[str, Any]:
        """How far it is, how stale gradients were, and how many were refused."""
        shard = self.shard
        # One that was not finite came in too: its learner counts it among those it has computed.
        taken = shard.staleness.total() + len(shard.waiting) + shard.refused["skipped"]
        told = {"staleness": dict(shard.staleness), "refused": dict(shard.refused)}
        return {"version": shard.version, "taken": taken, **told}


class ShardServer:
    """A block in a process of its own, and whoever works with it."""

    def __init__(self, post: ShardSetup) -> None:
        self.post = post
        sync = msgspec.json.decode(post.sync, type=Serving)
        plan = msgspec.json.decode(post.plan, type=Plan)
        self.block = WeightBlock(plan, sync, post.pieces)
        self.block.load(self.rows())
        self.shard = self.block.shard
        self.desks: dict[int, ShardMailbox] = {}
        self.asking: list[ShardMailbox] = []  # whose answer waits for a step
        self.poll = select.poll()
        self.poll.register(post.orders.fileno(), select.POLLIN)

    def rows(self) -> list[Array]:
        """What the driver sees of us."""
        return rows(self.post.state, len(self.block.kept), self.post.num)

    def run(self, parent: int) -> None:
        """Serve until the parent is gone."""
        self.post.orders.send_bytes(READY)
        while os.getppid() == parent:
            for fd, _ in self.poll.poll(self.patience()):
                if fd == self.post.orders.fileno():
                    self.obey(self.post.orders.recv_bytes(64).decode())
                else:
                    self.take(self.desks[fd])
            if self.shard.tend(time.monotonic()):
                self.tell_all()
            self.excuse(time.monotonic())

    def patience(self) -> float:
        """Milliseconds until a window closes, or somebody may have left."""
        if self.block.waits:  # for everybody, however long that takes
            return LISTEN_MILLISECONDS
        limit = self.shard.since + self.shard.window_seconds - time.monotonic()
        return min(LISTEN_MILLISECONDS, max(0.0, 1_000 * limit))

    def take(self, desk: ShardMailbox) -> None:
        """Hear a learner; one that left is not waited for."""
        try:
            data = desk.line.recv(PUSH.size, socket.MSG_WAITALL)
        except OSError:  # it was killed before it read our last word
            data = b""
        if len(data) < PUSH.size:
            self.part(desk)
            return
        sequence, version, self.block.rate = PUSH.unpack(data)
        waits = self.block.waits
        # What is answered at once may be written over before the step is made.
        gradient = desk.gradient if waits else desk.gradient.clone()
        verdict = self.shard.push(Push((desk.rank, 0, sequence), version, gradient), time.monotonic())
        self.asking.append(desk)
        if verdict == "applied":
            self.tell_all()
        elif not (waits and verdict == "waiting"):
            self.asking.remove(desk)
            desk.answer(verdict, self.shard.version, self.shard.weights)

    def tell_all(self) -> None:
        """A step was made: everybody who waited for it hears of it."""
        for desk in self.asking:
            desk.answer(self.block.verdict(self.shard.version), self.shard.version, self.shard.weights)
        self.asking.clear()

    def release(self) -> None:
        """Nobody waits for a step any more."""
        self.shard.release()
        for desk in self.asking:
            desk.answer("stale", self.shard.version, self.shard.weights)
        self.asking.clear()

    def excuse(self, now: float) -> None:
        """Who has waited for long, and not for others but for rank 0, goes on without."""
        if now - self.shard.since < self.block.hold_seconds or self.shard.holds(0):
            return
        for desk in [desk for desk in self.asking if desk.rank]:
            self.shard.excuse(desk.rank)
            self.asking.remove(desk)
            desk.answer("stale", self.shard.version, self.shard.weights)

    def part(self, desk: ShardMailbox) -> None:
        """A learner is gone."""
        self.poll.unregister(desk.line.fileno())
        del self.desks[desk.line.fileno()]
        self.asking = [other for other in self.asking if other is not desk]
        version = self.shard.version
        self.shard.leave(desk.rank, time.monotonic())
        desk.line.close()
        if self.shard.version > version:
            self.tell_all()

    def obey(self, order: str) -> None:
        """What the driver wants: a learner seated, those who wait released, or the state shown."""
        word, _, rest = order.partition(" ")
        if word == "seat":
            memory = recv_handle(self.post.orders)
            line = recv_handle(self.post.orders)
            region = region_of(memory, pair_bytes(self.post.num))
            desk = ShardMailbox(int(rest), region, socket.socket(fileno=line), self.post.num)
            self.desks[desk.line.fileno()] = desk
            self.poll.register(desk.line.fileno(), select.POLLIN)
            self.shard.enlist()
        elif word == "release":
            self.release()
        else:
            self.shard.settle()
            for tensors, row in zip(self.block.kept, self.rows(), strict=True):
                read(tensors, row)
        self.post.orders.send_bytes(msgspec.json.encode(self.block.counts()))


@torch.no_grad()
def write(row: Array, tensors: list[Tensor]) -> None:
    """A row into tensors: its numbers, or of counts one each."""
    if tensors[0].dim():
        place(torch.from_numpy(row), tensors)
    else:
        for count, tensor in zip(row, tensors, strict=False):
            tensor.fill_(float(count))


def read(tensors: list[Tensor], row: Array) -> None:
    """The same the other way round."""
    values = flat(tensors).numpy()
    row[: len(values)] = values


def pair_bytes(num: int) -> int:
    """Room for a gradient and for weights."""
    return 8 * num


def halves(region: SharedMemory, num: int) -> tuple[Tensor, Tensor]:
    """A region as a gradient [n] and weights [n]."""
    both = torch.from_numpy(np.frombuffer(region.view, np.float32, 2 * num).reshape(2, num))
    return both[0], both[1]


def rows(region: SharedMemory, num_rows: int, num: int) -> list[Array]:
    """A region as so many rows [n]."""
    return list(np.frombuffer(region.view, np.float32, num_rows * num).reshape(num_rows, num))
