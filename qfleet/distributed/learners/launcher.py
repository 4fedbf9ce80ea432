"""Where partners and shards live, and how they are reached: here, in processes of this machine."""

import socket
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from typing import Any, Protocol, TypeAlias

import msgspec
from torch import nn

from qfleet.act import Explore
from qfleet.build.components import ROLES, EnvMaker
from qfleet.data import Spec
from qfleet.data.array_messages import batch_parts, blank_batch
from qfleet.data.wire_format import Facts, packed_bytes
from qfleet.distributed.actors.process import require_sendable
from qfleet.distributed.learners.actor_learner import PIECE_BYTES
from qfleet.distributed.learners.handle import LearnerHandle
from qfleet.distributed.learners.main import LearnerProcessSetup, RingTransport, learn_beside
from qfleet.distributed.learners.worker import LearnerSetup, join_group
from qfleet.distributed.parameter_server.driver import ShardProcesses
from qfleet.distributed.replay.client import batch_size, window
from qfleet.envs.workers.process import ending
from qfleet.learn import Learner
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Serving
from qfleet.plan.validate.placement import has_bundles
from qfleet.replay import Cut
from qfleet.sync.comm import Comm, CommLost
from qfleet.sync.process_groups import make_store
from qfleet.sync.served import ShardConnection
from qfleet.sync.shared_memory_comm import SharedComm, region_bytes, slot_bytes_for
from qfleet.system.child_process import fork_server, hidden_main
from qfleet.system.ring import Ring
from qfleet.system.shared_memory import SharedMemory

ADDRESS = "127.0.0.1"
# SLOTS: batches that a partner may have at a time
ANSWER_BYTES = 4096
SLOTS = 2
END_SECONDS = 0.5
START_SECONDS = 60.0  # that a partner may take to start: it is forked with everything imported, but may build worlds


# The user's own environment maker, torso and exploration.
Own: TypeAlias = tuple[EnvMaker | None, nn.Module | None, Explore | None]
NOTHING_OWN: Own = (None, None, None)


class ShardGroup(Protocol):
    """A parameter server, as rank 0 sees it."""

    facts: Facts  # what an order to join says of it

    def seat(self, rank: int) -> Sequence[ShardConnection]:
        """Our own ways to all shards."""
        ...

    def invite(self, group: Sequence[LearnerHandle]) -> None:
        """Let these, in the order of ranks from 1 on, have theirs."""
        ...

    def release(self) -> None:
        """No step is coming for a while: whoever waits for one goes on without."""
        ...

    def gather(self, learner: Learner) -> dict[str, Any]:
        """Write what the shards have into a learner; how far they are, and how stale gradients were."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class LearnerLauncher(Protocol):
    """Where partners and shards live."""

    replaces: bool  # can another one come for one that is lost?

    def hire(self, number: int, incarnation: int) -> LearnerHandle:
        """Start a partner, in place of as many before it."""
        ...

    def meet(self, group: Sequence[LearnerHandle], facts: Facts, learner: Learner) -> Comm:
        """Order these, in the order of ranks from 1 on, to form a group, and join it as rank 0."""
        ...

    def serve(self, agreement: Serving, learner: Learner) -> ShardGroup:
        """Start a parameter server that begins with what a learner has."""
        ...


def orders_for(plan: Plan, shown: Spec, spec: Spec, number: int, incarnation: int, own: Own) -> LearnerSetup:
    """What a partner is told; of what is the user's own, only what it has a use for."""
    make, torso, explore = own
    beside = {"incarnation": incarnation, "make": make, "explore": explore} if has_bundles(plan) else {}
    return LearnerSetup(msgspec.json.encode(plan), shown, spec, number, torso, **beside)  # type: ignore[arg-type]


class LearnerProcess:
    """A partner's process."""

    def __init__(self, process: BaseProcess, post: LearnerProcessSetup, bell: Any) -> None:
        self.process = process
        self.post = post
        self.bell = bell

    def is_alive(self) -> bool:
        """Is it there?"""
        return self.process.is_alive()

    def how_ended(self) -> str:
        """How its process ended, in words."""
        return f"its process {ending(self.process)}"

    def hand(self, *handles: int) -> None:
        """Hand descriptors over."""
        try:
            for handle in handles:
                send_handle(self.bell, handle, self.process.pid)
        except OSError as error:
            raise CommLost(str(error)) from error

    def end(self) -> None:
        """Kill it, and let go of what connected us."""
        self.process.kill()
        self.process.join(END_SECONDS)
        self.bell.close()
        self.post.into.close()
        self.post.out.close()


class LocalLearnerLauncher:
    """Processes of this machine, which share memory with this one or meet at a store on loopback."""

    replaces = True

    def __init__(self, plan: Plan, shown: Spec, spec: Spec, cut: Cut, own: Own = NOTHING_OWN) -> None:
        self.plan = plan
        self.shown = shown
        self.spec = spec
        self.own = own
        self.order_bytes, self.word_bytes = parcel_bytes(plan, spec, cut)
        self.needs_main = b"__main__" in require_sendable(own if has_bundles(plan) else (None, own[1], None))
        self.context: ForkServerContext = fork_server(ROLES)
        self.store = make_store(ADDRESS) if plan.learners.backend in ("gloo", "nccl") else None
        self.lives: dict[int, LearnerProcess] = {}  # the newest of each number

    def hire(self, number: int, incarnation: int) -> LearnerHandle:
        """Start a partner's process."""
        bell, theirs = self.context.Pipe()
        into = Ring(SLOTS, self.order_bytes)
        out = Ring(SLOTS, self.word_bytes)
        orders = orders_for(self.plan, self.shown, self.spec, number, incarnation, self.own)
        post = LearnerProcessSetup(orders, into, out, theirs)
        process = self.context.Process(target=learn_beside, args=(post,), name=f"qfleet-learner-{number}", daemon=True)
        with hidden_main(not self.needs_main):
            process.start()
        theirs.close()
        self.lives[number] = LearnerProcess(process, post, bell)
        return LearnerHandle(
            number, RingTransport(into, out, bell), self.lives[number], time.monotonic(), START_SECONDS
        )

    def hand(self, mate: LearnerHandle, *handles: int) -> None:
        """Hand descriptors to a partner."""
        self.lives[mate.number].hand(*handles)

    def meet(self, group: Sequence[LearnerHandle], facts: Facts, learner: Learner) -> Comm:
        """By the plan's backend."""
        if self.store is None:
            return self.by_memory(group, facts, slot_bytes_for(sum(weight.nbytes for weight in learner.parameters)))
        return by_sockets(self.plan, group, {**facts, "address": ADDRESS, "port": self.store.port})

    def by_memory(self, group: Sequence[LearnerHandle], facts: Facts, slot: int) -> Comm:
        """Meet in shared memory, handed to everybody with a line to us."""
        size = 1 + len(group)
        limit = self.plan.learners.timeout_seconds
        region = SharedMemory(region_bytes(size, slot))
        lines = list[socket.socket]()
        try:
            for rank, mate in enumerate(group, 1):
                mate.order({**facts, "rank": rank, "port": 0, "slot_bytes": slot})
                mine, theirs = socket.socketpair()
                lines.append(mine)
                with theirs:
                    self.hand(mate, region.fileno(), theirs.fileno())
        except BaseException:
            for line in lines:  # who waits at the other end finds out at once
                line.close()
            raise
        return SharedComm(region, lines, 0, size, slot_bytes=slot, limit_seconds=limit)

    def serve(self, agreement: Serving, learner: Learner) -> ShardGroup:
        """A process for each shard."""
        return ShardProcesses(self.context, self.plan, agreement, learner, self.hand)


def parcel_bytes(plan: Plan, spec: Spec, cut: Cut) -> tuple[int, int]:
    """The most that an order and its word need: a batch and its priorities, or pieces of a bundle's memory."""
    if has_bundles(plan):
        return PIECE_BYTES + ANSWER_BYTES, PIECE_BYTES + ANSWER_BYTES
    items = batch_size(plan)
    batch = packed_bytes(*batch_parts(blank_batch(spec, items, *window(cut))))
    return batch + ANSWER_BYTES, 4 * items + ANSWER_BYTES


def by_sockets(plan: Plan, group: Sequence[LearnerHandle], facts: Facts, own: str | None = None) -> Comm:
    """Order these to meet at the store that the facts name, and join as rank 0."""
    for rank, mate in enumerate(group, 1):
        mate.order({**facts, "rank": rank})
    return join_group(plan, {**facts, "rank": 0}, own)
