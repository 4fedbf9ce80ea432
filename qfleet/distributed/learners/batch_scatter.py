"""Which items each learner of a group learns from: shares of one batch, or a batch of its own replay."""

from typing import Protocol

import numpy as np

from qfleet.data import Array, Batch, Report, Sequences
from qfleet.data.array_messages import batch_arrays, batch_form
from qfleet.data.wire_format import Arrays
from qfleet.distributed.learners import shares
from qfleet.distributed.learners.env_reports import EnvReports
from qfleet.distributed.learners.messages import EnvReport, Learned, LearnOwn, LearnPositions, LearnShare
from qfleet.learn import BatchSource
from qfleet.learn.batch_split import select_items
from qfleet.plan.schema import Plan
from qfleet.replay import SamplerTotals

Share = tuple[
    LearnShare | LearnOwn | LearnPositions, Arrays, Array
]  # a request to learn, its arrays, and the ids of its items


class BatchScatter(Protocol):
    """Scatters one update after the other over the ranks of a group."""

    items: int  # of this update, of all ranks
    speeds: shares.LearnerSpeeds

    def on_joined(self, rank: int, report: EnvReport | None) -> None:
        """A learner joined the group with this report."""

    def begin(self, batch: Batch | Sequences) -> tuple[Batch | Sequences, float]:
        """Begin the next update: rank 0's own batch, and the weight of its gradient."""

    def share_for(self, rank: int, updates: int, rate: float) -> Share:
        """The share of another rank, which makes its update number `updates` + 1 with this learning rate."""

    def on_report(self, rank: int, ids: Array, reply: Learned, arrays: Arrays) -> None:
        """A learner's reply to its share of these ids."""

    def complete(self, report: Report) -> None:
        """The step was made: add the other ranks' results to rank 0's report."""


def make_scatter(
    plan: Plan, num: int, late_priorities: list[shares.KnownPriorities], env_reports: EnvReports
) -> BatchScatter:
    """The scatter of a group of `num` learners, rank 0 included."""
    if env_reports.batch_source is None:
        return SplitScatter(num, late_priorities, balance=plan.learners.balance)
    return OwnReplayScatter(num, env_reports, env_reports.batch_source)


class SplitScatter:
    """Every rank gets a share of the batch that rank 0 sampled, by its speed if the plan balances."""

    def __init__(self, num: int, late_priorities: list[shares.KnownPriorities], *, balance: bool) -> None:
        self.speeds = shares.LearnerSpeeds(num, balance=balance)
        self.late_priorities = late_priorities  # that came after their batch
        self.items = 0

    def on_joined(self, rank: int, report: EnvReport | None) -> None:
        """A learner without environments has nothing to report."""

    def begin(self, batch: Batch | Sequences) -> tuple[Batch | Sequences, float]:
        """Assign the items of the batch to ranks."""
        self.batch = batch
        self.items = len(batch.ids)
        self.owners = shares.assign_items(self.items, self.speeds.shares)
        return self.items_of(0)

    def items_of(self, rank: int) -> tuple[Batch | Sequences, float]:
        """A rank's items, and the weight of their gradient."""
        return select_items(self.batch, self.owners == rank), shares.share_of_batch(self.owners, rank, self.speeds.num)

    def share_for(self, rank: int, updates: int, rate: float) -> Share:
        """The rank's items."""
        part, share = self.items_of(rank)
        return LearnShare(updates, rate, batch_form(part), share), batch_arrays(part), part.ids

    def on_report(self, rank: int, ids: Array, reply: Learned, arrays: Arrays) -> None:
        """Keep the priorities until the batch is complete, and the learner's speed."""
        if reply.finite:
            self.late_priorities.append((ids, arrays["priority"]))
            self.speeds.note(rank, len(ids), reply.seconds)

    def complete(self, report: Report) -> None:
        """Join the priorities of this batch, and add late ones of earlier batches."""
        report.priority = shares.join_priorities(self.batch.ids, self.owners, report.priority, self.late_priorities)
        report.late = self.late_priorities.copy()
        self.late_priorities.clear()


class OwnReplayScatter:
    """Every rank learns from a batch of its own replay; the replay's totals decide how much its gradient counts."""

    def __init__(self, num: int, env_reports: EnvReports, batch_source: BatchSource) -> None:
        self.num = num
        self.env_reports = env_reports
        self.batch_source = batch_source
        self.speeds = shares.LearnerSpeeds(num, balance=False)
        self.replays = dict[int, SamplerTotals]()  # by rank
        self.items = 0

    def on_joined(self, rank: int, report: EnvReport | None) -> None:
        """Count its environments' report, and keep its replay's totals if it has sampled before."""
        if report is None:
            raise ValueError("an actor-learner without a report")
        self.env_reports.add(report)
        if (own := report.totals) is not None:
            self.replays[rank] = SamplerTotals(own.items, own.mass, own.beta, own.top)

    def begin(self, batch: Batch | Sequences) -> tuple[Batch | Sequences, float]:
        """Compute the totals of all replays; rank 0's batch is from its own."""
        self.ids = np.zeros_like(batch.ids)
        self.items = self.num * len(batch.ids)
        own = self.batch_source.replay.totals()
        self.replays[0] = own
        # Before its first report an actor-learner's replay counts like rank 0's.
        self.totals = shares.totals_of([self.replays.get(rank, own) for rank in range(self.num)])
        return batch, shares.share_of_replay(self.totals, own)

    def share_for(self, rank: int, updates: int, rate: float) -> Share:
        """The totals of all replays, from which the learner computes the weight of its gradient."""
        totals = self.totals
        steps = self.env_reports.total_steps()
        request = LearnOwn(updates, rate, totals.learners, totals.items, totals.mass, totals.top, steps)
        return request, {}, self.ids

    def on_report(self, rank: int, ids: Array, reply: Learned, arrays: Arrays) -> None:
        """Keep its replay's new totals, its environments' report and its speed."""
        self.on_joined(rank, reply.report)
        self.speeds.note(rank, len(ids), reply.seconds)

    def complete(self, report: Report) -> None:
        """Add episodes and faults of the other actor-learners."""
        report.stats |= self.env_reports.take()
