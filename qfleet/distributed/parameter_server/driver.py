"""A parameter server's shards in processes of this machine, and the connections of driver and learners to them."""

import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from qfleet.data import Array
from qfleet.data.wire_format import Message
from qfleet.distributed.learners.shares import pieces_in_range
from qfleet.distributed.parameter_server import messages
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
from qfleet.distributed.worker.handle import WorkerHandle, await_ready
from qfleet.distributed.worker.local import RingSizes, launch_local
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import CommLost
from qfleet.sync.gradient_rule import Verdict, shard_bounds
from qfleet.sync.packed import PackedGradient
from qfleet.sync.strategies import copy_into, flatten_tensors
from qfleet.system.shared_memory import SharedMemory
from qfleet.system.worker_errors import WorkerHung, WorkerLost

START_SECONDS = 5.0  # beyond the timeout of a reply; shards are forked with everything imported
SIZES = RingSizes(messages.ShardRequest, messages.ShardCounts, 1 << 12, 1 << 16)


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
    """The driver's handle of a shard's process, and the memory that both share."""

    def __init__(
        self, context: ForkServerContext, plan: Plan, sync: Serving, rows: list[Array], pieces: list[int]
    ) -> None:
        self.num = sum(pieces)
        self.num_kinds = len(rows)
        self.state = SharedMemory(4 * self.num * self.num_kinds)
        for row, part in zip(self.rows(), rows, strict=True):
            row[: len(part)] = part
        setup = ShardSetup(msgspec.json.encode(plan), msgspec.json.encode(sync), self.state, pieces)
        limit = plan.learners.timeout_seconds + START_SECONDS
        self.handle = launch_local(context, "shard", shard_main, setup, SIZES, start_seconds=limit)

    def rows(self) -> list[Array]:
        """Weights [n] and moments [n], initial or as of the last `ReadShard`."""
        return rows(self.state, self.num_kinds, self.num)

    def request(self, message: Message, timeout_seconds: float, fds: tuple[int, ...] = ()) -> messages.ShardCounts:
        """Send a request; the reply is the shard's version and counts."""
        with shard_errors():
            if self.handle.num_outstanding:  # after a timeout a late reply would be taken for that of this request
                raise WorkerHung("it still has to reply to an earlier request")
            self.handle.ask(message)
            self.handle.send_descriptors(*fds)
            counts, _ = self.handle.reply(messages.ShardCounts, timeout_seconds)
        return cast(messages.ShardCounts, counts)

    def connect(self, rank: int, timeout_seconds: float) -> tuple[SharedMemory, socket.socket]:
        """Connect a learner to the shard: its shared memory region and its end of a socket."""
        region = SharedMemory(mailbox_bytes(self.num))
        learner_end, shard_end = socket.socketpair()
        with shard_end:
            self.request(messages.ConnectLearner(rank), timeout_seconds, (region.fileno(), shard_end.fileno()))
        return region, learner_end

    def stop(self) -> None:
        """Kill the process, and free what both share."""
        self.handle.stop()
        self.state.close()


@contextmanager
def shard_errors() -> Iterator[None]:
    """The loss of a shard is one of the group: no learner is at fault."""
    try:
        yield
    except WorkerLost as cause:
        raise CommLost(f"a parameter-server shard is lost: {cause}") from cause


class ShardProcesses:
    """All shards of a parameter server, started with a learner's weights and moments."""

    def __init__(self, context: ForkServerContext, plan: Plan, sync: Serving, learner: Learner) -> None:
        self.names: tuple[str, ...] = ()  # members are sent their connections
        self.limit = plan.learners.timeout_seconds
        self.ports = list[ShardPort]()
        self.layout = ShardLayout(learner, sync.shards)
        rows_and_pieces = zip(self.layout.split(learner), self.layout.pieces(), strict=True)
        self.shards = [ShardProcess(context, plan, sync, rows, pieces) for rows, pieces in rows_and_pieces]
        try:
            with shard_errors():
                await_ready([shard.handle for shard in self.shards])
        except CommLost:
            self.close()
            raise

    def connect(self, rank: int) -> list[ShardPort]:
        """Connections of this process to all shards."""
        self.ports += [ShardPort(*shard.connect(rank, self.limit), shard.num, self.limit) for shard in self.shards]
        return self.ports

    def connect_members(self, members: Sequence[WorkerHandle]) -> None:
        """Send each member its connections to all shards."""
        for rank, handle in enumerate(members, 1):
            for shard in self.shards:
                region, sock = shard.connect(rank, self.limit)
                with sock:
                    handle.send_descriptors(region.fileno(), sock.fileno())
                region.close()

    def release(self) -> None:
        """Reply to all learners that wait for a step."""
        for shard in self.shards:
            shard.request(messages.ReleaseWaiting(), self.limit)

    def pull_into(self, learner: Learner) -> dict[str, Any]:
        """Pull weights and moments of all shards into a learner; versions and counts of staleness."""
        counts = [shard.request(messages.ReadShard(), self.limit) for shard in self.shards]
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


def merge_counts(shards: Sequence[messages.ShardCounts]) -> dict[str, Any]:
    """Versions and gradients taken of each shard; staleness and refusals summed over all."""
    return {
        "versions": [shard.version for shard in shards],
        "taken": [shard.taken for shard in shards],
        "staleness": {str(age): num for age, num in sum_counts([shard.staleness for shard in shards]).items()},
        "refused": sum_counts([shard.refused for shard in shards]),
    }


def sum_counts(counts: Sequence[Mapping[Any, int]]) -> dict[Any, int]:
    """The sums by key."""
    return dict(sum((Counter(each) for each in counts), Counter[Any]()))


def weights_and_moments(learner: Learner) -> list[list[Tensor]]:
    """The weights, then each kind of moment: a list of one tensor per parameter."""
    return [list(learner.parameters), *learner.optimizer.moments.values()]
