"""The process group of the driver's learner (rank 0) and all ready learners: how it forms, steps and ends."""

import time
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec
from torch import Tensor

from qfleet.audit.history import HistoryLog, NoHistory
from qfleet.data import Array, Batch, Sequences
from qfleet.distributed.learners.batch_scatter import BatchScatter, SplitScatter, make_scatter
from qfleet.distributed.learners.env_reports import EnvReports
from qfleet.distributed.learners.epoch_scatter import EpochScatter, PositionSource
from qfleet.distributed.learners.launcher import LearnerLauncher, ShardGroup
from qfleet.distributed.learners.messages import FormGroup, GroupJoined
from qfleet.distributed.learners.pool import LearnerPool
from qfleet.distributed.learners.shares import KnownPriorities
from qfleet.distributed.learners.traffic import CountsBytes
from qfleet.distributed.learners.worker import broadcast_state, make_server_client, make_strategy, state_hash
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.learn import Learner
from qfleet.learn.parameters_hash import parameters_hash
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import AllreduceSync, Codec, Coded, NoCodec, ServerSync, Serving, sends_steps
from qfleet.plan.sync_schema import Sync as SyncPlan
from qfleet.sync.comm import Comm, CommLost, NoComm
from qfleet.sync.served import ServerClient
from qfleet.sync.strategies import Sync
from qfleet.system.worker_errors import WorkerLost


class ProcessGroup:
    """Rank 0's end of the current group; a new one is formed whenever members come or go, or the strategy changes."""

    def __init__(
        self,
        plan: Plan,
        learner: Learner,
        launcher: LearnerLauncher,
        env_reports: EnvReports,
        positions: PositionSource | None = None,
    ) -> None:
        self.plan = plan
        self.positions = positions  # of a data set
        self.learner = learner
        self.launcher = launcher
        self.env_reports = env_reports
        self.pool = LearnerPool(plan, launcher, env_reports, self.remove)
        self.history: HistoryLog = NoHistory()
        self.number = 0  # of the current group, counted from 1
        self.members: list[WorkerHandle] = []  # ranks 1, 2, ...
        self.pending_ids: dict[WorkerHandle, deque[Array]] = {}  # of items in each share not reported on, by member
        self.comm: Comm = NoComm()
        self.sync: Sync | None = None
        self.server: ShardGroup | None = None
        self.sync_plan = plan.sync
        self.next_sync_plan = plan.sync  # of the next group
        self.rejected_codecs: set[Codec] = set()
        self.must_reform = True  # before the next update, even if the members are the same
        self.synced_updates = 0  # the learner's count after the last update of the group
        self.requested_at = 0.0  # when the members were last asked to form or to learn
        self.step_norms: list[float] = []  # the gradient's norm, once rank 0's own step of this update was made
        self.push_pending = False  # has rank 0 pushed a gradient that no shard has replied to?
        self.late_priorities: list[KnownPriorities] = []  # that came after their batch
        self.scatter: BatchScatter = SplitScatter(1, self.late_priorities, balance=False)

    @property
    def synchronous(self) -> bool:
        """Do all ranks make the same update at the same time?"""
        return is_synchronous(self.sync_plan)

    def connections(self) -> list[CountsBytes]:
        """All connections of rank 0 to other learners and to shards."""
        return [self.comm, *(self.sync.connections if isinstance(self.sync, ServerClient) else ())]

    # Forming

    def ensure(self) -> None:
        """Form a new group if learners joined or left, or rank 0's weights were replaced."""
        self.pool.check()
        ready = self.pool.ready()
        if ready and (self.must_reform or ready != self.members or self.synced_updates != self.learner.updates):
            self.form(ready)

    def form(self, members: list[WorkerHandle]) -> None:
        """Form a group of rank 0 and these learners, which all start with rank 0's state."""
        self.disband()
        self.pool.drain(members)
        if any(self.pool.handles.get(handle.number) is not handle for handle in members):
            raise CommLost("a learner was lost before the group was formed")
        self.number += 1
        size = 1 + len(members)
        self.members = members
        self.pending_ids = {handle: deque() for handle in members}
        self.sync_plan = self.next_sync_plan
        self.scatter = self.make_scatter(size)
        self.record_formed()
        if isinstance(self.sync_plan, Serving):
            self.server = self.launcher.start_server(self.sync_plan, self.learner)
        self.requested_at = time.monotonic()
        self.comm = self.launcher.form_group(members, self.form_request(size), self.learner)
        broadcast_state(self.learner, self.comm)
        self.sync = self.open_strategy()
        parameters = self.require_equal_states()
        self.synced_updates = self.learner.updates
        self.must_reform = False
        self.requested_at = time.monotonic()
        more = {"updates": self.learner.updates, "parameters": parameters}
        self.pool.log_event("group_formed", number=self.number, learners=size, sync=type_name(self.sync_plan), **more)

    def make_scatter(self, size: int) -> BatchScatter:
        """The scatter of a group of this size."""
        if self.positions is not None:
            balance = self.plan.learners.balance
            return EpochScatter(size, self.positions, self.late_priorities, balance=balance)
        return make_scatter(self.plan, size, self.late_priorities, self.env_reports)

    def whole_batch(self, batch: Batch | Sequences) -> Batch | Sequences:
        """The batch for rank 0 alone: of a data set it says only which transitions are next."""
        return batch if self.positions is None else self.positions.batch_at(batch.ids)

    def form_request(self, size: int) -> FormGroup:
        """The request to form the group, as far as it is the same for all ranks."""
        updates = self.learner.updates
        names = self.server.names if self.server else ()
        return FormGroup(self.number, size, self.sync_plan, updates, self.env_reports.total_steps(), shards=names)

    def open_strategy(self) -> Sync:
        """Rank 0's end of the strategy; all members are connected to a parameter server, if there is one."""
        if self.server is None or not isinstance(self.sync_plan, Serving):
            return make_strategy(
                self.sync_plan, self.plan.seed, self.learner, self.comm, self.local_step, self.on_strategy_event
            )
        ports = self.server.connect(0)
        self.server.connect_members(self.members)
        return make_server_client(self.sync_plan, self.plan.seed, self.learner, ports, 0, self.on_strategy_event)

    def require_equal_states(self) -> list[str]:
        """Raise unless all members start with the same weights, target network and moments; hashes of the weights."""
        own = state_hash(self.learner)
        parameters = [parameters_hash(self.learner.online_tensors)]
        for rank, handle in enumerate(self.members, 1):
            reply, _ = handle.reply(GroupJoined, self.pool.reply_timeout_seconds)
            if reply.state_hash != own:
                raise RuntimeError(f"learner {handle.number} did not begin with the same weights")
            self.scatter.on_joined(rank, reply.report)
            parameters.append(reply.parameters)
        return parameters

    def record_formed(self) -> None:
        """Write the new group into the history."""
        learners = [handle.number for handle in self.members]
        exact = not (isinstance(self.sync_plan, ServerSync) and self.sync_plan.spare)
        fields = {"updates": self.learner.updates, "in_step": self.synchronous, "exact": exact}
        self.history.note("team", "formed", group=self.number, learners=learners, **fields)

    # Steps

    def sync_step(self, gradients: list[Tensor]) -> float:
        """Step by the strategy; if the group fails after rank 0's own step was made, that step counts."""
        self.step_norms.clear()
        if self.sync is None:
            raise CommLost("there is no group")
        self.push_pending = self.server is not None
        try:
            norm = self.sync.step(gradients)
        except WorkerLost as cause:
            if not self.step_norms:
                raise
            self.fail(cause)
            return self.step_norms[0]
        self.push_pending = False
        return norm

    def local_step(self, gradients: list[Tensor]) -> float:
        """Rank 0's own optimiser step, which strategies make when the gradients are agreed on."""
        norm = self.learner.step(gradients)
        self.step_norms.append(norm)
        return norm

    def pull(self) -> None:
        """Pull weights and moments from the shards into rank 0's learner; log how stale gradients were."""
        if self.server is None:
            return
        counts = self.server.pull_into(self.learner)
        versions = counts["versions"]
        if isinstance(self.sync, ServerClient):
            self.sync.versions = list(versions)  # the next gradient is of these weights
        self.pool.log_event("server", **counts)
        self.history.note("team", "held", group=self.number, versions=versions, taken=counts["taken"])

    # Ending

    def disband(self, *, pull: bool = True) -> None:
        """End the group; pull from its shards first, unless a gradient of ours may be applied there twice."""
        if pull and not self.push_pending:
            with suppress(WorkerLost):
                self.pull()
        self.comm.close()
        if self.server is not None:
            self.server.close()
        self.comm = NoComm()
        self.sync = None
        self.server = None
        self.members = []
        self.must_reform = True
        self.push_pending = False

    def remove(self, handle: WorkerHandle) -> None:
        """A learner was stopped or lost: a group with it is over."""
        if handle in self.members:
            self.disband()

    def fail(self, cause: WorkerLost) -> None:
        """Disband after a failed operation, and find the lost learner; if none is lost, charge the group's failure."""
        if not self.members:
            return  # disbanded before, when the lost learner was found
        members = self.members
        lost_before = self.pool.num_lost
        self.disband()
        # Healthy members reply that the group is over, at the latest when their share is computed.
        self.pool.drain(members, str(cause), self.requested_at)
        self.pool.check()
        if self.pool.num_lost > lost_before:
            return
        self.pool.log_event("group_failed", what=str(cause))
        if not self.pool.budget.charge(time.monotonic()):
            self.pool.give_up(cause)

    def discard(self) -> None:
        """Rank 0's weights were replaced: disband without pulling, and drop late priorities."""
        members = self.members
        self.disband(pull=False)
        self.pool.drain(members)  # before the steps they report are discarded, or set back
        self.late_priorities.clear()

    # Strategies

    def set_sync_plan(self, sync_plan: SyncPlan) -> None:
        """Form the next group with this strategy; what the current one remembers is discarded."""
        self.next_sync_plan = self.without_rejected_codec(sync_plan)
        self.must_reform = True

    def without_rejected_codec(self, sync_plan: SyncPlan) -> SyncPlan:
        """The same plan without its codec, if that was rejected."""
        if isinstance(sync_plan, Coded) and sync_plan.codec in self.rejected_codecs:
            return msgspec.structs.replace(sync_plan, codec=NoCodec())
        return sync_plan

    def on_strategy_event(self, kind: str, **fields: Any) -> None:
        """Log an event of a strategy; a codec that one learner gives up is rejected for all, for good."""
        self.pool.log_event(kind, **fields)
        if kind == "codec_given_up" and isinstance(self.sync_plan, Coded):
            self.rejected_codecs.add(self.sync_plan.codec)
            self.next_sync_plan = self.without_rejected_codec(self.next_sync_plan)
            # With a server each learner decides alone; and what is sent without a codec are gradients, not steps.
            sent_steps = isinstance(self.sync_plan, AllreduceSync) and sends_steps(self.sync_plan)
            self.must_reform = self.must_reform or sent_steps or isinstance(self.sync_plan, Serving)


def is_synchronous(sync_plan: SyncPlan) -> bool:
    """Do all learners with this strategy make the same update at the same time?"""
    if isinstance(sync_plan, ServerSync):
        return sync_plan.max_staleness == 0 and sync_plan.spare == 0
    return not isinstance(sync_plan, Serving)


def type_name(sync_plan: SyncPlan) -> str:
    """Its `type` in the plan."""
    return str(sync_plan.__struct_config__.tag)
