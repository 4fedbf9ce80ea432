"""Runs the members of a sweep, shows what they report, and keeps group.json up to date."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfleet.files import read_inside, require_regular_files
from qfleet.plan import to_toml
from qfleet.plan.schema import Plan
from qfleet.plan.secrets import write_run_plan
from qfleet.plan.toml import LARGEST_FILE_BYTES
from qfleet.sweep.capacity import Capacity
from qfleet.sweep.member_main import PLAN_FILE
from qfleet.sweep.member_process import MemberMessage, MemberRow, MemberSetup, MemberWarning
from qfleet.sweep.process_pool import ProcessPool, outcome
from qfleet.system.worker_errors import FinalError
from qfleet.training.process.forward_signals import ENDINGS
from qfleet.training.process.signals import LeftAtOnce, StopRequest, listening
from qfleet.watch import read_json, write_file
from qfleet.watch.provenance import resume_command
from qfleet.watch.run_directory import GROUP_FILE
from qfleet.watch.run_files import unwritable_error
from qfleet.watch.sweep_console import GroupWatcher

FORMAT = 1
# Of several exit codes the sweep returns the first of these: a bug first, what can simply be resumed last.
EXIT_CODE_ORDER = (1, 3, 4, 5, 6, 2, 75, 143, 130)
# The fields of a member's rows that a display shows.
SHOWN_FIELDS = ("env_steps", "updates", "seconds", "return_mean", "steps_per_second")


@dataclass
class Member:
    """One run of a sweep, and its present state."""

    name: str
    seed: int
    plan: str  # hash
    state: str = "waiting"
    exit_code: int | None = None
    reason: str = ""
    steps: int | None = None  # another end than the one in its own folder
    shown: dict[str, Any] = field(default_factory=dict)
    error: FinalError | None = None

    def entry(self) -> dict[str, Any]:
        """Its entry in group.json."""
        fields = ("name", "seed", "plan", "state", "exit_code", "reason")
        return {key: getattr(self, key) for key in fields}

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Keep what a display shows of a row."""
        self.shown |= {key: row[key] for key in SHOWN_FIELDS if row.get(key) is not None}
        if row.get("kind") == "eval" and row.get("split") != "test":
            self.shown["evaluation"] = row.get("mean")
        if row.get("kind") == "end":
            self.shown["score"] = row.get("score")

    def summary(self) -> dict[str, Any]:
        """What a display shows of it."""
        return {**self.shown, **self.entry()}


class SweepRunner:
    """Runs members of a sweep, whose lock is held, and keeps group.json up to date."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        members: list[Member],
        capacity: Capacity,
        origin: dict[str, Any],
        watcher: GroupWatcher | None,
    ) -> None:
        self.folder = folder
        self.plan = plan
        self.capacity = capacity
        self.origin = origin  # where the sweep comes from: fields of group.json
        self.members = {member.name: member for member in members}
        self.watcher = watcher
        self.options: dict[str, Any] = {}  # fields of every member's setup
        self.began_at = time.monotonic()

    def run(self, todo: list[Member]) -> None:
        """Run these members, and record how the sweep ended."""
        with listening(self.watcher) as stop_request:
            for member in todo:
                member.state = "waiting"
                member.exit_code = None
                member.reason = ""
                member.shown["until_steps"] = self.plan.until.steps
            self._write_plan()
            self._notify("start", self._introduction())
            try:
                self._process_pool(todo, stop_request).run()
            except BaseException as error:
                self._end(*self._failure(error))
                raise
            self._end(*self._ending(stop_request.name))

    def _write_plan(self) -> None:
        """Write plan.toml and group.json; a kill between any two of these writes leaves a pair that fits."""
        self._write("running", None, "", before=file_hash(self.folder / PLAN_FILE))
        write_run_plan(self.plan, self.folder / PLAN_FILE)
        self._write("running", None, "")

    def _process_pool(self, todo: list[Member], stop_request: StopRequest) -> ProcessPool:
        try:
            require_regular_files(self.folder, "logs")
        except OSError as error:
            raise unwritable_error(self.folder / "logs", error) from error
        return ProcessPool(
            [self._setup(member) for member in todo],
            self.capacity.jobs,
            self.capacity.threads,
            self.capacity.cores,
            stop_request,
            on_start=self._started,
            on_message=self._receive,
            on_end=self._ended,
            on_poll=lambda: self._notify("live", [shown(member, stop_request) for member in self.members.values()]),
        )

    def _setup(self, member: Member) -> MemberSetup:
        source = self.origin.get("weights_from")
        log = self.folder / "logs" / f"{member.name}.log"
        weights_from = Path(source) if source else None
        return MemberSetup(self.folder, member.name, log, member.seed, member.steps, weights_from, **self.options)

    def _started(self, name: str) -> None:
        self.members[name].state = "running"
        self._write("running", None, "")

    def _receive(self, name: str, message: MemberMessage) -> None:
        match message:
            case FinalError():
                self.members[name].error = message
            case MemberWarning(text=text):
                self._notify("warn", name, text)
            case MemberRow(row=row):
                self.members[name].add_row(row)
                self._notify("row", name, row)

    def _ended(self, name: str, code: int) -> None:
        member = self.members[name]
        status = read_json(self.folder / name / "status.json")
        member.state, member.exit_code, member.reason = outcome(code, status, member.error)
        self._write("running", None, "")
        self._notify("finished", member.summary())

    def _notify(self, method: str, *values: Any) -> None:
        if self.watcher is not None:
            getattr(self.watcher, method)(*values)

    def _introduction(self) -> dict[str, Any]:
        return {
            "group": str(self.folder),
            "env": self.plan.env.id,
            "members": [member.name for member in self.members.values()],
            "jobs": self.capacity.jobs,
            "threads": self.capacity.threads,
            "notes": list(self.capacity.notes),
        }

    def _ending(self, signal_name: str | None) -> tuple[str, int, str]:
        """The sweep's state, exit code and reason."""
        codes = {member.name: member.exit_code for member in self.members.values()}
        done = sum(code == 0 for code in codes.values())
        if done == len(codes):
            return "done", 0, f"all {done} members are done"
        if signal_name is not None:
            return *ENDINGS[signal_name], f"stopped by {signal_name}, {done} of {len(codes)} members are done"
        failed = {name: code for name, code in codes.items() if code}
        worst = min(failed.values(), key=lambda code: EXIT_CODE_ORDER.index(code) if code in EXIT_CODE_ORDER else -1)
        named = ", ".join(f"{name} ({self.members[name].state})" for name in failed)
        return "failed", worst, f"{done} of {len(codes)} members are done, not {named}"

    def _failure(self, error: BaseException) -> tuple[str, int, str]:
        for member in self.members.values():
            if member.state == "running":
                member.state = "stopped"
                member.exit_code = 75
                member.reason = "the group's own process failed"
        if isinstance(error, LeftAtOnce):
            return "interrupted", 130, "left at once, by SIGINT"
        return "failed", int(getattr(error, "exit_code", 1)), f"{type(error).__name__}: {error}".splitlines()[0]

    def _end(self, state: str, code: int, reason: str) -> None:
        sums = {
            key: sum(each.shown.get(key) or 0 for each in self.members.values()) for key in ("env_steps", "updates")
        }
        row = {"kind": "end", "seconds": round(time.monotonic() - self.began_at, 3), **sums}
        row |= {"group": str(self.folder), "state": state, "exit_code": code, "reason": reason}
        row["members"] = [member.entry() for member in self.members.values()]
        try:
            self._write(state, code, reason)
        finally:
            self._notify("stop", row)

    def _write(self, state: str, code: int | None, reason: str, before: str | None = None) -> None:
        """Write group.json; equal contents are equal bytes."""
        document = {
            "format": FORMAT,
            "env": self.plan.env.id,
            "plan_sha256": hashlib.sha256(to_toml(self.plan).encode()).hexdigest(),
            **({} if before is None else {"plan_sha256_before": before}),
            "state": state,
            "exit_code": code,
            "reason": reason,
            "resume": resume_command(self.folder),
            "members": [member.entry() for member in self.members.values()],
            **self.origin,
        }
        text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"
        write_file(self.folder / GROUP_FILE, text.encode("ascii"))


def shown(member: Member, stop_request: StopRequest) -> dict[str, Any]:
    """What a display shows of a member; those that still run after a stop request are saving."""
    saving = stop_request and member.state == "running"
    return {**member.summary(), **({"state": "saving"} if saving else {})}


def file_hash(file: Path) -> str:
    """The SHA-256 of a file of the sweep."""
    return hashlib.sha256(read_inside(file.parent, file.name, LARGEST_FILE_BYTES)).hexdigest()
