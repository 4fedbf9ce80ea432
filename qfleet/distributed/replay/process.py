"""A replay in a process of this machine: messages in two rings, and rows in shared memory.

A checkpoint reads the rows here, between two messages.
"""

from multiprocessing.context import ForkServerContext

import msgspec
import numpy as np

from qfleet.build.custom_parts import CustomParts, pack_parts
from qfleet.data import Spec
from qfleet.data.array_messages import rollout_bytes
from qfleet.data.wire_format import Arrays, packed_bytes
from qfleet.distributed.replay.client import RemoteReplay, batch_bytes, batch_size
from qfleet.distributed.replay.connection import ReplayConnection
from qfleet.distributed.replay.messages import ReplayReply, ReplayRequest, SetPriorities
from qfleet.distributed.replay.server import ReplaySetup, replay_main, shared_store, store_region
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.distributed.worker.local import RingSizes, launch_local
from qfleet.plan.schema import Plan, ProcessesRuntime
from qfleet.replay import CustomSampler, make_replay

START_SECONDS = 30.0  # it imports and compiles before its first reply
MESSAGE_SLOTS = 8
BATCH_SLOTS = 4
PIECE_BYTES = 1 << 18  # of a state, at least: it would take long in smaller pieces


def make_shared_replay(
    plan: Plan,
    spec: Spec,
    context: ForkServerContext,
    runtime: ProcessesRuntime,
    sampler: CustomSampler | None = None,
) -> RemoteReplay:
    """A replay with its rows in shared memory; its process is not started yet."""
    region = store_region(plan, spec)
    # For its rows and rules; its queue stays empty.
    template = shared_store(make_replay(plan, spec, plan.env.num, np.random.default_rng(0)), region)
    batch_limit = batch_bytes(plan, spec, template.cut)
    request_bytes = max(message_bytes(plan, spec), PIECE_BYTES)
    reply_bytes = max(batch_limit, PIECE_BYTES)
    slots = (MESSAGE_SLOTS, BATCH_SLOTS)
    rings = RingSizes(ReplayRequest, ReplayReply, request_bytes, reply_bytes, *slots, announced=False)
    seconds = runtime.hung_seconds
    custom_parts = pack_parts(CustomParts(sampler=sampler))

    def launch(history: str | None) -> WorkerHandle:
        setup = ReplaySetup(msgspec.json.encode(plan), spec, history, custom_parts, region)
        start_seconds = max(seconds, START_SECONDS)
        return launch_local(
            context, "replay", replay_main, setup, rings, start_seconds=start_seconds, room_seconds=seconds
        )

    connection = ReplayConnection(launch, spec, batch_limit, seconds, region)
    return RemoteReplay(plan, connection, template, template.store, runtime.restarts)


def message_bytes(plan: Plan, spec: Spec) -> int:
    """The largest size of a frequent message: a rollout with raw rewards beside it, or the priorities of a batch."""
    rows = int(getattr(plan.runtime, "chunk_rows", 1))
    size = batch_size(plan)
    rollout = rollout_bytes(spec, plan.env.num, rows) + 4 * rows * plan.env.num + 4096
    priorities: Arrays = {"ids": np.zeros(size, np.int64), "priority": np.zeros(size, np.float32)}
    return max(rollout, packed_bytes(SetPriorities(), priorities))
