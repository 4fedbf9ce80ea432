"""One update by all learners of a process group: scatter the batch, step, and collect the reports."""

import math
import time

from qfleet.data import Batch, Report, Sequences
from qfleet.distributed.learners.launcher import SLOTS
from qfleet.distributed.learners.messages import Learned
from qfleet.distributed.learners.process_group import ProcessGroup
from qfleet.distributed.learners.worker import compute_and_step
from qfleet.distributed.worker.handle import WorkerHandle
from qfleet.plan.sync_schema import ServerSync
from qfleet.sync.comm import CommLost
from qfleet.sync.strategies import gradient_callback
from qfleet.system.worker_errors import WorkerLost

RELEASE_SECONDS = 0.02


class GroupUpdater:
    """Makes updates with a process group, or on rank 0 alone while the group has no members."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.learner = group.learner
        self.pool = group.pool
        self.finite = True  # was rank 0's gradient in the last update?

    def update(self, batch: Batch | Sequences) -> Report:
        """Try to make one update; `WorkerLost` if a learner was lost before rank 0 made its step."""
        return self.together(batch) if self.group.members else self.alone(batch)

    def alone(self, batch: Batch | Sequences) -> Report:
        """One update on rank 0 only, because no other learner is ready."""
        report = self.learner.update(self.group.whole_batch(batch))
        items = len(batch.ids)
        fields = {"update": self.learner.updates, "own": items, "items": items, "finite": True}
        self.group.history.note("team", "made", group=0, **fields)
        return report

    def together(self, batch: Batch | Sequences) -> Report:
        """Scatter the batch, compute rank 0's share, step by the strategy, and collect the members' reports."""
        group = self.group
        if self.learner.reset is not None and self.learner.reset.due(self.learner.updates + 1):
            self.quiesce()  # a reset also changes moments, which a server may hold
        self.await_free_slots()
        # The group may be disbanded by the time the step was made.
        scatter = group.scatter
        number = group.number
        group.requested_at = time.monotonic()
        own, share = scatter.begin(batch)
        for rank, handle in enumerate(group.members, 1):
            self.send_share(handle, rank)
        pending, norm, seconds = compute_and_step(
            self.learner, own, share, group.sync_step, gradient_callback(group.sync)
        )
        self.finite = math.isfinite(norm)
        fields = {"update": self.learner.updates + 1, "own": len(own.ids), "items": scatter.items}
        group.history.note("team", "made", group=number, **fields, finite=self.finite)
        scatter.speeds.note(0, len(own.ids), seconds)
        for handle in group.members.copy():
            while self.has_share(handle) and (group.synchronous or handle.transport.poll(0.0)):
                self.collect_report(handle)
        self.log_slow_learners()
        report = self.learner.finish_shared_update(pending, norm)
        scatter.complete(report)
        return report

    def has_share(self, handle: WorkerHandle) -> bool:
        """Is this learner a member that has not reported on all its shares?"""
        return handle in self.group.members and bool(self.group.pending_ids[handle])

    def await_free_slots(self) -> None:
        """Wait for reports of members that have no free slot for another share.

        No part of this batch has been sent yet. If a member is lost here, the batch is scattered again as a whole.
        """
        for handle in self.group.members.copy():
            if len(self.group.pending_ids[handle]) == SLOTS:
                self.collect_report(handle)
            if handle not in self.group.members:
                raise CommLost("the group is over")

    def send_share(self, handle: WorkerHandle, rank: int) -> None:
        """Send a member its share of the batch."""
        request, arrays, ids = self.group.scatter.share_for(rank, self.learner.updates, self.learner.learning_rate)
        fields = {"update": self.learner.updates + 1, "learner": handle.number, "items": len(ids)}
        self.group.history.note("team", "dealt", group=self.group.number, **fields)
        self.group.pending_ids[handle].append(ids)
        try:
            handle.ask(request, arrays)
        except WorkerLost:
            if self.group.synchronous:
                raise
            # Others may have pushed their share already: the batch counts, and the loss is found after our own step.

    def collect_report(self, handle: WorkerHandle) -> None:
        """Receive a member's priorities. If it failed the group ends; if only it skipped the step, a new one forms."""
        group = self.group
        try:
            reply, arrays = handle.reply(Learned, self.pool.reply_timeout_seconds)
        except CommLost as cause:
            group.fail(cause)
            return
        except WorkerLost as cause:
            self.pool.lose(handle, cause)
            return
        ids = group.pending_ids[handle].popleft()
        group.history.note("team", "learned", group=group.number, learner=handle.number)
        group.scatter.on_report(1 + group.members.index(handle), ids, reply, arrays)
        if reply.report is not None and reply.report.totals is not None and reply.report.totals.behind:
            self.pool.log_inexact(handle, "it acts too slowly to keep pace")
        if reply.given_up is not None:
            group.on_strategy_event("codec_given_up", learner=handle.number, cosine=reply.given_up)
        finite = reply.finite
        group.must_reform = group.must_reform or (group.synchronous and finite != self.finite)

    def log_slow_learners(self) -> None:
        """Log learners that have become slow; shares follow the speeds if the plan balances."""
        members = self.group.members
        for rank, speed in self.group.scatter.speeds.rebalance() if members else ():
            number = 0 if rank == 0 else members[rank - 1].number
            self.pool.log_event("learner_slow", learner=number, speed=round(speed, 3))

    def quiesce(self) -> None:
        """Wait until no member computes, and pull what shards hold into rank 0's learner."""
        try:
            for handle in self.group.members.copy():
                while self.has_share(handle):
                    self.release(handle)
                    self.collect_report(handle)
            self.group.pull()
        except WorkerLost as cause:
            self.group.fail(cause)

    def release(self, handle: WorkerHandle) -> None:
        """Let a slow member continue that waits at the server for a step of rank 0, which does not come now."""
        server = self.group.server
        sync_plan = self.group.sync_plan
        until = time.monotonic() + self.pool.reply_timeout_seconds
        if server is None or not isinstance(sync_plan, ServerSync) or not sync_plan.spare:
            return
        while not handle.transport.poll(RELEASE_SECONDS) and handle.control.is_alive() and time.monotonic() < until:
            server.release()
