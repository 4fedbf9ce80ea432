"""A parameter server's shard as a process, and the ways to it: gradients and weights in shared memory, words by socket.

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
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, get_args

import msgspec
import numpy as np
import torch
from torch import Tensor

from qfleet.data import Array
from qfleet.data.kin import die_with_parent, hidden_main
from qfleet.data.region import Region, region_of
from qfleet.learn import make_optimizer
from qfleet.plan.schema import Plan
from qfleet.plan.together import ServerSync
from qfleet.sync.comm import CommLost
from qfleet.sync.shard import Push, Shard, Verdict

PUSH, REPLY = struct.Struct("<qqd"), struct.Struct("<Bq")  # sequence, version, rate; verdict, version
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
LISTEN_MILLISECONDS, END_SECONDS = 500, 0.5


class ShardPort:
    """A learner's end of the way to a shard of n numbers."""

    def __init__(self, region: Region, line: socket.socket, num: int, limit_seconds: float) -> None:
        self.region, self.line = region, line
        self.gradient, self.weights = halves(region, num)
        line.settimeout(limit_seconds)

    def push(self, gradient: Tensor, sequence: int, version: int, rate: float) -> None:
        """Write it down and say so."""
        self.gradient.copy_(gradient)
        try:
            self.line.sendall(PUSH.pack(sequence, version, rate))
        except OSError as error:
            raise CommLost(f"a server's shard is gone: {error}") from error

    def reply(self) -> tuple[Verdict, int, Tensor]:
        """Wait for the answer."""
        try:
            data = self.line.recv(REPLY.size, socket.MSG_WAITALL)
        except OSError as error:
            raise CommLost(f"a server's shard does not answer: {error}") from error
        if len(data) < REPLY.size:
            raise CommLost("a server's shard is gone")
        verdict, version = REPLY.unpack(data)
        return VERDICTS[verdict], version, self.weights

    def close(self) -> None:
        """Leave."""
        self.line.close()


@dataclass
class ShardPost:
    """Everything a shard needs to know."""

    plan: bytes  # as JSON
    sync: bytes  # the agreement, as JSON
    state: Region  # weights and moments [n] each, to begin with and whenever they are asked for
    num: int
    orders: Connection


class Desk:
    """A learner's end at the shard."""

    def __init__(self, rank: int, region: Region, line: socket.socket, num: int) -> None:
        self.rank, self.region, self.line = rank, region, line
        self.gradient, self.weights = halves(region, num)

    def answer(self, verdict: Verdict, version: int, weights: Tensor) -> None:
        """Show the newest weights, then say so; who is gone does not hear it."""
        self.weights.copy_(weights)
        try:
            self.line.send(REPLY.pack(VERDICTS.index(verdict), version), socket.MSG_DONTWAIT)
        except OSError:
            return


def hold(post: ShardPost) -> None:
    """The life of a shard's process."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    Holding(post).run(os.getppid())


class Holding:
    """A block of weights, its optimiser, and whoever works with it."""

    def __init__(self, post: ShardPost) -> None:
        self.post, self.sync = post, msgspec.json.decode(post.sync, type=ServerSync)
        plan = msgspec.json.decode(post.plan, type=Plan)
        weights = torch.empty(post.num)
        self.optimizer = make_optimizer(plan.optim, [weights])
        self.kept = [weights, *(moment[0] for moment in self.optimizer.moments.values())]
        self.load()
        self.skipped = False
        limit = self.sync.window_seconds
        how = {"max_staleness": self.sync.max_staleness, "spare": self.sync.spare, "window": self.sync.window}
        self.shard = Shard(
            weights,
            self.step,
            workers=0,
            **how,  # type: ignore[arg-type]
            window_seconds=float("inf") if limit is None else limit,
            slow_down=self.sync.slow_down,
            total=self.sync.reduce == "sum",
        )
        self.desks: dict[int, Desk] = {}
        self.asking: list[Desk] = []  # whose answer waits for a step
        self.rate = 0.0
        self.poll = select.poll()
        self.poll.register(post.orders.fileno(), select.POLLIN)

    def load(self) -> None:
        """Begin with what lies in the region."""
        for into, row in zip(self.kept, rows(self.post.state, len(self.kept), self.post.num), strict=True):
            into.copy_(torch.from_numpy(row) if into.dim() else torch.tensor(float(row[0])))  # a count is one number

    def save(self) -> None:
        """Write down what there is."""
        for value, row in zip(self.kept, rows(self.post.state, len(self.kept), self.post.num), strict=True):
            row[:] = value.numpy()

    def step(self, gradient: Tensor, factor: float) -> None:
        """The optimiser's step, unless somebody had nothing to give."""
        self.skipped = not bool(torch.isfinite(gradient).all())
        if not self.skipped:
            self.optimizer.learning_rate = self.rate * factor
            self.optimizer.step([gradient])

    def run(self, parent: int) -> None:
        """Serve until the parent is gone."""
        while os.getppid() == parent:
            for fd, _ in self.poll.poll(self.patience()):
                if fd == self.post.orders.fileno():
                    self.obey(self.post.orders.recv_bytes(64).decode())
                else:
                    self.take(self.desks[fd])
            if self.shard.tend(time.monotonic()):
                self.tell_all()

    def patience(self) -> float:
        """Milliseconds until a window closes, or somebody may have left."""
        limit = self.shard.since + self.shard.window_seconds - time.monotonic()
        return min(LISTEN_MILLISECONDS, max(0.0, 1_000 * limit))

    def take(self, desk: Desk) -> None:
        """Hear a learner; one that left is not waited for."""
        data = desk.line.recv(PUSH.size, socket.MSG_WAITALL)
        if len(data) < PUSH.size:
            self.part(desk)
            return
        sequence, version, self.rate = PUSH.unpack(data)
        waits = self.sync.max_staleness == 0
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
            desk.answer("skipped" if self.skipped else "applied", self.shard.version, self.shard.weights)
        self.asking.clear()

    def part(self, desk: Desk) -> None:
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
        """What the driver wants: a learner seated, or the state shown."""
        word, _, rest = order.partition(" ")
        if word == "seat":
            memory, line = recv_handle(self.post.orders), recv_handle(self.post.orders)
            region = region_of(memory, pair_bytes(self.post.num))
            desk = Desk(int(rest), region, socket.socket(fileno=line), self.post.num)
            self.desks[desk.line.fileno()] = desk
            self.poll.register(desk.line.fileno(), select.POLLIN)
            self.shard.enlist()
        else:
            self.save()
        shard = self.shard
        counts = {"version": shard.version, "staleness": dict(shard.staleness), "refused": dict(shard.refused)}
        self.post.orders.send_bytes(msgspec.json.encode(counts))


class Server:
    """A shard's process, as the driver sees it."""

    def __init__(
        self, context: ForkServerContext, plan: bytes, sync: bytes, num: int, moments: int, limit: float
    ) -> None:
        self.num, self.limit = num, limit
        self.state, self.moments = Region(4 * num * (1 + moments)), moments
        self.orders, theirs = context.Pipe()
        post = ShardPost(plan, sync, self.state, num, theirs)
        self.process: BaseProcess = context.Process(target=hold, args=(post,), name="qfleet-shard", daemon=True)
        self.post = post

    def start(self) -> None:
        """Begin with what was written into `state`."""
        with hidden_main(True):
            self.process.start()
        self.post.orders.close()

    def rows(self) -> list[Array]:
        """Weights [n] and moments [n], to begin with or as they were last shown."""
        return rows(self.state, 1 + self.moments, self.num)

    def seat(self, rank: int) -> tuple[Region, socket.socket]:
        """A place for a learner: what it needs to reach the shard."""
        region, (mine, theirs) = Region(pair_bytes(self.num)), socket.socketpair()
        self.ask(f"seat {rank}", (region.fileno(), theirs.fileno()))
        theirs.close()
        return region, mine

    def ask(self, order: str, handles: tuple[int, ...] = ()) -> dict[str, Any]:
        """Give an order and hear how things stand."""
        try:
            self.orders.send_bytes(order.encode())
            for handle in handles:
                send_handle(self.orders, handle, self.process.pid)
            if not self.orders.poll(self.limit):
                raise CommLost("a server's shard does not answer")
            found: dict[str, Any] = msgspec.json.decode(self.orders.recv_bytes(1 << 16))
        except (OSError, EOFError) as error:
            raise CommLost(f"a server's shard is gone: {error}") from error
        return found

    def end(self) -> None:
        """It is not needed any more."""
        if self.process.pid is not None:
            self.process.kill()
            self.process.join(END_SECONDS)
        self.orders.close()
        self.state.close()


def pair_bytes(num: int) -> int:
    """Room for a gradient and for weights."""
    return 8 * num


def halves(region: Region, num: int) -> tuple[Tensor, Tensor]:
    """A region as a gradient [n] and weights [n]."""
    both = torch.from_numpy(np.frombuffer(region.view, np.float32, 2 * num).reshape(2, num))
    return both[0], both[1]


def rows(region: Region, num_rows: int, num: int) -> list[Array]:
    """A region as so many rows [n]."""
    return list(np.frombuffer(region.view, np.float32, num_rows * num).reshape(num_rows, num))
