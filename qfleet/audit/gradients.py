"""The audit of several learners' history: was every update made once, with each learner's gradient once (I3)?

Reads the records of the role "team", which rank 0 writes (`qfleet.audit.history`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from qfleet.audit.history import Record
from qfleet.audit.records import Violation


@dataclass
class GroupRecord:
    """What one group of learners did."""

    number: int = 0
    learners: frozenset[int] = frozenset()
    in_step: bool = True
    exact: bool = True  # does every gradient that was computed count?
    scattered: Counter[int] = field(default_factory=Counter)  # shares of batches, by learner
    learned: Counter[int] = field(default_factory=Counter)  # replies, by learner
    items: Counter[int] = field(default_factory=Counter)  # in shares of other learners, by update
    made: int = 0  # updates by rank 0


def check_gradients(records: Iterable[Record]) -> list[Violation]:
    """Everything wrong with these records of a group, which are in order."""
    audit = GradientAudit()
    for record in records:
        audit.read(record)
    return audit.found


@dataclass
class GradientAudit:
    """Follows one group after the other; `on_OP` checks one operation."""

    found: list[Violation] = field(default_factory=list)
    group: GroupRecord = field(default_factory=GroupRecord)
    updates: int = -1

    def report_if(self, wrong: bool, text: str) -> None:
        """Add a violation, if it is one."""
        if wrong:
            self.found.append(Violation("gradient", text))

    def read(self, record: Record) -> None:
        """Check one record."""
        op = record["op"]
        now = self.group.number
        later = op == "formed" or record["group"] in (now, 0)
        self.report_if(not later, f"{op} in group {record['group']} after group {now} was formed")
        name = "scattered" if op == "dealt" else op  # histories keep the older word
        getattr(self, f"on_{name}")(record)

    def on_began(self, record: Record) -> None:
        """The run starts, or is resumed in another process, which counts groups from one again."""
        self.group = GroupRecord()
        self.updates = -1

    def on_formed(self, record: Record) -> None:
        """A new group starts from rank 0's state, which may be an earlier one after a roll-back."""
        self.report_if(record["group"] <= self.group.number, f"group {record['group']} came after {self.group.number}")
        learners = frozenset(record["learners"])
        self.group = GroupRecord(record["group"], learners, in_step=record["in_step"], exact=record["exact"])
        self.updates = record["updates"]

    def on_scattered(self, record: Record) -> None:
        """A share of the batch for update `update` was sent to a learner; the same again only in another group."""
        group = self.group
        learner = record["learner"]
        update = record["update"]
        self.report_if(learner not in group.learners, f"learner {learner} is not in group {group.number}")
        self.report_if(update != self.updates + 1, f"a share for update {update} after {self.updates}")
        group.scattered[learner] += 1
        group.items[update] += record["items"]

    def on_learned(self, record: Record) -> None:
        """A learner replied that its gradient was used."""
        group = self.group
        learner = record["learner"]
        group.learned[learner] += 1
        more = group.learned[learner] > group.scattered[learner]
        self.report_if(more, f"learner {learner} learned more often than it was asked to, in group {group.number}")

    def on_made(self, record: Record) -> None:
        """Rank 0 made update `update` with `own` of its `items`: the rest was in the shares of other learners."""
        update = record["update"]
        group = self.group
        # Without a group any number may follow.
        known = record["group"] != 0 and self.updates >= 0
        self.report_if(known and update != self.updates + 1, f"update {update} was made after {self.updates}")
        if record["group"]:
            items = record["items"]
            learned_from = record["own"] + group.items.pop(update, 0)
            self.report_if(learned_from != items, f"update {update}: {learned_from} of {items} items")
            group.made += 1
        # One that is not finite is not counted, and made again.
        self.updates = update if record["finite"] else update - 1

    def on_held(self, record: Record) -> None:
        """The gradients that the shards of a server have received, when all learners were idle."""
        group = self.group
        sure = group.made + group.learned.total()
        most = group.made + group.scattered.total()
        for at, (version, taken) in enumerate(zip(record["versions"], record["taken"], strict=True)):
            where = f"shard {at} in group {group.number}"
            wrong = group.in_step and version != group.made and group.learned == group.scattered
            self.report_if(wrong, f"{where} made {version} steps of {group.made} updates")
            fewer = group.exact and taken < sure
            self.report_if(fewer or taken > most, f"{where} took {taken} gradients of {sure} to {most}")
