"""A parameter server's shards in processes of this machine, and the connections of driver and learners to them."""

import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import send_handle
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from qfleet.data import Array
from qfleet.data.wire_format import Facts
from qfleet.distributed.learners.handle import LearnerHandle
from qfleet.distributed.learners.shares import pieces_in_range
from qfleet.distributed.parameter_server.shard import (
    PUSH,
    REPLY,
    VERDICTS,
    ShardSetup,
    gradient_and_weights,
    mailbox_bytes,
    rows,
    shard_main,
    write_row,
)
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import CommLost
from qfleet.sync.gradient_rule import Verdict, shard_bounds
from qfleet.sync.packed import PackedGradient
from qfleet.sync.strategies import copy_into, flatten_tensors
from qfleet.system.shared_memory import SharedMemory
from qfleet.system.worker_process import WorkerOptions, WorkerProcess

START_SECONDS = 5.0  # beyond the timeout of a reply; shards are forked with everything imported
SendFds = Callable[..., None]  # takes a learner's handle and file descriptors for it


class ShardPort:
    """A learner's connection to a shard of n numbers: shared memory, and a socket for notices."""

    def __init__(self, region: SharedMemory, sock: socket.socket, num: int, timeout_seconds: float) -> None:
        self.region = region
        self.sock = sock
        self.gradient, self.weights = gradient_and_weights(region, num)
        self.sent_bytes = 0
        sock.settimeout(timeout_seconds)

    def push(
        self, gradient: Tensor, sequence: int, version: int, rate: float, packed: PackedGradient | None = None
    ) -> None:
        """Push a gradient, not packed: in shared memory copying is faster than unpacking."""
        self.gradient.copy_(gradient)
        self.sent_bytes += gradient.nbytes
        try:
            self.sock.sendall(PUSH.pack(sequence, version, rate))
        except OSError as error:
            raise CommLost(f"a parameter-server shard is lost: {error}") from error

    def reply(self) -> tuple[Verdict, int, Tensor]:
        """Wait for the verdict on the last push, the shard's version and its weights."""
        try:
            data = self.sock.recv(REPLY.size, socket.MSG_WAITALL)
        except OSError as error:
            raise CommLost(f"a parameter-server shard does not reply: {error}") from error
        if len(data) < REPLY.size:
            raise CommLost("a parameter-server shard is lost")
        verdict, version = REPLY.unpack(data)
        return VERDICTS[verdict], version, self.weights

    def close(self) -> None:
        """Close the socket, which tells the shard that this learner left."""
        self.sock.close()


class ShardProcess:
    """The driver's handle of a shard's process."""

    def __init__(self, context: ForkServerContext, plan: bytes, sync: bytes, pieces: list[int], num_kinds: int) -> None:
        self.num = sum(pieces)
        self.num_kinds = num_kinds
        self.state = SharedMemory(4 * self.num * num_kinds)
        self.pipe, self.child_end = context.Pipe()
        self.awaiting_reply = False  # after a timeout no other request may follow: a late reply would be taken for its
        setup = ShardSetup(plan, sync, self.state, pieces, self.child_end)
        self.process = WorkerProcess(context, "shard", shard_main, setup, WorkerOptions())

    def start(self) -> None:
        """Start the process with the rows written into `state`."""
        self.process.start()
        self.child_end.close()

    def rows(self) -> list[Array]:
        """Weights [n] and moments [n], initial or as of the last `state` request."""
        return rows(self.state, self.num_kinds, self.num)

    def receive_reply(self, timeout_seconds: float) -> bytes:
        """The next reply; `CommLost` if the shard failed or none came in time."""
        try:
            if self.pipe.poll(timeout_seconds):
                return self.pipe.recv_bytes(1 << 16)
        except (OSError, EOFError) as error:
            raise CommLost(f"a parameter-server shard is lost: {self.process.how_ended()}") from error
        raise CommLost("a parameter-server shard does not reply")

    def request(self, message: str, timeout_seconds: float, fds: tuple[int, ...] = ()) -> dict[str, Any]:
        """Send a request; the reply is the shard's version and counts."""
        if self.awaiting_reply:
            raise CommLost("a parameter-server shard still has to reply to an earlier request")
        self.awaiting_reply = True
        try:
            self.pipe.send_bytes(message.encode())
            for fd in fds:
                send_handle(self.pipe, fd, self.process.pid)
        except OSError as error:
            raise CommLost(f"a parameter-server shard is lost: {error}") from error
        counts: dict[str, Any] = msgspec.json.decode(self.receive_reply(timeout_seconds))
        self.awaiting_reply = False
        return counts

    def connect(self, rank: int, timeout_seconds: float) -> tuple[SharedMemory, socket.socket]:
        """Connect a learner to the shard: its shared memory region and its end of a socket."""
        region = SharedMemory(mailbox_bytes(self.num))
        learner_end, shard_end = socket.socketpair()
        with shard_end:
            self.request(f"connect {rank}", timeout_seconds, (region.fileno(), shard_end.fileno()))
        return region, learner_end

    def stop(self) -> None:
        """Kill the process, and close the connection."""
        self.process.stop()
        self.process.close()
        self.pipe.close()
        self.state.close()


class ShardProcesses:
    """All shards of a parameter server, started with a learner's weights and moments."""

    facts: Facts = {}  # noqa: RUF012  members are sent their connections

    def __init__(
        self, context: ForkServerContext, plan: Plan, sync: Serving, learner: Learner, send_fds: SendFds | None = None
    ) -> None:
        self.limit = plan.learners.timeout_seconds
        self.ports = list[ShardPort]()
        self.send_fds = send_fds
        self.layout = ShardLayout(learner, sync.shards)
        plans = (msgspec.json.encode(plan), msgspec.json.encode(sync))
        self.shards = [ShardProcess(context, *plans, pieces, self.layout.num_kinds) for pieces in self.layout.pieces()]
        for shard, own in zip(self.shards, self.layout.split(learner), strict=True):
            for row, part in zip(shard.rows(), own, strict=True):
                row[: len(part)] = part
        try:
            for shard in self.shards:
                shard.start()
            until = time.monotonic() + self.limit + START_SECONDS
            for shard in self.shards:
                shard.receive_reply(max(0.0, until - time.monotonic()))
        except CommLost:
            self.close()
            raise

    def connect(self, rank: int) -> list[ShardPort]:
        """Connections of this process to all shards."""
        self.ports += [ShardPort(*shard.connect(rank, self.limit), shard.num, self.limit) for shard in self.shards]
        return self.ports

    def connect_members(self, members: Sequence[LearnerHandle]) -> None:
        """Send each member its connections to all shards."""
        if self.send_fds is None:
            raise ValueError("there is no way to send file descriptors")
        for rank, handle in enumerate(members, 1):
            for shard in self.shards:
                region, sock = shard.connect(rank, self.limit)
                with sock:
                    self.send_fds(handle, region.fileno(), sock.fileno())
                region.close()

    def release(self) -> None:
        """Reply to all learners that wait for a step."""
        for shard in self.shards:
            shard.request("release", self.limit)

    def pull_into(self, learner: Learner) -> dict[str, Any]:
        """Pull weights and moments of all shards into a learner; versions and counts of staleness."""
        counts = [shard.request("state", self.limit) for shard in self.shards]
        self.layout.join([shard.rows() for shard in self.shards], learner)
        return merge_counts(counts)

    def close(self) -> None:
        """Stop all shards."""
        for port in self.ports:
            port.close()
        for shard in self.shards:
            shard.stop()


class ShardLayout:
    """How weights and moments are cut into one block per shard: a row [n] of weights and of each moment."""

    def __init__(self, learner: Learner, shards: int) -> None:
        sizes = [parameter.numel() for parameter in learner.parameters]
        self.num_kinds = len(weights_and_moments(learner))
        # For each shard: index of a parameter, and how many of its numbers.
        self.cuts = [pieces_in_range(sizes, *bounds) for bounds in shard_bounds(sum(sizes), shards)]

    def pieces(self) -> list[list[int]]:
        """For each shard, how many numbers of each parameter it holds."""
        return [[num for _, num in pieces] for pieces in self.cuts]

    def split(self, learner: Learner) -> list[list[Array]]:
        """The rows of each shard; a row of step counts has one number per parameter."""
        rows = [self.parts(tensors) for tensors in weights_and_moments(learner)]
        return [list(own) for own in zip(*rows, strict=True)]

    def parts(self, tensors: list[Tensor]) -> list[Array]:
        """One row per shard, of the weights or of one moment."""
        if not tensors[0].dim():
            return [np.array([float(tensors[at]) for at, _ in pieces], np.float32) for pieces in self.cuts]
        whole = flatten_tensors(tensors).numpy()
        return np.split(whole, np.cumsum([sum(pieces) for pieces in self.pieces()])[:-1])

    def join(self, shards: list[list[Array]], learner: Learner) -> None:
        """Write the rows of all shards into a learner."""
        for at, tensors in enumerate(weights_and_moments(learner)):
            if tensors[0].dim():
                copy_into(torch.from_numpy(np.concatenate([own[at] for own in shards])), tensors)
                continue
            for own, pieces in zip(shards, self.cuts, strict=True):
                write_row(own[at], [tensors[which] for which, _ in pieces])


def merge_counts(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Versions and gradients taken of each shard; staleness and refusals summed over all."""
    of_each = {"versions": [shard["version"] for shard in shards], "taken": [shard["taken"] for shard in shards]}
    of_all = {kind: sum((Counter(shard[kind]) for shard in shards), Counter()) for kind in ("staleness", "refused")}
    return {**of_each, **{kind: dict(counts) for kind, counts in of_all.items()}}


def weights_and_moments(learner: Learner) -> list[list[Tensor]]:
    """The weights, then each kind of moment: a list of one tensor per parameter."""
    return [list(learner.parameters), *learner.optimizer.moments.values()]
