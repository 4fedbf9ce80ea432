"""Launching learner workers and parameter-server shards: the Protocol, and processes of this machine."""

import socket
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import send_handle
from typing import Any, Protocol

import msgspec

from qfleet.build.make import NO_USER_PARTS, UserParts
from qfleet.build.worlds import ROLES
from qfleet.data import Spec
from qfleet.data.array_messages import batch_parts, template_batch
from qfleet.data.wire_format import Facts, packed_bytes
from qfleet.distributed.actors.process import require_sendable
from qfleet.distributed.learners.actor_learner import PIECE_BYTES
from qfleet.distributed.learners.handle import LearnerHandle
from qfleet.distributed.learners.main import LearnerProcessSetup, RingTransport, learner_main
from qfleet.distributed.learners.worker import LearnerSetup, join_group
from qfleet.distributed.parameter_server.driver import ShardProcesses
from qfleet.distributed.replay.client import batch_size, window
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.plan.validate.placement import has_actor_learners
from qfleet.replay import Cut
from qfleet.sync.comm import Comm, CommLost
from qfleet.sync.process_groups import make_rendezvous_store
from qfleet.sync.served import ShardConnection
from qfleet.sync.shared_memory_comm import SharedComm, region_bytes, slot_bytes_for
from qfleet.system.child_process import fork_server
from qfleet.system.ring import Ring
from qfleet.system.shared_memory import SharedMemory
from qfleet.system.worker_process import WorkerOptions, WorkerProcess

ADDRESS = "127.0.0.1"
HEADER_BYTES = 4096
SLOTS = 2  # batches that a learner worker may have at a time
EXIT_SECONDS = 0.3
START_SECONDS = 60.0  # a learner worker is forked with everything imported, but may make environments


class ShardGroup(Protocol):
    """All shards of a parameter server, as rank 0 uses them."""

    facts: Facts  # of a `form` request, by which members find the shards

    def connect(self, rank: int) -> Sequence[ShardConnection]:
        """Connections of this process to all shards."""

    def connect_members(self, members: Sequence[LearnerHandle]) -> None:
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

    def launch(self, number: int, incarnation: int) -> LearnerHandle:
        """Start a learner worker; incarnation 0 is the first one of this number."""

    def form_group(self, members: Sequence[LearnerHandle], facts: Facts, learner: Learner) -> Comm:
        """Request these learners, ranks 1, 2, ..., to form a process group, and join it as rank 0."""

    def start_server(self, sync_plan: Serving, learner: Learner) -> ShardGroup:
        """Start a parameter server with a learner's weights and moments."""


def make_setup(
    plan: Plan, env_spec: Spec, spec: Spec, number: int, incarnation: int, user_parts: UserParts
) -> LearnerSetup:
    """The setup of a learner worker; of the user's own parts only those that it uses."""
    used = user_parts if has_actor_learners(plan) else (None, user_parts[1], None)
    return LearnerSetup(msgspec.json.encode(plan), env_spec, spec, number, incarnation, used)


class LearnerProcess:
    """A learner worker's process on this machine."""

    def __init__(self, process: WorkerProcess, setup: LearnerProcessSetup, bell: Any) -> None:
        self.process = process
        self.setup = setup
        self.bell = bell

    def is_alive(self) -> bool:
        """Is it running?"""
        return self.process.is_alive()

    def exit_reason(self) -> str:
        """How the process ended; empty if it runs. Its sockets close a moment before it ends."""
        self.process.process.join(EXIT_SECONDS)
        return "" if self.process.is_alive() else self.process.how_ended()

    def send_fds(self, *fds: int) -> None:
        """Send file descriptors to the process."""
        try:
            for fd in fds:
                send_handle(self.bell, fd, self.process.pid)
        except OSError as error:
            raise CommLost(str(error)) from error

    def stop(self) -> None:
        """Kill it, and close the connection."""
        self.process.stop()
        self.process.close()
        self.bell.close()
        self.setup.into.close()
        self.setup.out.close()


class LocalLearnerLauncher:
    """Starts processes on this machine, connected by shared memory, or by gloo or NCCL on loopback."""

    replaces = True

    def __init__(self, plan: Plan, env_spec: Spec, spec: Spec, cut: Cut, user_parts: UserParts = NO_USER_PARTS) -> None:
        self.plan = plan
        self.env_spec = env_spec
        self.spec = spec
        self.user_parts = user_parts
        self.request_bytes, self.reply_bytes = message_bytes(plan, spec, cut)
        self.needs_main = b"__main__" in require_sendable(
            user_parts if has_actor_learners(plan) else (None, user_parts[1], None)
        )
        self.context: ForkServerContext = fork_server(ROLES)
        self.store = make_rendezvous_store(ADDRESS) if plan.learners.backend in ("gloo", "nccl") else None
        self.processes: dict[int, LearnerProcess] = {}  # the newest of each number

    def launch(self, number: int, incarnation: int) -> LearnerHandle:
        """Start a learner worker's process."""
        bell, child_end = self.context.Pipe()
        into = Ring(SLOTS, self.request_bytes)
        out = Ring(SLOTS, self.reply_bytes)
        learner_setup = make_setup(self.plan, self.env_spec, self.spec, number, incarnation, self.user_parts)
        setup = LearnerProcessSetup(learner_setup, into, out, child_end)
        options = WorkerOptions(starts_processes=has_actor_learners(self.plan))
        name = f"learner-{number}"
        process = WorkerProcess(self.context, name, learner_main, setup, options, needs_main=self.needs_main)
        process.start()
        child_end.close()
        self.processes[number] = LearnerProcess(process, setup, bell)
        return LearnerHandle(
            number, RingTransport(into, out, bell), self.processes[number], time.monotonic(), START_SECONDS
        )

    def send_fds(self, handle: LearnerHandle, *fds: int) -> None:
        """Send file descriptors to a learner worker."""
        try:
            self.processes[handle.number].send_fds(*fds)
        except CommLost as cause:
            raise handle.connection_lost(cause) from cause

    def form_group(self, members: Sequence[LearnerHandle], facts: Facts, learner: Learner) -> Comm:
        """Form the group with the plan's backend."""
        if self.store is None:
            return self.form_memory_group(
                members, facts, slot_bytes_for(sum(weight.nbytes for weight in learner.parameters))
            )
        return form_gloo_group(self.plan, members, {**facts, "address": ADDRESS, "port": self.store.port})

    def form_memory_group(self, members: Sequence[LearnerHandle], facts: Facts, slot_bytes: int) -> Comm:
        """Form the group in shared memory, sent to each member with a socket to rank 0."""
        size = 1 + len(members)
        limit = self.plan.learners.timeout_seconds
        region = SharedMemory(region_bytes(size, slot_bytes))
        socks = list[socket.socket]()
        try:
            for rank, handle in enumerate(members, 1):
                handle.send_request({**facts, "rank": rank, "port": 0, "slot_bytes": slot_bytes})
                our_end, child_end = socket.socketpair()
                socks.append(our_end)
                with child_end:
                    self.send_fds(handle, region.fileno(), child_end.fileno())
        except BaseException:
            for sock in socks:  # members that wait at the other end notice at once
                sock.close()
            raise
        return SharedComm(region, socks, 0, size, slot_bytes=slot_bytes, timeout_seconds=limit)

    def start_server(self, sync_plan: Serving, learner: Learner) -> ShardGroup:
        """Start a process for each shard."""
        return ShardProcesses(self.context, self.plan, sync_plan, learner, self.send_fds)


def message_bytes(plan: Plan, spec: Spec, cut: Cut) -> tuple[int, int]:
    """The largest request and reply: a batch and its priorities, or pieces of an actor-learner's state."""
    if has_actor_learners(plan):
        return PIECE_BYTES + HEADER_BYTES, PIECE_BYTES + HEADER_BYTES
    items = batch_size(plan)
    batch = packed_bytes(*batch_parts(template_batch(spec, items, *window(cut))))
    return batch + HEADER_BYTES, 4 * items + HEADER_BYTES


def form_gloo_group(plan: Plan, members: Sequence[LearnerHandle], facts: Facts, own_address: str | None = None) -> Comm:
    """Request these learners to meet at the store that the facts name, and join as rank 0."""
    for rank, handle in enumerate(members, 1):
        handle.send_request({**facts, "rank": rank})
    return join_group(plan, {**facts, "rank": 0}, own_address)
