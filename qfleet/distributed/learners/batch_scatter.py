"""Who learns from what in an update: parts of one batch, or every bundle from its own replay."""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from qfleet.data import Array, Batch, Report, Sequences
from qfleet.data.array_messages import batch_parts
from qfleet.data.wire_format import Facts, Parts
from qfleet.distributed.learners.shares import Known, LearnerSpeeds, joined, owners_of, share_in, share_of, totals_of
from qfleet.learn.batch_split import chosen
from qfleet.replay import SamplerTotals

Order = tuple[Facts, dict[str, Array], Array]  # what a partner is told, and the ids of its items


class BatchScatter(Protocol):
    """Deals out one update after the other to the ranks of a group."""

    items: int  # of this update, by everybody

    def welcome(self, rank: int, facts: Facts) -> None:
        """A partner has joined with this word."""
        ...

    def begin(self, batch: Batch | Sequences) -> tuple[Batch | Sequences, float]:
        """The next update: rank 0's own part, and how much it counts."""
        ...

    def order(self, rank: int) -> Order:
        """A partner's part of it."""
        ...

    def timed(self, rank: int, items: int, seconds: float) -> None:
        """A rank computed so many items in so many seconds."""
        ...

    def heard(self, rank: int, ids: Array, parts: Parts) -> None:
        """A partner's word for an order."""
        ...

    def finish(self, report: Report) -> None:
        """The step was made: add to rank 0's report what others found."""
        ...

    def slow(self) -> list[tuple[int, float]]:
        """Ranks that have become clearly slow, and their speed beside that of the fastest."""
        ...


class SplitScatter:
    """Every rank gets a part of the batch that rank 0 drew, by its speed if the plan balances."""

    def __init__(self, num: int, late: list[Known], *, balance: bool) -> None:
        self.speeds = LearnerSpeeds(num, balance=balance)
        self.late = late  # `late`: priorities that came after their batch
        self.items = 0

    def welcome(self, rank: int, facts: Facts) -> None:
        """It brings nothing."""

    def begin(self, batch: Batch | Sequences) -> tuple[Batch | Sequences, float]:
        """Deal the batch out."""
        self.batch = batch
        self.items = len(batch.ids)
        self.owners = owners_of(self.items, self.speeds.shares)
        return self.part(0)

    def part(self, rank: int) -> tuple[Batch | Sequences, float]:
        """A rank's items, and how much they count."""
        return chosen(self.batch, self.owners == rank), share_of(self.owners, rank, self.speeds.num)

    def order(self, rank: int) -> Order:
        """Its items."""
        part, share = self.part(rank)
        facts, arrays = batch_parts(part)
        return {**facts, "share": share}, arrays, part.ids

    def timed(self, rank: int, items: int, seconds: float) -> None:
        """Shares may follow."""
        self.speeds.note(rank, items, seconds)

    def heard(self, rank: int, ids: Array, parts: Parts) -> None:
        """Its priorities."""
        facts, arrays = parts
        if not facts["finite"]:
            return
        self.late.append((ids, arrays["priority"]))
        self.timed(rank, len(ids), float(facts["seconds"]))  # type: ignore[arg-type]

    def finish(self, report: Report) -> None:
        """Join the priorities of this batch, and hand over those of earlier ones."""
        report.priority = joined(self.batch.ids, self.owners, report.priority, self.late)
        report.late = self.late.copy()
        self.late.clear()

    def slow(self) -> list[tuple[int, float]]:
        """By items per second."""
        return self.speeds.settle()


class LearnedItems:
    """What partners with environments of their own have told of them, since the run began."""

    def __init__(self) -> None:
        self.steps = 0
        self.told: dict[str, int] = {}  # steps of each bundle's life, as last told
        self.finished: list[tuple[float, int]] = []
        self.faults: list[dict[str, Any]] = []

    def count(self, facts: Facts) -> None:
        """Take a bundle's word in; it may not have drawn yet."""
        self.finished += msgspec.json.decode(str(facts["episodes"]), type=list[tuple[float, int]])
        self.faults += msgspec.json.decode(str(facts["faults"]), type=list[dict[str, Any]])
        if "steps" not in facts:
            return
        life = str(facts["life"])
        steps = int(facts["steps"])  # type: ignore[arg-type]
        self.steps += steps - self.told.get(life, 0)
        self.told[life] = steps

    def forget(self) -> None:
        """The run goes back: what happened since does not count."""
        self.finished = []
        self.faults = []

    def begin(self, facts: Facts) -> None:
        """A bundle goes on from a checkpoint: the steps it had told of by then were counted, if there were any."""
        self.told[str(facts["life"])] = int(facts.get("steps", 0))  # type: ignore[arg-type]

    def take(self) -> dict[str, Any]:
        """What a tick of the learner's tells of it."""
        found = {"episodes": self.finished, **({"faults": self.faults} if self.faults else {})}
        self.finished = []
        self.faults = []
        return found


class OwnReplayScatter:
    """Everybody learns from a batch of its own; how much it counts follows from what its replay holds."""

    def __init__(
        self, num: int, tally: LearnedItems, stock: Callable[[], SamplerTotals], steps: Callable[[], int]
    ) -> None:
        self.num = num
        self.tally = tally
        self.stock = stock
        self.steps = steps
        self.speeds = LearnerSpeeds(num, balance=False)
        self.stocks = dict[int, SamplerTotals]()
        self.items = 0

    def welcome(self, rank: int, facts: Facts) -> None:
        """It may have drawn before."""
        self.tally.count(facts)
        if "items" in facts:
            self.stocks[rank] = stock_in(facts)

    def begin(self, batch: Batch | Sequences) -> tuple[Batch | Sequences, float]:
        """Rank 0's own batch is one of them."""
        self.ids = np.zeros_like(batch.ids)
        self.items = self.num * len(batch.ids)
        self.stocks[0] = own = self.stock()
        # Until its first word a bundle is taken to hold as much as rank 0 does.
        self.totals = totals_of([self.stocks.get(rank, own) for rank in range(self.num)])
        return batch, share_in(self.totals, own)

    def order(self, rank: int) -> Order:
        """What all hold together, by which it knows how much its own batch counts."""
        totals = self.totals
        facts: Facts = {"items": totals.items, "mass": totals.mass, "top": totals.top, "num": totals.learners}
        return {"kind": "learn", **facts, "steps": self.steps()}, {}, self.ids

    def timed(self, rank: int, items: int, seconds: float) -> None:
        """Everybody has as much as the others, but who is slow is told."""
        self.speeds.note(rank, items, seconds)

    def heard(self, rank: int, ids: Array, parts: Parts) -> None:
        """What it holds by now, and what happened in its environments."""
        self.welcome(rank, parts[0])
        self.timed(rank, len(ids), float(parts[0]["seconds"]))  # type: ignore[arg-type]

    def finish(self, report: Report) -> None:
        """Episodes of other bundles count as our own."""
        report.stats |= self.tally.take()

    def slow(self) -> list[tuple[int, float]]:
        """Nobody's part changes."""
        return self.speeds.settle()


def stock_in(facts: Facts) -> SamplerTotals:
    """A bundle's word of what it holds."""
    items, mass, beta, top = (facts[name] for name in ("items", "mass", "beta", "top"))
    return SamplerTotals(int(items), float(mass), float(beta), float(top))  # type: ignore[arg-type]
