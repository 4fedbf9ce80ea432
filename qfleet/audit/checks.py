"""The audit of a history: did the run keep its promises I3, I6, I7, I8 and I9? Fields: see `qfleet.audit.history`.

A rollout that was sent but never acknowledged may have been accepted once or not at all; neither is a violation.
"""

from bisect import bisect
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

from qfleet.audit.gradients import check_gradients
from qfleet.audit.history import OPERATIONS, Record
from qfleet.audit.records import Violation, read_history
from qfleet.audit.supervision import check_supervision

Key: TypeAlias = tuple[int, int]  # worker, incarnation
Source: TypeAlias = tuple[int, int, int]
CUT = -1  # the end of these rows was cut off: not even rows of their own incarnation may follow


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
    """Everything wrong with these records; those of one role are in order."""
    audit = Audit()
    by_role: dict[str, list[Record]] = {role: [] for role in OPERATIONS}
    for record in records:
        by_role[record["role"]].append(record)
    # What was sent and published is read before what was accepted and loaded is checked.
    audit.read_sent(by_role["actor"])
    audit.read_learner(by_role["learner"])
    audit.read_actors(by_role["actor"], [record["at"] for record in by_role["learner"] if record["op"] == "opened"])
    audit.read_replay(by_role["replay"])
    last = max((record["at"] for record in (*by_role["learner"], *by_role["supervisor"])), default=0.0)
    lives = check_supervision(by_role["supervisor"], by_role["actor"], last)
    return audit.found + lives + check_gradients(by_role["team"])


@dataclass
class RunRecord:
    """The learner's state as its log has it; the run goes back to an earlier one with a checkpoint."""

    env_steps: int = 0
    updates: int = 0
    forgiven: int = 0
    newest: dict[int, int] = field(default_factory=dict)  # worker: incarnation begun last
    lost_workers: set[int] = field(default_factory=set)
    following: dict[Key, int] = field(default_factory=dict)  # the sequence that comes next
    open_rows: dict[int, int] = field(default_factory=dict)  # worker: incarnation whose rows are not sealed


@dataclass
class Audit:
    """Reads the logs of all roles and collects violations; `on_OP` checks one operation of the learner."""

    found: list[Violation] = field(default_factory=list)
    sent: dict[Source, set[int]] = field(default_factory=dict)  # with how many steps
    accepted: dict[Key, int] = field(default_factory=dict)  # sequences ever accepted, also before the run went back
    published: set[int] = field(default_factory=set)
    state: RunRecord = field(default_factory=RunRecord)
    committed: RunRecord = field(default_factory=RunRecord)
    opened: Record = field(default_factory=dict)
    version: int = 0
    tail: int = 0
    head: int = 0

    def report_if(self, wrong: bool, rule: str, text: str) -> None:
        """Add a violation, if it is one."""
        if wrong:
            self.found.append(Violation(rule, text))

    # Actors

    def read_sent(self, records: list[Record]) -> None:
        """Collect the rollouts that may be accepted."""
        for record in records:
            if record["op"] == "sent":
                self.sent.setdefault(as_source(record), set()).add(record["steps"])

    def read_actors(self, records: list[Record], opened_at: list[float]) -> None:
        """Each actor's versions rise, and acknowledged rollouts were accepted."""
        acting: dict[tuple[Key, int], int] = {}
        for record in records:
            if record["op"] == "loaded":
                version = record["version"]
                actor = (record["worker"], record["incarnation"])
                # After going back to a checkpoint, numbers of incarnations that came after it may be used again.
                life = (actor, bisect(opened_at, record["at"]))
                older = version < acting.get(life, version)
                self.report_if(older, "version", f"{actor} went back to version {version}")
                unknown = version not in self.published
                self.report_if(unknown, "version", f"{actor} acts with {version}, never published")
                acting[life] = version
            elif record["op"] == "acked" and record["verdict"] != "refuse":
                worker, incarnation, sequence = as_source(record)
                kept = sequence < self.accepted.get((worker, incarnation), 0)
                self.report_if(not kept, "acked", f"{record['source']} was acknowledged but not accepted")

    # The learner

    def read_learner(self, records: list[Record]) -> None:
        """Every operation in order."""
        for record in records:
            op = record["op"]
            early = not self.opened and op != "opened"
            self.report_if(early, "order", f"{op} before opened")
            if not early:
                getattr(self, f"on_{op}")(record)

    def on_opened(self, record: Record) -> None:
        """The first counters are taken as they are, later ones must be those of the last commit."""
        if not self.opened:
            self.committed = RunRecord(record["env_steps"], record["updates"])
        self.state = deepcopy(self.committed)
        self.opened = record
        self.version = 0
        self.state.forgiven = record.get("forgiven", self.state.forgiven)
        self.check_counters("opened", record)
        self.tail = record["tail"]
        self.head = record["head"]

    def on_began(self, record: Record) -> None:
        """Incarnations of a worker only rise."""
        worker = record["worker"]
        incarnation = record["incarnation"]
        older = incarnation < self.state.newest.get(worker, -1)
        self.report_if(older, "incarnation", f"worker {worker} went back to incarnation {incarnation}")
        self.state.newest[worker] = incarnation
        self.state.lost_workers.discard(worker)

    def on_dismissed(self, record: Record) -> None:
        """Nothing may be accepted from this worker until its next incarnation."""
        self.state.lost_workers.add(record["worker"])

    def accepted_incarnation(self, worker: int) -> int | None:
        """The incarnation whose rollouts may be accepted, if there is one."""
        return None if worker in self.state.lost_workers else self.state.newest.get(worker)

    def on_accepted(self, record: Record) -> None:
        """Once, in order, of the newest incarnation, as sent, and counted (I3)."""
        worker, incarnation, sequence = source = as_source(record)
        key = (worker, incarnation)
        state = self.state
        newest = self.accepted_incarnation(worker)
        expected = state.following.get(key, 0)
        self.report_if(newest != incarnation, "incarnation", f"accepted {source} while only {newest} may be accepted")
        self.report_if(sequence < expected, "twice", f"accepted {source} again")
        self.report_if(sequence > expected, "gap", f"accepted {source} while {expected} was expected")
        self.check_rows(source, record["steps"])
        if not record.get("rescued"):
            self.check_band(source)
        state.following[key] = max(expected, sequence + 1)
        self.accepted[key] = max(self.accepted.get(key, 0), sequence + 1)
        state.env_steps += record["steps"]
        noted = record["env_steps"]
        self.report_if(noted != state.env_steps, "env_steps", f"{noted} counted, {state.env_steps} came")
        self.check_items(record)

    def check_rows(self, source: Source, steps: int) -> None:
        """It was sent with these steps, and the rows before it are of its incarnation, or sealed (I4)."""
        worker, incarnation, _ = source
        open_rows = self.state.open_rows
        sent = self.sent.get(source, set())
        self.report_if(not any(steps <= most for most in sent), "invented", f"{steps} steps of {source} were not sent")
        follows = open_rows.get(worker, incarnation)
        self.report_if(follows != incarnation, "seal", f"{source} follows rows that are not sealed")
        open_rows[worker] = incarnation if steps in sent else CUT

    def check_band(self, source: Source) -> None:
        """A rollout is accepted only while the learner keeps up (I7)."""
        if (band := self.opened["band"]) is not None and self.opened["ratio"] is not None:
            missing = self.allowed_updates(self.state.env_steps) - self.state.updates - self.state.forgiven
            # Without items nothing can be learned before more arrives.
            late = missing >= band and self.head > self.tail
            self.report_if(late, "band", f"{source} was accepted while {missing} updates were missing")

    def on_duplicate(self, record: Record) -> None:
        """Only an accepted rollout can have a duplicate."""
        worker, incarnation, sequence = source = as_source(record)
        seen = sequence < self.state.following.get((worker, incarnation), 0)
        self.report_if(not seen, "lost", f"{source} was called a duplicate but never accepted")

    def on_refused(self, record: Record) -> None:
        """The expected rollout is not refused."""
        worker, incarnation, sequence = source = as_source(record)
        current = self.accepted_incarnation(worker) == incarnation
        expected = self.state.following.get((worker, incarnation), 0) == sequence
        self.report_if(current and expected, "lost", f"{source} was refused although it was expected")

    def on_sealed(self, record: Record) -> None:
        """The worker's rows are sealed."""
        self.state.open_rows.pop(record["worker"], None)
        self.check_items(record)

    def check_items(self, record: Record) -> None:
        """Items are added at the head and removed at the tail, and there are no more of them than steps."""
        tail = record["tail"]
        head = record["head"]
        room = self.opened["capacity"]
        items = head - self.opened["head"]
        steps = self.state.env_steps - self.opened["env_steps"]
        self.report_if(tail < self.tail or head < self.head or tail > head, "items", f"[{tail}, {head}) went back")
        self.report_if(head - tail > room, "items", f"{head - tail} items are more than capacity={room}")
        # After a restart some steps from before become items.
        fresh = self.opened["env_steps"] == 0 and not self.opened.get("windows")
        self.report_if(fresh and items > steps, "items", f"{items} items were made of {steps} steps")
        self.tail = tail
        self.head = head

    def on_sampled(self, record: Record) -> None:
        """Sampled items were inserted and not evicted yet."""
        self.check_sampled(record["ids"], self.tail, self.head)

    def check_sampled(self, ids: list[int], tail: int, head: int) -> None:
        """All serial numbers are among those that can be drawn."""
        wrong = [serial for serial in ids if not tail <= serial < head]
        self.report_if(bool(wrong), "sampled", f"{wrong[:3]} are not among [{tail}, {head})")

    def read_replay(self, records: list[Record]) -> None:
        """A replay process stored accepted rollouts, once each, and sampled items that it held."""
        stored: set[Source] = set()
        for record in records:
            if record["op"] == "drawn":
                self.check_sampled(record["ids"], record["tail"], record["head"])
                continue
            worker, incarnation, sequence = source = as_source(record)
            # One beyond: the learner may be killed before it records that it accepted the rollout.
            known = sequence <= self.accepted.get((worker, incarnation), 0)
            self.report_if(source in stored, "twice", f"{source} was stored again")
            self.report_if(not known, "invented", f"{source} was stored but not accepted")
            stored.add(source)

    def allowed_updates(self, steps: int) -> int:
        """Updates that this many steps allow in all."""
        return int(Fraction(self.opened["ratio"]) * max(0, steps - self.opened["start_steps"]))

    def on_update(self, record: Record) -> None:
        """One after the other, and never more than the steps allow (I7)."""
        state = self.state
        number = record["number"]
        self.report_if(number != state.updates + 1, "update", f"update {number} follows update {state.updates}")
        state.updates = number
        state.forgiven = record["forgiven"]
        self.check_counters("update", {"env_steps": record["env_steps"], "updates": number})
        if self.opened["ratio"] is not None:
            most = self.allowed_updates(state.env_steps) - state.forgiven + self.opened["ahead"]
            self.report_if(number > most, "ratio", f"update {number} after {state.env_steps} steps, which allow {most}")

    def on_published(self, record: Record) -> None:
        """Every version has a number of its own, and they rise."""
        version = record["version"]
        self.report_if(version <= self.version, "version", f"published {version} after {self.version}")
        self.version = version
        self.published.add(version)

    def on_committed(self, record: Record) -> None:
        """A checkpoint's counters are those of the log so far."""
        self.check_counters("committed", record)
        self.committed = deepcopy(self.state)

    def on_closed(self, record: Record) -> None:
        """At the end of a run no update is missing."""
        self.check_counters("closed", record)
        if record["done"] and self.opened["ratio"] is not None:
            made = record["updates"] + record["forgiven"]
            steps = record["env_steps"]
            due = self.allowed_updates(steps)
            self.report_if(made != due, "ratio", f"{made} updates at the end, {steps} steps ask for {due}")

    def check_counters(self, op: str, record: Record) -> None:
        """The recorded counters are those of the log."""
        limited = self.opened["ratio"] is not None  # updates from fresh experience are not logged one by one
        noted = (record["env_steps"], record["updates"] if limited else 0)
        own = (self.state.env_steps, self.state.updates if limited else 0)
        self.report_if(noted != own, "counters", f"{op} at {noted} steps and updates, but the log counts {own}")


def as_source(record: Record) -> Source:
    """The source of a record."""
    worker, incarnation, sequence = record["source"]
    return worker, incarnation, sequence
