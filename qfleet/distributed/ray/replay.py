"""A replay in a Ray actor. The rows exist only there, so a checkpoint requests them."""

import msgspec

from qfleet.build.custom_parts import CustomParts, pack_parts
from qfleet.build.memory_check import require_replay, sample_replay
from qfleet.data import Spec
from qfleet.distributed.actors.launcher import COMPRESSED_COLUMNS
from qfleet.distributed.ray.worker import START_SECONDS, launch_on_ray
from qfleet.distributed.replay.client import RemoteReplay, RemoteRows, batch_bytes, buffer_of
from qfleet.distributed.replay.connection import ReplayConnection
from qfleet.distributed.replay.messages import ReplayReply, ReplayRequest
from qfleet.distributed.replay.server import ReplayServer, ReplaySetup, make_server
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.plan.schema import Plan, RayRuntime
from qfleet.replay import CustomSampler, ring_rows

COMPRESSED_ARRAYS = (*COMPRESSED_COLUMNS, "next_obs")


def make_replay_worker(setup: ReplaySetup) -> ReplayServer:
    """An empty replay, if this node has the memory for it when it is full."""
    require_replay(msgspec.json.decode(setup.plan, type=Plan), setup.spec)
    return make_server(setup)


def make_ray_replay(plan: Plan, spec: Spec, runtime: RayRuntime, sampler: CustomSampler | None = None) -> RemoteReplay:
    """A replay on Ray, not started yet. Nothing of its size is allocated here: it may exceed this node's memory."""
    template = sample_replay(plan, spec)
    lanes = plan.env.num
    seconds = runtime.hung_seconds
    custom_parts = pack_parts(CustomParts(sampler=sampler))

    def launch(history: str | None) -> WorkerHandle:
        return launch_on_ray(
            "Replay",
            make_replay_worker,
            ReplaySetup(msgspec.json.encode(plan), spec, history, custom_parts),
            ReplayRequest,
            ReplayReply,
            cpus=runtime.replay_cpus,
            start_seconds=max(seconds, START_SECONDS),
            room_seconds=seconds,
            compress=COMPRESSED_ARRAYS if runtime.compress else (),
        )

    connection = ReplayConnection(launch, spec, batch_bytes(plan, spec, template.cut), seconds)
    rows = ring_rows(buffer_of(plan).capacity, spec, lanes, template.cut.window)
    store = RemoteRows(connection, template.store, lanes, rows)
    return RemoteReplay(plan, connection, template, store, runtime.restarts)
