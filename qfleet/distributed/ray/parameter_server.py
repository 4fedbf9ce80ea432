"""Parameter-server shards on Ray: each in an actor on a node with free resources, reached by calls.

A push is a call that returns when the shard's rule allows; gradients and weights travel as flat, checked messages.
"""

import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from qfleet.data import Array
from qfleet.data.wire_format import Facts, to_bytes, unpack
from qfleet.distributed.learners.handle import LearnerHandle
from qfleet.distributed.parameter_server.driver import ShardLayout, merge_counts
from qfleet.distributed.parameter_server.shard import VERDICTS, WeightBlock, read_row
from qfleet.distributed.ray.rpc import TABLE_BYTES
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.sync.comm import CommLost
from qfleet.sync.gradient_rule import Push, Verdict
from qfleet.sync.make import make_codec
from qfleet.sync.packed import PackedGradient, pack_push, unpack_push
from qfleet.sync.served import ShardConnection

START_SECONDS = 120.0
WINDOW_POLL_SECONDS = 0.005
MAX_MESSAGE_BYTES = 1 << 32


def comm_lost(error: Exception) -> CommLost:
    """An error of Ray as a lost connection."""
    return CommLost("its process on Ray is lost: " + " ".join(str(error).split())[:200])


class ShardHost:
    """A shard in a Ray actor; every learner's call has a thread of its own."""

    def __init__(self, plan: bytes, sync: bytes, pieces: list[int], state: bytes) -> None:
        torch.set_num_threads(1)
        decode = msgspec.json.decode
        sync_plan = decode(sync, type=Serving)
        self.block = WeightBlock(decode(plan, type=Plan), sync_plan, pieces)
        self.codec = make_codec(sync_plan.codec, [], 0, 0)
        self.block.load(unpack_rows(state))
        self.replied = threading.Condition()
        if self.block.shard.window_seconds < float("inf"):
            threading.Thread(target=self.close_windows, daemon=True).start()

    def close_windows(self) -> None:
        """Make the step of a window of gradients when its time is over."""
        while True:
            time.sleep(WINDOW_POLL_SECONDS)
            with self.replied:
                self.block.poll()

    def enlist(self, learners: int) -> int:
        """Add learners that will push; the number of all of them."""
        with self.replied:
            for _ in range(learners):
                self.block.shard.add_worker()
            return self.block.shard.workers

    def push(
        self, rank: int, sequence: int, version: int, rate: float, message: bytes, timeout_seconds: float
    ) -> bytes:
        """Push a gradient; the reply is the verdict, the version and the newest weights, empty after the timeout."""
        shard = self.block.shard
        gradient = unpack_push(message, self.codec, len(shard.weights), MAX_MESSAGE_BYTES)
        replies = list[bytes]()

        def reply(verdict: Verdict) -> None:
            facts: Facts = {"verdict": VERDICTS.index(verdict), "version": shard.version}
            replies.append(to_bytes(facts, {"0": shard.weights.numpy()}))
            self.replied.notify_all()

        limit = min(timeout_seconds, self.block.max_wait_seconds) if rank else timeout_seconds
        with self.replied:
            self.block.push(Push((rank, 0, sequence), version, gradient), rate, reply)
            if not self.replied.wait_for(lambda: replies, limit):
                if limit < timeout_seconds and not shard.has_waiting(0):
                    self.block.release_one(rank)  # it waits for rank 0 only
                elif not self.replied.wait_for(lambda: replies, timeout_seconds - limit):
                    return b""
            return replies[0]

    def release(self) -> None:
        """Reply to all learners that wait for a step, without making it."""
        with self.replied:
            self.block.release()

    def state(self) -> tuple[bytes, bytes]:
        """Weights and moments as rows, and the shard's version and counts."""
        with self.replied:
            self.block.shard.flush()
            rows = [np.zeros(sum(self.block.pieces), np.float32) for _ in self.block.state_tensors]
            for tensors, row in zip(self.block.state_tensors, rows, strict=True):
                read_row(tensors, row)
            return pack_rows(rows), msgspec.json.encode(self.block.counts())


def pack_rows(rows: Sequence[Array]) -> bytes:
    """Rows as one message."""
    return to_bytes({"rows": len(rows)}, {str(at): np.ascontiguousarray(row) for at, row in enumerate(rows)})


def unpack_rows(message: bytes) -> list[Array]:
    """The rows of a message."""
    facts, arrays = unpack(message, limit_bytes=MAX_MESSAGE_BYTES)
    return [arrays[str(at)] for at in range(int(facts["rows"]))]  # type: ignore[arg-type]


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
        message = pack_push(gradient, packed)
        self.sent_bytes += len(message)
        self.call = self.shard.push.remote(self.rank, sequence, version, rate, message, self.timeout_seconds)

    def reply(self) -> tuple[Verdict, int, Tensor]:
        """Wait for the verdict on the last push, the shard's version and its weights."""
        try:
            message = ray.get(self.call, timeout=self.timeout_seconds)
        except (RayError, GetTimeoutError) as error:
            raise comm_lost(error) from error
        if not message:
            raise CommLost("other learners did not push to a parameter-server shard in time")
        facts, arrays = unpack(message, limit_bytes=4 * self.num + TABLE_BYTES)
        return VERDICTS[int(facts["verdict"])], int(facts["version"]), torch.from_numpy(arrays["0"])  # type: ignore[arg-type]


class RayShards:
    """All shards of a parameter server, started with a learner's weights and moments."""

    def __init__(self, plan: Plan, sync: Serving, learner: Learner) -> None:
        self.limit = plan.learners.timeout_seconds
        self.layout = ShardLayout(learner, sync.shards)
        plans = (msgspec.json.encode(plan), msgspec.json.encode(sync))
        names = [f"qfleet-shard-{secrets.token_hex(8)}" for _ in self.layout.cuts]
        self.facts: Facts = {"shards": list(names)}
        # Shards mostly wait, so that they need no CPU; a thread for each learner that waits, and some for the driver.
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        options |= {"max_concurrency": plan.learners.num + 64}
        host = ray.remote(ShardHost)
        self.shards = [
            host.options(**options, name=name).remote(*plans, pieces, pack_rows(rows))
            for name, pieces, rows in zip(names, self.layout.pieces(), self.layout.split(learner), strict=True)
        ]

    def call_all(self, method: str, *arguments: Any, limit: float | None = None) -> list[Any]:
        """Call a method of every shard, and return all results."""
        try:
            calls = [getattr(shard, method).remote(*arguments) for shard in self.shards]
            return list(ray.get(calls, timeout=limit or self.limit))
        except (RayError, GetTimeoutError) as error:
            raise comm_lost(error) from error

    def connect(self, rank: int) -> Sequence[ShardConnection]:
        """Connections of this process to all shards."""
        self.call_all("enlist", 1, limit=START_SECONDS)  # the first call, which waits for their processes and imports
        sizes = [sum(pieces) for pieces in self.layout.pieces()]
        return [RayPort(shard, rank, num, self.limit) for shard, num in zip(self.shards, sizes, strict=True)]

    def connect_members(self, members: Sequence[LearnerHandle]) -> None:
        """Let the shards wait for these learners, which find them by name."""
        self.call_all("enlist", len(members))

    def release(self) -> None:
        """Reply to all learners that wait for a step."""
        self.call_all("release")

    def pull_into(self, learner: Learner) -> dict[str, Any]:
        """Pull weights and moments of all shards into a learner; versions and counts of staleness."""
        states = self.call_all("state")
        self.layout.join([unpack_rows(message) for message, _ in states], learner)
        return merge_counts([msgspec.json.decode(counts) for _, counts in states])

    def close(self) -> None:
        """Kill all shards."""
        for shard in self.shards:
            ray.kill(shard, no_restart=True)


def find_shard(name: str) -> Any:
    """A shard by its name."""
    try:
        return ray.get_actor(name)
    except ValueError as error:
        raise CommLost(f"there is no shard {name}") from error
