"""The audit of a history: did the run keep its promises I3, I6, I7, I8 and I9? Fields: see `qfleet.audit.history`.

What was sent and never answered may have happened or not, but once: it is no violation that the log lacks it.
"""

from bisect import bisect
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

from qfleet.audit.gradients import check_gradients
from qfleet.audit.history import OPERATIONS, Record, read_history
from qfleet.audit.supervision import Violation, check_lives

Key: TypeAlias = tuple[int, int]  # worker, incarnation
Source: TypeAlias = tuple[int, int, int]
CUT = -1  # rows of which the end was cut off: not even their own incarnation's may follow


def check_history(folder: Path) -> list[Violation]:
    """Everything wrong with the history in a folder; empty if all promises were kept."""
    records = list[Record]()
    damaged = list[Violation]()
    for name, number, record in read_history(folder):
        if record is None:
            damaged.append(Violation("damaged", f"{name}:{number} is not a record"))
        elif record["op"] == "full":
            damaged.append(Violation("incomplete", f"{name} ends before the run: it grew too large"))
        else:
            records.append(record)
    return damaged + check_records(records)


def check_records(records: Iterable[Record]) -> list[Violation]:
    """The same for records in memory; those of one role are in order."""
    audit = Audit()
    by_role: dict[str, list[Record]] = {role: [] for role in OPERATIONS}
    for record in records:
        by_role[record["role"]].append(record)
    # What was sent and published is known before what was accepted and loaded is judged.
    audit.read_sent(by_role["actor"])
    audit.read_learner(by_role["learner"])
    audit.read_actors(by_role["actor"], [record["at"] for record in by_role["learner"] if record["op"] == "opened"])
    audit.read_replay(by_role["replay"])
    last = max((record["at"] for record in (*by_role["learner"], *by_role["supervisor"])), default=0.0)
    lives = check_lives(by_role["supervisor"], by_role["actor"], last)
    return audit.found + lives + check_gradients(by_role["team"])


@dataclass
class RunRecord:
    """What the learner's log says up to some line; it goes back with a checkpoint."""

    env_steps: int = 0
    updates: int = 0
    forgiven: int = 0
    newest: dict[int, int] = field(default_factory=dict)  # worker: incarnation begun last
    dismissed: set[int] = field(default_factory=set)
    following: dict[Key, int] = field(default_factory=dict)  # the sequence that comes next
    open_rows: dict[int, int] = field(default_factory=dict)  # worker: incarnation whose rows are not sealed


class Audit:
    """Reads the logs of all roles and remembers what it found."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self.sent: dict[Source, set[int]] = {}  # with how many steps
        self.ever: dict[Key, int] = {}  # sequences ever accepted, those of a course that was given up too
        self.published: set[int] = set()
        self.course = RunRecord()
        self.committed = RunRecord()
        self.opened: Record = {}
        self.version = 0
        self.tail = self.head = 0

    def blame(self, wrong: bool, rule: str, text: str) -> None:
        """Remember a violation, if it is one."""
        if wrong:
            self.found.append(Violation(rule, text))

    # Actors

    def read_sent(self, records: list[Record]) -> None:
        """What may be accepted at all."""
        for record in records:
            if record["op"] == "sent":
                self.sent.setdefault(as_source(record), set()).add(record["steps"])

    def read_actors(self, records: list[Record], opened_at: list[float]) -> None:
        """Versions rise as each actor sees them, and what was acknowledged is there."""
        acting: dict[tuple[int, int, int], int] = {}
        for record in records:
            if record["op"] == "loaded":
                # A driver that went on from a checkpoint may use the numbers of incarnations that came after it again.
                life = bisect(opened_at, record["at"])
                version = record["version"]
                key = (record["worker"], record["incarnation"], life)
                self.blame(version < acting.get(key, version), "version", f"{key[:2]} went back to version {version}")
                self.blame(version not in self.published, "version", f"{key[:2]} acts with {version}, never published")
                acting[key] = version
            elif record["op"] == "acked" and record["verdict"] != "refuse":
                *key_of, sequence = as_source(record)
                kept = sequence < self.ever.get((key_of[0], key_of[1]), 0)
                self.blame(not kept, "acked", f"{record['source']} was acknowledged but not accepted")

    # The learner

    def read_learner(self, records: list[Record]) -> None:
        """Every line in order."""
        read: dict[str, Callable[[Record], None]] = {
            "opened": self.open,
            "began": self.begin,
            "dismissed": self.dismiss,
            "accepted": self.accept,
            "duplicate": self.repeat,
            "refused": self.refuse,
            "sealed": self.seal,
            "sampled": self.sample,
            "update": self.update,
            "published": self.publish,
            "committed": self.commit,
            "closed": self.close,
        }
        for record in records:
            self.blame(not self.opened and record["op"] != "opened", "order", f"{record['op']} before opened")
            if self.opened or record["op"] == "opened":
                read[record["op"]](record)

    def open(self, record: Record) -> None:
        """The first time its counters are taken as they are, later they are the last commit's."""
        if not self.opened:
            self.committed = RunRecord(record["env_steps"], record["updates"])
        self.course = deepcopy(self.committed)
        self.opened = record
        self.version = 0
        self.course.forgiven = record.get("forgiven", self.course.forgiven)
        self.counters("opened", record)
        self.tail = record["tail"]
        self.head = record["head"]

    def begin(self, record: Record) -> None:
        """Incarnations of a worker only rise."""
        worker = record["worker"]
        incarnation = record["incarnation"]
        older = incarnation < self.course.newest.get(worker, -1)
        self.blame(older, "incarnation", f"worker {worker} went back to incarnation {incarnation}")
        self.course.newest[worker] = incarnation
        self.course.dismissed.discard(worker)

    def dismiss(self, record: Record) -> None:
        """Nothing is accepted from it for now."""
        self.course.dismissed.add(record["worker"])

    def listened_to(self, worker: int) -> int | None:
        """The incarnation that may be accepted from, if there is one."""
        return None if worker in self.course.dismissed else self.course.newest.get(worker)

    def accept(self, record: Record) -> None:
        """Once, in order, of the newest incarnation, as sent, and counted (I3)."""
        worker, incarnation, sequence = source = as_source(record)
        key = (worker, incarnation)
        course = self.course
        newest = self.listened_to(worker)
        expected = course.following.get(key, 0)
        self.blame(newest != incarnation, "incarnation", f"accepted {source} while {newest} was listened to")
        self.blame(sequence < expected, "twice", f"accepted {source} again")
        self.blame(sequence > expected, "gap", f"accepted {source} while {expected} was expected")
        self.joined(source, record["steps"])
        if not record.get("rescued"):
            self.owing(source)
        course.following[key] = max(expected, sequence + 1)
        self.ever[key] = max(self.ever.get(key, 0), sequence + 1)
        course.env_steps += record["steps"]
        told = record["env_steps"]
        self.blame(told != course.env_steps, "env_steps", f"{told} counted, {course.env_steps} came")
        self.move(record)

    def joined(self, source: Source, steps: int) -> None:
        """It was sent like this, and the rows before it are its own incarnation's, or closed (I4)."""
        worker, incarnation, _ = source
        open_rows = self.course.open_rows
        sent = self.sent.get(source, set())
        self.blame(not any(steps <= most for most in sent), "invented", f"{steps} steps of {source} were not sent")
        follows = open_rows.get(worker, incarnation)
        self.blame(follows != incarnation, "seal", f"{source} follows rows that are not sealed")
        open_rows[worker] = incarnation if steps in sent else CUT

    def owing(self, source: Source) -> None:
        """A rollout is only taken in while the learner keeps up (I7)."""
        if (band := self.opened["band"]) is not None and self.opened["ratio"] is not None:
            owed = self.allowed(self.course.env_steps) - self.course.updates - self.course.forgiven
            ready = self.head > self.tail  # else nothing can be learned before more comes in
            self.blame(ready and owed >= band, "band", f"{source} was taken in while {owed} updates were owed")

    def repeat(self, record: Record) -> None:
        """Only what was accepted can come again."""
        worker, incarnation, sequence = source = as_source(record)
        seen = sequence < self.course.following.get((worker, incarnation), 0)
        self.blame(not seen, "lost", f"{source} was called a duplicate but never accepted")

    def refuse(self, record: Record) -> None:
        """What is expected is not refused."""
        worker, incarnation, sequence = source = as_source(record)
        current = self.listened_to(worker) == incarnation
        expected = self.course.following.get((worker, incarnation), 0) == sequence
        self.blame(current and expected, "lost", f"{source} was refused although it was expected")

    def seal(self, record: Record) -> None:
        """The worker's rows are closed."""
        self.course.open_rows.pop(record["worker"], None)
        self.move(record)

    def move(self, record: Record) -> None:
        """Items come and go at the ends of the queue, and there are no more of them than steps."""
        tail = record["tail"]
        head = record["head"]
        room = self.opened["capacity"]
        items = head - self.opened["head"]
        steps = self.course.env_steps - self.opened["env_steps"]
        self.blame(tail < self.tail or head < self.head or tail > head, "items", f"[{tail}, {head}) went back")
        self.blame(head - tail > room, "items", f"{head - tail} items are more than capacity={room}")
        # After a restart some steps from before become items.
        fresh = self.opened["env_steps"] == 0 and not self.opened.get("windows")
        self.blame(fresh and items > steps, "items", f"{items} items were made of {steps} steps")
        self.tail = tail
        self.head = head

    def sample(self, record: Record) -> None:
        """Inserted, and not evicted yet."""
        wrong = [serial for serial in record["ids"] if not self.tail <= serial < self.head]
        self.blame(bool(wrong), "sampled", f"{wrong[:3]} are not among [{self.tail}, {self.head})")

    def read_replay(self, records: list[Record]) -> None:
        """A replay of its own process stored what was accepted, once, and drew what it held just then."""
        stored: set[Source] = set()
        for record in records:
            tail = record["tail"]
            head = record["head"]
            if record["op"] == "drawn":
                wrong = [serial for serial in record["ids"] if not tail <= serial < head]
                self.blame(bool(wrong), "sampled", f"{wrong[:3]} are not among [{tail}, {head})")
                continue
            worker, incarnation, sequence = source = as_source(record)
            # One beyond: whoever notes that it was accepted may be killed before.
            known = sequence <= self.ever.get((worker, incarnation), 0)
            self.blame(source in stored, "twice", f"{source} was stored again")
            self.blame(not known, "invented", f"{source} was stored but not accepted")
            stored.add(source)

    def allowed(self, steps: int) -> int:
        """How many updates so many steps allow in all."""
        return int(Fraction(self.opened["ratio"]) * max(0, steps - self.opened["start_steps"]))

    def update(self, record: Record) -> None:
        """One after the other, and never more than the steps allow (I7)."""
        course = self.course
        number = record["number"]
        self.blame(number != course.updates + 1, "update", f"update {number} follows update {course.updates}")
        course.updates = number
        course.forgiven = record["forgiven"]
        self.counters("update", {"env_steps": record["env_steps"], "updates": number})
        if self.opened["ratio"] is not None:
            most = self.allowed(course.env_steps) - course.forgiven + self.opened["ahead"]
            self.blame(number > most, "ratio", f"update {number} after {course.env_steps} steps, which allow {most}")

    def publish(self, record: Record) -> None:
        """Every version has a number of its own, and they rise."""
        version = record["version"]
        self.blame(version <= self.version, "version", f"published {version} after {self.version}")
        self.version = version
        self.published.add(version)

    def commit(self, record: Record) -> None:
        """A checkpoint's counters are those of the log so far."""
        self.counters("committed", record)
        self.committed = deepcopy(self.course)

    def close(self, record: Record) -> None:
        """At the end of a whole run no update is owed."""
        self.counters("closed", record)
        if record["done"] and self.opened["ratio"] is not None:
            made = record["updates"] + record["forgiven"]
            owed = self.allowed(record["env_steps"])
            self.blame(made != owed, "ratio", f"{made} updates at the end, {record['env_steps']} steps ask for {owed}")

    def counters(self, op: str, record: Record) -> None:
        """Are these the log's own counts?"""
        gated = self.opened["ratio"] is not None  # updates from fresh experience are not logged one by one
        told = (record["env_steps"], record["updates"] if gated else 0)
        own = (self.course.env_steps, self.course.updates if gated else 0)
        self.blame(told != own, "counters", f"{op} at {told} steps and updates, but the log counts {own}")


def as_source(record: Record) -> Source:
    """A source as it stands in a line."""
    worker, incarnation, sequence = record["source"]
    return worker, incarnation, sequence
