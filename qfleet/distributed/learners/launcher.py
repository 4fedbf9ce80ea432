"""Launching learner workers and parameter-server shards: the Protocol, and processes of this machine."""

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from qfleet.build.custom_parts import NO_CUSTOM_PARTS, CustomParts, pack_parts
from qfleet.build.worlds import ROLES
from qfleet.data import Spec
from qfleet.data.array_messages import batch_arrays, batch_form, template_batch
from qfleet.data.wire_format import packed_bytes
from qfleet.distributed.learners.main import learner_main
from qfleet.distributed.learners.messages import FormGroup, LearnerReply, LearnerRequest, LearnShare
from qfleet.distributed.learners.worker import LearnerSetup, join_group
from qfleet.distributed.parameter_server.driver import ShardProcesses
from qfleet.distributed.replay.client import batch_size, window
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.distributed.worker.local import RingSizes, launch_local
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.plan.validate.placement import has_actor_learners
from qfleet.replay import Cut
from qfleet.sync.comm import Comm
from qfleet.sync.process_groups import make_rendezvous_store
from qfleet.sync.served import ShardConnection
from qfleet.sync.shared_memory_comm import SharedComm, region_bytes, slot_bytes_for
from qfleet.system.child_process import fork_server
from qfleet.system.shared_memory import SharedMemory
from qfleet.system.worker_process import WorkerOptions

ADDRESS = "127.0.0.1"
HEADER_BYTES = 4096
FILE_BYTES = 2**20  # of a slot for an actor-learner, whose state is sent as files
SLOTS = 2  # batches that a learner worker may have at a time
START_SECONDS = 60.0  # a learner worker is forked with everything imported, but may make environments
ROOM_SECONDS = 30.0  # for a file that is larger than the rings


class ShardGroup(Protocol):
    """All shards of a parameter server, as rank 0 uses them."""

    names: tuple[str, ...]  # by which members find the shards, if they are not sent their connections

    def connect(self, rank: int) -> Sequence[ShardConnection]:
        """Connections of this process to all shards."""

    def connect_members(self, members: Sequence[WorkerHandle]) -> None:
        """Connect these learners, ranks 1, 2, ..., to all shards."""

    def release(self) -> None:
        """Reply to all learners that wait for a step: none is coming for a while."""

    def pull_into(self, learner: Learner) -> dict[str, Any]:
        """Pull weights and moments of all shards into a learner; versions and counts of staleness."""

    def close(self) -> None:
        """Stop all shards."""


class LearnerLauncher(Protocol):
    """Starts learner workers and shards."""

    replaces: bool  # can a lost learner be restarted?

    def launch(self, number: int, incarnation: int) -> WorkerHandle:
        """Start a learner worker; incarnation 0 is the first one of this number."""

    def form_group(self, members: Sequence[WorkerHandle], request: FormGroup, learner: Learner) -> Comm:
        """Request these learners, ranks 1, 2, ..., to form a process group, and join it as rank 0."""

    def start_server(self, sync_plan: Serving, learner: Learner) -> ShardGroup:
        """Start a parameter server with a learner's weights and moments."""


def make_setup(
    plan: Plan, env_spec: Spec, spec: Spec, number: int, incarnation: int, custom_parts: CustomParts
) -> LearnerSetup:
    """The setup of a learner worker; environments are the user's own only where it acts."""
    used = custom_parts if has_actor_learners(plan) else replace(custom_parts, env=None, eval_env=None, explore=None)
    return LearnerSetup(msgspec.json.encode(plan), env_spec, spec, number, incarnation, pack_parts(used))


class LocalLearnerLauncher:
    """Starts processes on this machine, connected by shared memory, or by gloo or NCCL on loopback."""

    replaces = True

    def __init__(
        self, plan: Plan, env_spec: Spec, spec: Spec, cut: Cut, custom_parts: CustomParts = NO_CUSTOM_PARTS
    ) -> None:
        self.plan = plan
        self.env_spec = env_spec
        self.spec = spec
        self.custom_parts = custom_parts
        self.sizes = ring_sizes(plan, spec, cut)
        self.context = fork_server(ROLES)
        self.store = make_rendezvous_store(ADDRESS) if plan.learners.backend in ("gloo", "nccl") else None

    def launch(self, number: int, incarnation: int) -> WorkerHandle:
        """Start a learner worker's process."""
        return launch_local(
            self.context,
            f"learner-{number}",
            learner_main,
            make_setup(self.plan, self.env_spec, self.spec, number, incarnation, self.custom_parts),
            self.sizes,
            number=number,
            options=WorkerOptions(starts_processes=has_actor_learners(self.plan)),
            start_seconds=START_SECONDS,
            room_seconds=ROOM_SECONDS if has_actor_learners(self.plan) else 0.0,
        )

    def form_group(self, members: Sequence[WorkerHandle], request: FormGroup, learner: Learner) -> Comm:
        """Form the group with the plan's backend."""
        if self.store is not None:
            place = {"address": ADDRESS, "port": self.store.port}
            return form_gloo_group(self.plan, members, msgspec.structs.replace(request, **place))
        slot_bytes = slot_bytes_for(sum(weight.nbytes for weight in learner.parameters))
        return self.form_memory_group(members, msgspec.structs.replace(request, slot_bytes=slot_bytes))

    def form_memory_group(self, members: Sequence[WorkerHandle], request: FormGroup) -> Comm:
        """Form the group in shared memory, sent to each member with a socket to rank 0."""
        region = SharedMemory(region_bytes(request.size, request.slot_bytes))
        socks = list[socket.socket]()
        try:
            for rank, handle in enumerate(members, 1):
                handle.ask(msgspec.structs.replace(request, rank=rank))
                our_end, child_end = socket.socketpair()
                socks.append(our_end)
                with child_end:
                    handle.send_descriptors(region.fileno(), child_end.fileno())
        except BaseException:
            for sock in socks:  # members that wait at the other end notice at once
                sock.close()
            raise
        timeout = self.plan.learners.timeout_seconds
        return SharedComm(region, socks, 0, request.size, slot_bytes=request.slot_bytes, timeout_seconds=timeout)

    def start_server(self, sync_plan: Serving, learner: Learner) -> ShardGroup:
        """Start a process for each shard."""
        return ShardProcesses(self.context, self.plan, sync_plan, learner)


def ring_sizes(plan: Plan, spec: Spec, cut: Cut) -> RingSizes:
    """Rings for a batch and its priorities, or for pieces of an actor-learner's state."""
    if has_actor_learners(plan):
        return RingSizes(LearnerRequest, LearnerReply, FILE_BYTES, FILE_BYTES, SLOTS, SLOTS)
    items = batch_size(plan)
    batch = template_batch(spec, items, *window(cut))
    request_bytes = packed_bytes(LearnShare(0, 0.0, batch_form(batch), 0.0), batch_arrays(batch))
    return RingSizes(LearnerRequest, LearnerReply, request_bytes + HEADER_BYTES, 4 * items + HEADER_BYTES, SLOTS, SLOTS)


def form_gloo_group(
    plan: Plan, members: Sequence[WorkerHandle], request: FormGroup, own_address: str | None = None
) -> Comm:
    """Request these learners to meet at the store that the request names, and join as rank 0."""
    for rank, handle in enumerate(members, 1):
        handle.ask(msgspec.structs.replace(request, rank=rank))
    return join_group(plan, request, own_address)
