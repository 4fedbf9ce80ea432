"""The audit of supervision: were failed workers replaced in time and within the budget, and none silent for long?"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from qfleet.audit.history import Record
from qfleet.audit.records import Violation

SLACK_SECONDS = 5.0  # logs are written, and workers polled, about once a second


def check_supervision(records: list[Record], actors: list[Record], end: float) -> list[Violation]:
    """Everything wrong with the supervisor's records, and with the silences of actors."""
    signs_of_life: dict[tuple[int, int], list[float]] = defaultdict(list)
    for record in actors:
        worker, incarnation = record["source"][:2] if "source" in record else (record["worker"], record["incarnation"])
        signs_of_life[worker, incarnation].append(record["at"])
    found = []
    for rules, part, ended in records_by_driver(records, end):
        for worker in sorted({record["worker"] for record in part}):
            life = WorkerRecord(worker, rules)
            for record in part:
                if record["worker"] == worker:
                    life.read(record)
            life.end(ended)
            life.check_silence(signs_of_life)
            found += life.found
    return found


def records_by_driver(records: list[Record], end: float) -> Iterator[tuple[Record, list[Record], float]]:
    """The records of one driver process after the other: its rules, what it noted, and when it noted the last."""
    begins = [number for number, record in enumerate(records) if record["op"] == "supervising"]
    for begin, after in pairwise([*begins, len(records)]):
        yield records[begin], records[begin + 1 : after], end if after == len(records) else records[after - 1]["at"]


@dataclass
class WorkerRecord:
    """One worker's incarnations under one supervisor."""

    worker: int
    rules: Record
    found: list[Violation] = field(default_factory=list)
    running: int | None = None
    last: int = -1
    quarantined: bool = False
    faults: list[float] = field(default_factory=list)
    failed_at: float | None = None
    began_at: float = 0.0
    spans: list[tuple[int, float, float]] = field(default_factory=list)  # incarnation, begin, end

    def report_if(self, wrong: bool, rule: str, text: str) -> None:
        """Add a violation, if it is one."""
        if wrong:
            self.found.append(Violation(rule, f"worker {self.worker}: {text}"))

    def read(self, record: Record) -> None:
        """Check one record of the supervisor."""
        if record["op"] == "started":
            self.start(record["incarnation"], record["at"])
        elif record["op"] == "quarantined":
            self.quarantined = True
            self.failed_at = None
            within = self.recent_faults(record["at"]) <= self.rules["restarts"]
            self.report_if(within, "budget", "quarantined within its budget")
        else:
            other = record["incarnation"] != self.running
            self.report_if(other, "order", f"incarnation {record['incarnation']} is {record['op']} but does not run")
            self.fail(record["at"])

    def recent_faults(self, now: float) -> int:
        """Faults within the window."""
        return sum(now - at < self.rules["window_seconds"] for at in self.faults)

    def start(self, incarnation: int, now: float) -> None:
        """A new incarnation starts, which is right only where none runs."""
        self.report_if(self.quarantined, "budget", f"incarnation {incarnation} was started in quarantine")
        faults = self.recent_faults(now)
        self.report_if(faults > self.rules["restarts"], "budget", f"started after {faults} faults")
        beside = self.running is not None
        self.report_if(beside, "order", f"incarnation {incarnation} was started beside {self.running}")
        self.report_if(incarnation <= self.last, "incarnation", f"incarnation {incarnation} follows {self.last}")
        self.check_replaced(now)
        self.running = incarnation
        self.last = incarnation
        self.began_at = now

    def fail(self, now: float) -> None:
        """It is dead or hung."""
        if self.running is not None:
            self.spans.append((self.running, self.began_at, now))
        self.running = None
        self.failed_at = now
        self.faults.append(now)

    def check_replaced(self, now: float) -> None:
        """It was replaced in time."""
        late = self.failed_at is not None and now - self.failed_at > self.rules["replace_seconds"]
        self.report_if(late, "late", f"failed at {self.failed_at}, not replaced before {now}")
        self.failed_at = None

    def end(self, now: float) -> None:
        """The driver has ended."""
        if self.running is not None:
            self.spans.append((self.running, self.began_at, now))
        self.check_replaced(now)

    def check_silence(self, signs_of_life: dict[tuple[int, int], list[float]]) -> None:
        """No incarnation stayed silent for much longer than its limit."""
        hung = self.rules["hung_seconds"]
        start = self.rules["start_seconds"]
        if hung is None:
            return
        for incarnation, begin, end in self.spans:
            signs = [at for at in signs_of_life[self.worker, incarnation] if begin <= at <= end]
            first = next(iter(signs), end)
            silence = max((after - at for at, after in pairwise([*signs, end])), default=0.0)
            self.report_if(silence > hung + SLACK_SECONDS, "silent", f"incarnation {incarnation} for {silence:.1f} s")
            asleep = first - begin > max(hung, start) + SLACK_SECONDS
            self.report_if(asleep, "silent", f"incarnation {incarnation} for {first - begin:.1f} s after its start")
