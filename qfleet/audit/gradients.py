"""The audit of several learners' history: was every update made once, by everybody's gradient once (I3)?

Reads the notes of the role "team", which rank 0 writes (`qfleet.audit.history`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from qfleet.audit.history import Record
from qfleet.audit.supervision import Violation


@dataclass
class GroupRecord:
    """What one group did."""

    number: int = 0
    learners: frozenset[int] = frozenset()
    in_step: bool = True
    exact: bool = True  # does every gradient that was computed count?
    dealt: Counter[int] = field(default_factory=Counter)  # orders, by learner
    learned: Counter[int] = field(default_factory=Counter)  # words
    items: Counter[int] = field(default_factory=Counter)  # dealt to others, by update
    made: int = 0  # updates of rank 0's


def check_gradients(records: Iterable[Record]) -> list[Violation]:
    """Everything wrong with the notes of a team, which are in order."""
    audit = GradientAudit()
    for record in records:
        audit.read(record)
    return audit.found


class GradientAudit:
    """Follows one group after the other."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self.group = GroupRecord()
        self.updates = -1

    def blame(self, wrong: bool, text: str) -> None:
        """Remember a violation, if it is one."""
        if wrong:
            self.found.append(Violation("gradient", text))

    def read(self, record: Record) -> None:
        """One note."""
        read: dict[str, Callable[[Record], None]] = {
            "began": self.began,
            "formed": self.formed,
            "dealt": self.dealt,
            "learned": self.learned,
            "made": self.made,
            "held": self.held,
        }
        op = record["op"]
        now = self.group.number
        later = op == "formed" or record["group"] in (now, 0)
        self.blame(not later, f"{op} in group {record['group']} after group {now} was formed")
        read[op](record)

    def began(self, record: Record) -> None:
        """The run begins, or goes on in another process, which counts groups anew."""
        self.group = GroupRecord()
        self.updates = -1

    def formed(self, record: Record) -> None:
        """A new group begins where rank 0 is, which may be an earlier moment that the run came back to."""
        self.blame(record["group"] <= self.group.number, f"group {record['group']} came after {self.group.number}")
        learners = frozenset(record["learners"])
        self.group = GroupRecord(record["group"], learners, in_step=record["in_step"], exact=record["exact"])
        self.updates = record["updates"]

    def dealt(self, record: Record) -> None:
        """A part of the batch for update `update`; the same again only in another group."""
        group = self.group
        learner = record["learner"]
        update = record["update"]
        self.blame(learner not in group.learners, f"learner {learner} is not in group {group.number}")
        self.blame(update != self.updates + 1, f"dealt for update {update} after {self.updates}")
        group.dealt[learner] += 1
        group.items[update] += record["items"]

    def learned(self, record: Record) -> None:
        """A partner's word that its gradient was used."""
        group = self.group
        learner = record["learner"]
        group.learned[learner] += 1
        more = group.learned[learner] > group.dealt[learner]
        self.blame(more, f"learner {learner} learned more often than it was asked to, in group {group.number}")

    def made(self, record: Record) -> None:
        """Rank 0 made update `update` with `own` of its `items`: the rest was dealt out."""
        update = record["update"]
        group = self.group
        # Alone, after a time that no group saw, any number may follow.
        known = record["group"] != 0 and self.updates >= 0
        self.blame(known and update != self.updates + 1, f"update {update} was made after {self.updates}")
        if record["group"]:
            learned_from = record["own"] + group.items.pop(update, 0)
            self.blame(learned_from != record["items"], f"update {update}: {learned_from} of {record['items']} items")
            group.made += 1
        # One that is not finite is not counted, and made again.
        self.updates = update if record["finite"] else update - 1

    def held(self, record: Record) -> None:
        """What the shards of a server have taken in, when everybody was at rest."""
        group = self.group
        sure = group.made + group.learned.total()
        most = group.made + group.dealt.total()
        for at, (version, taken) in enumerate(zip(record["versions"], record["taken"], strict=True)):
            where = f"shard {at} in group {group.number}"
            wrong = group.in_step and version != group.made and group.learned == group.dealt
            self.blame(wrong, f"{where} made {version} steps of {group.made} updates")
            fewer = group.exact and taken < sure
            self.blame(fewer or taken > most, f"{where} took {taken} gradients of {sure} to {most}")
