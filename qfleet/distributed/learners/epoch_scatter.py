"""Which transitions of a data set each learner of a group reads: every position belongs to exactly one learner."""

from typing import Protocol

from qfleet.data import Array, Batch, Report, Sequences
from qfleet.distributed.learners import shares
from qfleet.distributed.learners.batch_scatter import Share
from qfleet.distributed.learners.messages import EnvReport, Learned, LearnPositions


class PositionSource(Protocol):
    """Transitions that every learner can read by their positions."""

    def batch_at(self, positions: Array) -> Batch | Sequences:
        """The transitions at these positions."""

    def owners_at(self, positions: Array, owners: Array, shares: tuple[float, ...]) -> Array:
        """The learner that reads each position: as in `owners`, but as far as possible of own shards."""


class EpochScatter:
    """Every rank reads its part of a batch itself, as far as possible from shards of its own; only positions are sent.

    When a learner is lost the same positions are divided among those that are left.
    """

    def __init__(
        self, num: int, source: PositionSource, late_priorities: list[shares.KnownPriorities], *, balance: bool
    ) -> None:
        self.source = source
        self.speeds = shares.LearnerSpeeds(num, balance=balance)
        self.late_priorities = late_priorities
        self.items = 0

    def on_joined(self, rank: int, report: EnvReport | None) -> None:
        """Nobody acts: there is nothing to report."""

    def begin(self, batch: Batch | Sequences) -> tuple[Batch | Sequences, float]:
        """Divide the positions of the batch, and read those of rank 0."""
        self.positions = batch.ids
        self.items = len(batch.ids)
        owners = shares.assign_items(self.items, self.speeds.shares)
        self.owners = self.source.owners_at(self.positions, owners, self.speeds.shares)
        return self.source.batch_at(self.positions[self.owners == 0]), self.share(0)

    def share(self, rank: int) -> float:
        """The weight of a rank's gradient."""
        return shares.share_of_batch(self.owners, rank, self.speeds.num)

    def share_for(self, rank: int, updates: int, rate: float) -> Share:
        """The positions of another rank."""
        positions = self.positions[self.owners == rank]
        return LearnPositions(updates, rate, self.share(rank)), {"positions": positions}, positions

    def on_report(self, rank: int, ids: Array, reply: Learned, arrays: dict[str, Array]) -> None:
        """Keep the priorities until the batch is complete, and the learner's speed."""
        if reply.finite:
            self.late_priorities.append((ids, arrays["priority"]))
            self.speeds.note(rank, len(ids), reply.seconds)

    def complete(self, report: Report) -> None:
        """Join the errors of this batch; nobody waits for late ones, because every transition is used equally often."""
        report.priority = shares.join_priorities(self.positions, self.owners, report.priority, self.late_priorities)
        self.late_priorities.clear()
