"""Operation logs: what every role did, one JSON line each, for the audit after a run (`qfleet/audit`).

A folder holds any number of `*.jsonl` files. Lines of one file are in the order in which things happened; files of one
role are read in the order of their names. Call `note(role, op, **fields)` with a role and an operation of the table
below; all fields listed are needed, and others may be added. `at` (seconds, monotonic) is added to each line. `source`
is [worker, incarnation, sequence]; `tail` and `head` bound the serial numbers that can be drawn from the replay just
after the operation; `env_steps` and `updates` count from the start of the run and are those just after it.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from qfleet.files import open_log

MAX_LINE_BYTES = 1 << 20
Record: TypeAlias = dict[str, Any]

OPERATIONS: dict[str, dict[str, str]] = {
    # It accepts rollouts; the other logs are compared with the log of its operations.
    "learner": {
        # First of all, and again after going back to a checkpoint (resume or roll-back): the counters are then those of
        # the newest `committed`, or of the first `opened` if there is none. ratio ("1/4": updates per step, None: no
        # limiter), band (a rollout is accepted only while fewer updates than this are missing; None: not promised),
        # ahead (updates that may be made for steps that are in flight: 0 if none), capacity (items). Also windows
        # (True: items are windows of rows, which may outnumber the steps).
        "opened": "ratio start_steps band ahead capacity env_steps updates tail head",
        "began": "worker incarnation",  # older incarnations are refused from here on
        "dismissed": "worker",  # it was lost, and is refused until its next incarnation began
        # steps: those counted into env_steps. Fewer than were sent: the rest was cut off, and nothing of this worker
        # may follow before it is sealed. Also rescued (True if it was found in the queue of a lost actor: the band does
        # not hold for it).
        "accepted": "source steps env_steps tail head",
        "duplicate": "source",
        "refused": "source",
        "sealed": "worker tail head",  # its lanes; needed before the first `accepted` of a later incarnation
        "sampled": "ids",  # some of the serial numbers of a batch
        "update": "number env_steps forgiven",  # number (1 for the first), forgiven (missing ones that are never made)
        "published": "version",  # noted before it can be seen
        "committed": "env_steps updates",  # noted after the checkpoint became visible
        "closed": "env_steps updates forgiven done",  # done (True: the run reached its end)
    },
    "actor": {
        "sent": "source steps",  # noted before it can be seen, and again each time the same one is sent
        "acked": "source verdict",  # "accept", "duplicate" or "refuse"; only where the channel replies
        "loaded": "worker incarnation version",  # the weights that it acts with from here on
        "ticked": "worker incarnation",  # about once a second while its progress counter moves, also in its waits
    },
    # In a process of its own.
    "replay": {
        "stored": "source tail head",
        "drawn": "ids tail head",  # some of the serial numbers of a batch
    },
    "supervisor": {
        # First of all, and again when all workers start again. hung_seconds (None: clocks of the roles do not agree),
        # replace_seconds (from a fault to the next start, at most).
        "supervising": "restarts window_seconds hung_seconds start_seconds replace_seconds",
        "started": "worker incarnation",
        "dead": "worker incarnation",
        "hung": "worker incarnation",
        "senseless": "worker incarnation",  # it sent an impossible rollout
        "quarantined": "worker",
    },
    # Several learners with one set of weights; written by rank 0, whose own number is 0.
    "team": {
        "began": "group",  # the run starts, or is resumed
        # group (1 for the first), learners (their numbers, without 0), updates (made so far), in_step (True: all make
        # the same update at the same time), exact (True: no gradient is left out).
        "formed": "group learners updates in_step exact",
        "dealt": "group update learner items",  # a share of the batch was sent to it, for this update
        "learned": "group learner",  # it replied that its gradient was used
        # group (0: alone), own (items that rank 0 learned from), items (of the batch), finite (False: it changed
        # nothing, and the number is used again).
        "made": "group update own items finite",
        "held": "group versions taken",  # when all are idle: steps and gradients, by shard
    },
}
NEEDED = {(role, op): frozenset(names.split()) for role, ops in OPERATIONS.items() for op, names in ops.items()}
# Other processes may act on these, so they are in the file before: a kill right after leaves no gap in the history.
AT_ONCE = {"opened", "began", "dismissed", "accepted", "sealed", "published", "committed", "closed", "sent"}
AT_ONCE |= {"stored", "drawn"}  # a replay's process is killed at the end of a run
FLUSH_LINES = 256
FLUSH_SECONDS = 1.0
NOTED_IDS = 8  # of each batch


class NoHistory:
    """Records nothing, for usual runs."""

    def note(self, role: str, op: str, **fields: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class History:
    """Appends to one file: operations that others act on at once, the rest at intervals. One writer per file."""

    def __init__(self, file: Path, *, limit_bytes: int = 1 << 28, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.pending = list[bytes]()
        self.flushed_at = clock()
        self.stream = os.fdopen(open_log(file, os.O_RDWR), "ab", buffering=0)
        self.left = limit_bytes - cut_torn_line(self.stream.fileno())  # an audit reports that the rest is missing

    def note(self, role: str, op: str, **fields: Any) -> None:
        """Record one operation with the fields that this module lists."""
        needed = NEEDED.get((role, op))
        if needed is None or not needed <= fields.keys():
            raise ValueError(f"{role} {op}: needs {sorted(needed - fields.keys()) if needed else 'another name'}")
        now = self.clock()
        self.append({"role": role, "op": op, "at": round(now, 6), **fields})
        if op in AT_ONCE or len(self.pending) >= FLUSH_LINES or now - self.flushed_at >= FLUSH_SECONDS:
            self.flush(now)

    def append(self, record: Record) -> None:
        """Keep a record until the next flush, unless the file is full."""
        line = msgspec.json.encode(record) + b"\n"
        if 0 <= self.left < len(line):
            self.pending.append(b'{"role":"","op":"full"}\n')
        self.left -= len(line)
        if self.left >= 0:
            self.pending.append(line)

    def flush(self, now: float) -> None:
        """Write pending records in one call, which a kill does not divide."""
        if self.pending:
            self.stream.write(b"".join(self.pending))
        self.pending.clear()
        self.flushed_at = now

    def close(self) -> None:
        """Write pending records and close the file."""
        if not self.stream.closed:
            self.flush(self.clock())
            self.stream.close()


HistoryLog: TypeAlias = History | NoHistory


def cut_torn_line(file: int) -> int:
    """Remove an incomplete last line, which a power loss leaves; returns the bytes that stay."""
    size = os.fstat(file).st_size
    start = max(0, size - MAX_LINE_BYTES)
    end = start + os.pread(file, size - start, start).rfind(b"\n") + 1
    os.ftruncate(file, end)
    return end
