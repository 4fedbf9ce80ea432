"""Parameter-server shards on Ray: each on a node with free resources, called by the driver and by all learners.

A push is a call that returns when the shard's rule allows; gradients and weights travel as flat, checked messages.
"""

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from qfleet.data import Array
from qfleet.data.wire_format import Arrays, Count, Message, Parts, to_bytes, unpack
from qfleet.distributed.parameter_server import messages
from qfleet.distributed.parameter_server.driver import ShardLayout, merge_counts, shard_errors
from qfleet.distributed.parameter_server.shard import WeightBlock, read_row
from qfleet.distributed.ray.rpc import TABLE_BYTES
from qfleet.distributed.ray.worker import connection_error, launch_on_ray
from qfleet.distributed.worker.handle import WorkerHandle, await_ready
from qfleet.distributed.worker.messages import Failed
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import CommLost
from qfleet.sync.gradient_rule import Push, Verdict
from qfleet.sync.make import make_codec
from qfleet.sync.packed import GradientForm, PackedGradient, pack_push, unpack_push
from qfleet.sync.served import ShardConnection

WINDOW_POLL_SECONDS = 0.005
EXTRA_THREADS = 64  # of a shard's process, besides one for each learner that waits


class PushGradient(Message):
    """A learner's gradient of the weights of this version; its numbers are in the arrays."""

    rank: Count
    sequence: Count
    version: Count
    rate: float
    timeout_seconds: float
    form: GradientForm


class PushReply(Message):
    """The verdict on a push, the shard's version, and its weights in the arrays; no verdict after the timeout."""

    verdict: Verdict | None
    version: Count


@dataclass
class RayShardSetup:
    """Everything a shard is started with."""

    plan: bytes  # as JSON
    sync: bytes  # the plan's strategy, as JSON
    pieces: list[int]  # how many numbers of each parameter
    rows: list[Array]  # weights [n] and moments [n]


class ShardWorker:
    """A shard in its process; every learner's call has a thread of its own."""

    def __init__(self, setup: RayShardSetup) -> None:
        torch.set_num_threads(1)
        sync_plan = msgspec.json.decode(setup.sync, type=Serving)
        self.block = WeightBlock(msgspec.json.decode(setup.plan, type=Plan), sync_plan, setup.pieces)
        self.codec = make_codec(sync_plan.codec, [], 0, 0)
        self.block.load(setup.rows)
        self.replied = threading.Condition()
        if self.block.shard.window_seconds < float("inf"):
            threading.Thread(target=self.close_windows, daemon=True).start()

    def close_windows(self) -> None:
        """Make the step of a window of gradients when its time is over."""
        while True:
            time.sleep(WINDOW_POLL_SECONDS)
            with self.replied:
                self.block.close_window()

    def handle(self, message: messages.ShardRequest | PushGradient, arrays: Arrays) -> Parts:
        """Handle a learner's push, or a request of the driver."""
        if isinstance(message, PushGradient):
            return self.push(message, arrays)
        with self.replied:
            match message:
                case messages.ConnectLearner():
                    self.block.shard.add_worker()
                case messages.ReleaseWaiting():
                    self.block.release()
                case messages.ReadShard():
                    self.block.shard.flush()
                    return self.block.counts(), self.rows()
            return self.block.counts(), {}

    def push(self, message: PushGradient, arrays: Arrays) -> Parts:
        """Push a gradient, and wait until the shard's rule allows a reply."""
        shard = self.block.shard
        gradient = unpack_push(message.form, arrays, self.codec, len(shard.weights))
        replies = list[Parts]()

        def reply(verdict: Verdict) -> None:
            replies.append((PushReply(verdict, shard.version), {"weights": shard.weights.numpy().copy()}))
            self.replied.notify_all()

        timeout = message.timeout_seconds
        limit = min(timeout, self.block.max_wait_seconds) if message.rank else timeout
        with self.replied:
            push = Push((message.rank, 0, message.sequence), message.version, gradient)
            self.block.push(push, message.rate, reply)
            if not self.replied.wait_for(lambda: replies, limit):
                if limit < timeout and not shard.has_waiting(0):
                    self.block.release_one(message.rank)  # it waits for rank 0 only
                elif not self.replied.wait_for(lambda: replies, timeout - limit):
                    return PushReply(None, shard.version), {}
            return replies[0]

    def rows(self) -> Arrays:
        """Weights and moments as rows."""
        rows = [np.zeros(sum(self.block.pieces), np.float32) for _ in self.block.state_tensors]
        for tensors, row in zip(self.block.state_tensors, rows, strict=True):
            read_row(tensors, row)
        return {str(at): row for at, row in enumerate(rows)}

    def work_when_idle(self) -> bool:
        """Windows are closed by a thread."""
        return False

    def close(self) -> None:
        """Its process is killed."""


class RayPort:
    """A learner's connection to a shard of n numbers."""

    def __init__(self, shard: Any, rank: int, num: int, timeout_seconds: float) -> None:
        self.shard = shard
        self.rank = rank
        self.num = num
        self.timeout_seconds = timeout_seconds
        self.call: Any = None
        self.sent_bytes = 0

    def push(
        self, gradient: Tensor, sequence: int, version: int, rate: float, packed: PackedGradient | None = None
    ) -> None:
        """Push a gradient, packed by the codec if that has fewer bytes."""
        form, arrays = pack_push(gradient, packed)
        message = to_bytes(PushGradient(self.rank, sequence, version, rate, self.timeout_seconds, form), arrays)
        self.sent_bytes += len(message)
        self.call = self.shard.handle.remote(message)

    def reply(self) -> tuple[Verdict, int, Tensor]:
        """Wait for the verdict on the last push, the shard's version and its weights."""
        try:
            message = ray.get(self.call, timeout=self.timeout_seconds)
        except (RayError, GetTimeoutError) as error:
            raise CommLost(str(connection_error(error))) from error
        reply, arrays = unpack(message, PushReply | Failed, limit_bytes=4 * self.num + TABLE_BYTES)
        if isinstance(reply, Failed):
            raise CommLost(f"a parameter-server shard has failed: {reply.report.what}")
        if reply.verdict is None:
            raise CommLost("other learners did not push to a parameter-server shard in time")
        return reply.verdict, reply.version, torch.from_numpy(arrays["weights"])


class RayShards:
    """All shards of a parameter server, started with a learner's weights and moments."""

    def __init__(self, plan: Plan, sync: Serving, learner: Learner) -> None:
        self.limit = plan.learners.timeout_seconds
        self.layout = ShardLayout(learner, sync.shards)
        self.names = tuple(f"qfleet-shard-{secrets.token_hex(8)}" for _ in self.layout.cuts)
        plans = (msgspec.json.encode(plan), msgspec.json.encode(sync))
        parts = zip(self.layout.pieces(), self.layout.split(learner), strict=True)
        setups = [RayShardSetup(*plans, pieces, rows) for pieces, rows in parts]
        requests = messages.ShardRequest | PushGradient
        # Shards mostly wait, so that they need no CPU.
        options: dict[str, Any] = {"cpus": 0, "threads": plan.learners.num + EXTRA_THREADS}
        self.handles = [
            launch_on_ray("Shard", ShardWorker, setup, requests, messages.ShardCounts, name=name, **options)
            for name, setup in zip(self.names, setups, strict=True)
        ]

    def ask_all(self, message: Message) -> list[tuple[messages.ShardCounts, Arrays]]:
        """Send a request to every shard, and return all replies; the first waits for their processes and imports."""
        with shard_errors():
            await_ready(self.handles)
            for handle in self.handles:
                handle.ask(message)
            return [cast(Any, handle.reply(messages.ShardCounts, self.limit)) for handle in self.handles]

    def connect(self, rank: int) -> Sequence[ShardConnection]:
        """Connections of this process to all shards."""
        self.ask_all(messages.ConnectLearner(rank))
        sizes = [sum(pieces) for pieces in self.layout.pieces()]
        hosts = [find_shard(name) for name in self.names]
        return [RayPort(host, rank, num, self.limit) for host, num in zip(hosts, sizes, strict=True)]

    def connect_members(self, members: Sequence[WorkerHandle]) -> None:
        """Let the shards wait for these learners, which find them by name."""
        for rank, _ in enumerate(members, 1):
            self.ask_all(messages.ConnectLearner(rank))

    def release(self) -> None:
        """Reply to all learners that wait for a step."""
        self.ask_all(messages.ReleaseWaiting())

    def pull_into(self, learner: Learner) -> dict[str, Any]:
        """Pull weights and moments of all shards into a learner; versions and counts of staleness."""
        replies = self.ask_all(messages.ReadShard())
        self.layout.join([[arrays[str(at)] for at in range(len(arrays))] for _, arrays in replies], learner)
        return merge_counts([counts for counts, _ in replies])

    def close(self) -> None:
        """Kill all shards."""
        for handle in self.handles:
            handle.stop()


def find_shard(name: str) -> Any:
    """A shard by its name."""
    try:
        return ray.get_actor(name)
    except ValueError as error:
        raise CommLost(f"there is no shard {name}") from error
