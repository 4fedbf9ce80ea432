"""A parameter server as the driver and the learners see it: its shards' processes, and the ways to them."""

import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from qfleet.data import Array
from qfleet.data.wire_format import Facts
from qfleet.distributed.learners.handle import LearnerHandle
from qfleet.distributed.learners.shares import pieces_of
from qfleet.distributed.parameter_server.shard import (
    FAILED,
    PUSH,
    REPLY,
    VERDICTS,
    ShardSetup,
    halves,
    hold,
    pair_bytes,
    rows,
    write,
)
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import CommLost
from qfleet.sync.packed import PackedGradient
from qfleet.sync.shard import Verdict, cuts_of
from qfleet.sync.strategies import flat, place
from qfleet.system.child_process import hidden_main
from qfleet.system.shared_memory import SharedMemory

# A start takes so much longer than any other answer: no more, for shards are forked with everything imported.
START_SECONDS = 5.0
END_SECONDS = 0.5
Hand = Callable[..., None]  # a partner and descriptors for it


class ShardPort:
    """A learner's end of the way to a shard of n numbers."""

    def __init__(self, region: SharedMemory, line: socket.socket, num: int, limit_seconds: float) -> None:
        self.region = region
        self.line = line
        self.gradient, self.weights = halves(region, num)
        self.sent_bytes = 0
        line.settimeout(limit_seconds)

    def push(
        self, gradient: Tensor, sequence: int, version: int, rate: float, packed: PackedGradient | None = None
    ) -> None:
        """Write it down and say so. As it is: in shared memory it is sooner copied than unpacked."""
        self.gradient.copy_(gradient)
        self.sent_bytes += gradient.nbytes
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


class ShardProcess:
    """A shard's process, as the driver sees it."""

    def __init__(self, context: ForkServerContext, plan: bytes, sync: bytes, pieces: list[int], kinds: int) -> None:
        self.num = sum(pieces)
        self.kinds = kinds
        self.state = SharedMemory(4 * self.num * kinds)
        self.orders, self.theirs = context.Pipe()
        self.owes = False  # a word for an order: one that comes too late would be taken for another's
        post = ShardSetup(plan, sync, self.state, pieces, self.theirs)
        self.process: BaseProcess = context.Process(target=hold, args=(post,), name="qfleet-shard", daemon=True)

    def start(self) -> None:
        """Begin with what was written into `state`."""
        with hidden_main(True):
            self.process.start()
        self.theirs.close()

    def rows(self) -> list[Array]:
        """Weights [n] and moments [n], to begin with or as they were last shown."""
        return rows(self.state, self.kinds, self.num)

    def word(self, limit_seconds: float) -> bytes:
        """What it says within the limit."""
        try:
            if self.orders.poll(limit_seconds):
                word = self.orders.recv_bytes(1 << 16)
                if word.startswith(FAILED):
                    raise CommLost(f"a server's shard has failed: {word[1:].decode(errors='replace')}")
                return word
        except (OSError, EOFError) as error:
            raise CommLost(f"a server's shard is gone: {error}") from error
        raise CommLost("a server's shard does not answer")

    def ask(self, order: str, limit_seconds: float, handles: tuple[int, ...] = ()) -> dict[str, Any]:
        """Give an order and hear how things stand."""
        if self.owes:
            raise CommLost("a server's shard has not answered before")
        self.owes = True
        try:
            self.orders.send_bytes(order.encode())
            for handle in handles:
                send_handle(self.orders, handle, self.process.pid)
        except OSError as error:
            raise CommLost(f"a server's shard is gone: {error}") from error
        found: dict[str, Any] = msgspec.json.decode(self.word(limit_seconds))
        self.owes = False
        return found

    def seat(self, rank: int, limit_seconds: float) -> tuple[SharedMemory, socket.socket]:
        """A place for a learner: what it needs to reach the shard."""
        region = SharedMemory(pair_bytes(self.num))
        (mine, theirs) = socket.socketpair()
        with theirs:
            self.ask(f"seat {rank}", limit_seconds, (region.fileno(), theirs.fileno()))
        return region, mine

    def end(self) -> None:
        """It is not needed any more."""
        if self.process.pid is not None:
            self.process.kill()
            self.process.join(END_SECONDS)
        self.orders.close()
        self.state.close()


class ShardProcesses:
    """All shards of a parameter server, begun with what a learner has."""

    facts: Facts = {}  # noqa: RUF012  whoever joins is handed its ways

    def __init__(
        self, context: ForkServerContext, plan: Plan, sync: Serving, learner: Learner, hand: Hand | None = None
    ) -> None:
        self.limit = plan.learners.timeout_seconds
        self.ports = list[ShardPort]()
        self.hand = hand
        self.blocks = Blocks(learner, sync.shards)
        told = (msgspec.json.encode(plan), msgspec.json.encode(sync))
        self.shards = [ShardProcess(context, *told, pieces, self.blocks.kinds) for pieces in self.blocks.pieces()]
        for shard, own in zip(self.shards, self.blocks.split(learner), strict=True):
            for row, part in zip(shard.rows(), own, strict=True):
                row[: len(part)] = part
        try:
            for shard in self.shards:
                shard.start()
            until = time.monotonic() + self.limit + START_SECONDS
            for shard in self.shards:
                shard.word(max(0.0, until - time.monotonic()))
        except CommLost:
            self.close()
            raise

    def seat(self, rank: int) -> list[ShardPort]:
        """A learner's ways to all shards, in this process."""
        self.ports += [ShardPort(*shard.seat(rank, self.limit), shard.num, self.limit) for shard in self.shards]
        return self.ports

    def invite(self, group: Sequence[LearnerHandle]) -> None:
        """Hand everybody the ways to all shards."""
        if self.hand is None:
            raise ValueError("nobody can be handed anything")
        for rank, mate in enumerate(group, 1):
            for shard in self.shards:
                region, line = shard.seat(rank, self.limit)
                with line:
                    self.hand(mate, region.fileno(), line.fileno())
                region.close()

    def release(self) -> None:
        """Whoever waits for a step goes on without."""
        for shard in self.shards:
            shard.ask("release", self.limit)

    def gather(self, learner: Learner) -> dict[str, Any]:
        """Write what the shards have into a learner; how far they are, and how stale gradients were."""
        told = [shard.ask("state", self.limit) for shard in self.shards]
        self.blocks.join([shard.rows() for shard in self.shards], learner)
        return standing(told)

    def close(self) -> None:
        """End them."""
        for port in self.ports:
            port.close()
        for shard in self.shards:
            shard.end()


class Blocks:
    """How the weights of a learner and their moments are cut into a block for each shard: rows [n] for each kind."""

    def __init__(self, learner: Learner, shards: int) -> None:
        sizes = [parameter.numel() for parameter in learner.parameters]
        self.kinds = len(kinds_of(learner))
        self.cuts = [pieces_of(sizes, *cut) for cut in cuts_of(sum(sizes), shards)]  # which parameter, how many numbers

    def pieces(self) -> list[list[int]]:
        """How many numbers of each parameter, for every shard."""
        return [[num for _, num in pieces] for pieces in self.cuts]

    def split(self, learner: Learner) -> list[list[Array]]:
        """For every shard its rows; of counts there is one for each parameter."""
        rows = [self.parts(tensors) for tensors in kinds_of(learner)]
        return [list(own) for own in zip(*rows, strict=True)]

    def parts(self, tensors: list[Tensor]) -> list[Array]:
        """What each shard has of one kind."""
        if not tensors[0].dim():
            return [np.array([float(tensors[at]) for at, _ in pieces], np.float32) for pieces in self.cuts]
        whole = flat(tensors).numpy()
        return np.split(whole, np.cumsum([sum(pieces) for pieces in self.pieces()])[:-1])

    def join(self, shards: list[list[Array]], learner: Learner) -> None:
        """The rows of all shards, written into a learner."""
        for at, tensors in enumerate(kinds_of(learner)):
            if tensors[0].dim():
                place(torch.from_numpy(np.concatenate([own[at] for own in shards])), tensors)
                continue
            for own, pieces in zip(shards, self.cuts, strict=True):
                write(own[at], [tensors[which] for which, _ in pieces])


def standing(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far shards are, how stale blocks of gradients were, and how many were refused, from what each told."""
    of_each = {"versions": [each["version"] for each in told], "taken": [each["taken"] for each in told]}
    of_all = {kind: sum((Counter(each[kind]) for each in told), Counter()) for kind in ("staleness", "refused")}
    return {**of_each, **{kind: dict(counts) for kind, counts in of_all.items()}}


def kinds_of(learner: Learner) -> list[list[Tensor]]:
    """Weights, then every kind of moment: a tensor of each for every parameter."""
    return [list(learner.parameters), *learner.optimizer.moments.values()]
