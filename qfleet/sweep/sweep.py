"""Several seeds of one plan side by side: a group of runs, each in a process of its own.

A group is a folder with `group.json`, `plan.toml` (the plan of all members but for their seeds), and a run folder
`seed-<s>` for each member. What a member has done is in its own folder; `group.json` says who belongs here.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from qfleet.api import checked
from qfleet.build.components import make_train_world
from qfleet.build.memory_check import estimate, require_memory
from qfleet.build.resolve import resolve
from qfleet.errors import UsageError
from qfleet.files import is_folder, list_inside, read_inside, remove_drafts, require_regular_files
from qfleet.plan import plan_hash, read_plan, to_toml, trusted_settings
from qfleet.plan.local_paths import local_path
from qfleet.plan.naming import algorithm_name
from qfleet.plan.schema import Plan
from qfleet.plan.secrets import redacted_arguments
from qfleet.plan.toml import LARGEST_FILE_BYTES
from qfleet.save import hold_run
from qfleet.sweep.member_main import PLAN_FILE
from qfleet.sweep.process_pool import Job, ProcessPool, outcome
from qfleet.training.env_trust import require_places, require_trust, sign, write_run_plan
from qfleet.training.process.forward_signals import ENDINGS
from qfleet.training.process.signals import StopRequest, listening
from qfleet.watch import find_run, new_run_dir, read_json, remove_run, write_file
from qfleet.watch.compare import Comparison, compare
from qfleet.watch.console import auto_mode
from qfleet.watch.run_directory import (
    GROUP_FILE,
    check_name,
    find_run_or_group,
    is_run,
    member_dirs,
    next_name,
    read_tables,
    resume_command,
)
from qfleet.watch.run_files import last_rows, unwritable_error
from qfleet.watch.sweep_console import GroupWatcher, make_group_watcher

FORMAT = 1
# A Python process with torch imported, beside its replay.
PROCESS_BYTES = 600 << 20
MEMORY_SHARE = 0.9
# Of several exit codes the group answers with the first of these: a bug first, what can simply be resumed last.
WORST = (1, 3, 4, 5, 6, 2, 75, 143, 130)
# What a display shows of a member comes from these fields of its rows.
SHOWN = ("env_steps", "updates", "seconds", "return_mean", "steps_per_second")


@dataclass
class Member:
    """One run of a group, and how it stands."""

    name: str
    seed: int
    plan: str  # hash
    state: str = "waiting"
    exit_code: int | None = None
    reason: str = ""
    steps: int | None = None  # another end than the one in its own folder
    shown: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        """What group.json says of it."""
        kept = ("name", "seed", "plan", "state", "exit_code", "reason")
        return {key: getattr(self, key) for key in kept}

    def see(self, row: Mapping[str, Any]) -> None:
        """Keep what a display shows."""
        self.shown |= {key: row[key] for key in SHOWN if row.get(key) is not None}
        if row.get("kind") == "eval" and row.get("split") != "test":
            self.shown["evaluation"] = row.get("mean")
        if row.get("kind") == "end":
            self.shown["score"] = row.get("score")

    def show(self) -> dict[str, Any]:
        """For a display."""
        return {**self.shown, **self.entry()}


class Group:
    """A group on disk."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def status(self) -> dict[str, Any]:
        """group.json as it is now."""
        return read_json(self.path / GROUP_FILE)

    @property
    def exit_code(self) -> int:
        """What the command line would have returned."""
        return int(self.status.get("exit_code") or 0)

    @property
    def members(self) -> list[Path]:
        """The run folders of members that have begun; `qfleet.load` takes each."""
        return member_dirs(self.path)

    def compare(self) -> Comparison:
        """Scores of all members, and their aggregates with intervals."""
        return compare(self.path)

    def __repr__(self) -> str:
        """Where it is and how it stands."""
        return f"Group({str(self.path)!r}, state={self.status.get('state')!r})"


class Capacity(NamedTuple):
    """How many members run at once on this machine, each with so many threads."""

    jobs: int
    threads: int
    notes: tuple[str, ...]


# --- what users call ---


def train_group(
    plan: Plan,
    seeds: int | Sequence[int] = 5,
    *,
    jobs: int | None = None,
    out: Path | str = "runs",
    name: str | None = None,
    weights_from: Path | str | None = None,
    watcher: GroupWatcher | None = None,
    command: list[str] | None = None,
) -> Group:
    """Train one plan with several seeds, from the plan's own on, as many at once as the machine has room for."""
    plan = checked(plan)
    out = local_path(out)
    if name is not None:
        check_name(name)
    members = [Member(f"seed-{each}", each, _plan_id(plan, each)) for each in _numbers(plan, seeds)]
    room = find_room(plan, len(members), jobs)
    source = None if weights_from is None else find_run(weights_from, out).resolve()
    folder = new_run_dir(out, plan.env.id, next_name(plan.env.id, algorithm_name(plan)) if name is None else name)
    write_run_plan(plan, folder / PLAN_FILE)
    sign(folder, plan.env, trusted_settings(plan))
    kept = {
        "command": None if command is None else redacted_arguments(command),
        "weights_from": None if source is None else str(source),
    }
    with hold_run(folder):
        return _SweepRunner(folder, plan, members, room, kept, watcher).run(members)


def resume_group(
    path: Path | str,
    *,
    steps: int | None = None,
    jobs: int | None = None,
    out: Path | str = "runs",
    trust_env: bool = False,
    trust_run: bool = False,
    strict: bool = False,
    watcher: GroupWatcher | None = None,
) -> Group:
    """Go on with the members of a group that have not come to their end; `steps` moves the end of all."""
    folder = find_run_or_group(path, out)
    plan, members, kept = _open(folder)
    require_trust(folder, plan.env, trust_env or trust_run)
    require_places(folder, plan, trust_run)
    if steps is not None:
        plan = msgspec.structs.replace(plan, until=msgspec.structs.replace(plan.until, steps=steps))
        members = [Member(each.name, each.seed, _plan_id(plan, each.seed)) for each in members]
    with hold_run(folder):
        for member in members:
            _recall(member, folder / member.name, plan.until.steps)
            member.steps = steps if steps is not None else member.steps
        todo = [member for member in members if member.steps is not None or member.exit_code != 0]
        room = find_room(plan, len(todo), jobs) if todo else Capacity(1, 1, ())
        run_session = _SweepRunner(folder, plan, members, room, kept, watcher)
        flags = {"--trust-env": trust_env, "--trust-run": trust_run, "--strict": strict}
        run_session.options = [word for word, given in flags.items() if given]
        return run_session.run(todo)


# --- before the start ---


def _numbers(plan: Plan, seeds: int | Sequence[int]) -> list[int]:
    numbers = [plan.seed + index for index in range(seeds)] if isinstance(seeds, int) else list(seeds)
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"seeds={seeds} does not make a group",
            "Each member needs a seed of its own, 0 or above.",
            "Give how many there are to be, for example 5, or a list such as [0, 1, 2].",
        )
    return numbers


def _plan_id(plan: Plan, seed: int) -> str:
    return plan_hash(msgspec.structs.replace(plan, seed=seed))


def find_room(plan: Plan, num: int, jobs: int | None = None) -> Capacity:
    """As many members at once as there are cores for their threads and memory for their replays."""
    with closing(make_train_world(plan)) as world:
        plan = resolve(plan, world.spec)
        require_memory(plan, world.spec)
        needs = estimate(plan, world.spec)
    threads = plan.runtime.threads or 1
    alone = plan.runtime.device not in (None, "cpu")  # how much of an accelerator a member needs is not known
    wanted = min(num, jobs or (1 if alone else max(1, cores() // threads)))
    fitting = int(MEMORY_SHARE * needs["available_bytes"]) // (needs["replay_bytes"] + PROCESS_BYTES)
    at_once = max(1, min(wanted, fitting))
    notes = [f"memory for {at_once} at once, not for {wanted}"] if at_once < wanted else []
    if alone and jobs is None and num > 1:
        notes.append(f"one at once on {plan.runtime.device}; --jobs says how many it has room for")
    return Capacity(at_once, threads, tuple(notes))


def cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use; a container may be allowed the time of fewer than it sees."""
    seen = len(os.sched_getaffinity(0))
    try:
        most, period = quota.read_text().split()[:2]
        return max(1, min(seen, int(most) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max": no limit
        return seen


def _open(folder: Path) -> tuple[Plan, list[Member], dict[str, Any]]:
    """A group from its folder, if it is whole."""
    status = read_json(folder / GROUP_FILE)
    try:
        members = [
            Member(f"seed-{int(each['seed'])}", int(each["seed"]), str(each["plan"])) for each in status["members"]
        ]
    except (KeyError, TypeError, ValueError):
        members = []
    if status.get("format") != FORMAT or not members:
        raise UsageError(
            f"{folder / GROUP_FILE} is not a group that this version knows",
            f"It has format {status.get('format')} and {len(members)} members; format {FORMAT} is known.",
            "Restore the file from a copy, or resume the members one by one.",
        )
    plan = read_plan(folder / PLAN_FILE)
    # Killed while it gave the group another end, it left the plan as before or as after; both are its own.
    if _file_hash(folder / PLAN_FILE) not in (status.get("plan_sha256"), status.get("plan_sha256_before")):
        raise UsageError(
            f"{folder / PLAN_FILE} is not the plan that {folder.name} was started with",
            "Its hash is another; members of one group differ in nothing but the seed.",
            "Restore the file, or start another group: qfleet train --plan FILE --seeds N",
        )
    return plan, members, {key: status.get(key) for key in ("command", "weights_from")}


def _file_hash(file: Path) -> str:
    return hashlib.sha256(read_inside(file.parent, file.name, LARGEST_FILE_BYTES)).hexdigest()


def _recall(member: Member, folder: Path, end: int) -> None:
    """How a member stands by its own account; one that was killed before its first save has nothing to go on from."""
    if os.path.lexists(folder) and not is_folder(folder.parent, folder.name):
        raise UsageError(
            f"{folder} is not the folder of a run",
            "A link or a file is in its place; a group keeps its members in folders of their own.",
            "Remove it, or restore the group from a copy.",
        )
    if not is_run(folder):
        _clear(folder)
        return
    if not list_inside(folder, "checkpoints") and not last_rows(folder / "metrics.jsonl"):
        remove_run(folder)
        return
    status = read_json(folder / "status.json")
    member.shown = {key: status.get(key) for key in ("env_steps", "updates", "score")}
    if status.get("state") == "done":
        member.state = "done"
        member.exit_code = 0
        member.reason = str(status.get("reason") or "")
    # The group was given a later end and killed before this member heard of it.
    if _end_of(folder) < end:
        member.steps = end


def _end_of(folder: Path) -> float:
    """Where a run is to end; a run whose plan cannot be read says so itself when it is resumed."""
    with suppress(UsageError, KeyError, TypeError, ValueError):
        return int(read_tables(folder)["until"]["steps"])
    return math.inf


def _clear(folder: Path) -> None:
    """Take away what a member left that was killed before it had a plan: half a file, a folder that bars its name."""
    with suppress(OSError):  # somebody else's files stay, and the member says that its name is taken
        remove_drafts(folder)
        folder.rmdir()


# --- the run of a group ---


class _SweepRunner:
    """Runs members of a group, whose lock is held, and keeps group.json."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        members: list[Member],
        room: Capacity,
        kept: dict[str, Any],
        watcher: GroupWatcher | None,
    ) -> None:
        self.folder = folder
        self.plan = plan
        self.room = room
        self.kept = kept
        self.members = {member.name: member for member in members}
        self.watcher = watcher if watcher is not None else interactive_watcher()
        self.options: list[str] = []
        self.began = time.monotonic()

    def run(self, todo: list[Member]) -> Group:
        """All that is to do, and word of how it ended."""
        with listening(self.watcher) as stop_request:
            for member in todo:
                member.state = "waiting"
                member.exit_code = None
                member.reason = ""
                member.shown["until_steps"] = self.plan.until.steps
            self._adopt_plan()
            self._tell("start", self._introduction())
            try:
                self._crew(todo, stop_request).work()
            except BaseException as error:
                self._end(*self._broken(error))
                raise
            self._end(*self._ending(stop_request.name))
        return Group(self.folder)

    def _adopt_plan(self) -> None:
        """Both files of the group, so that a kill between any two of these writes leaves a pair that fits."""
        self._write("running", None, "", before=_file_hash(self.folder / PLAN_FILE))
        write_run_plan(self.plan, self.folder / PLAN_FILE)
        self._write("running", None, "")

    def _crew(self, todo: list[Member], stop_request: StopRequest) -> ProcessPool:
        try:
            require_regular_files(self.folder, "logs")
        except OSError as error:
            raise unwritable_error(self.folder / "logs", error) from error
        jobs = [Job(each.name, self._words(each), self.folder / "logs" / f"{each.name}.log") for each in todo]
        return ProcessPool(
            jobs,
            self.room.jobs,
            self.room.threads,
            stop_request,
            on_start=self._started,
            on_row=self._row,
            on_end=self._ended,
            look=lambda: self._tell("live", [shown(member, stop_request) for member in self.members.values()]),
        )

    def _words(self, member: Member) -> tuple[str, ...]:
        words = ["--group", str(self.folder), "--name", member.name, "--seed", str(member.seed)]
        words += ["--parent", str(os.getpid()), *self.options]
        words += ["--steps", str(member.steps)] if member.steps is not None else []
        words += ["--weights-from", str(source)] if (source := self.kept.get("weights_from")) else []
        return tuple(words)

    def _started(self, name: str) -> None:
        self.members[name].state = "running"
        self._write("running", None, "")

    def _row(self, name: str, row: dict[str, Any]) -> None:
        if row["kind"] == "error":
            self.members[name].error = row
        elif row["kind"] == "warning":
            self._tell("warn", name, str(row.get("text")))
        else:
            self.members[name].see(row)
            self._tell("row", name, row)

    def _ended(self, name: str, code: int) -> None:
        member = self.members[name]
        status = read_json(self.folder / name / "status.json")
        member.state, member.exit_code, member.reason = outcome(code, status, member.error)
        self._write("running", None, "")
        self._tell("finished", member.show())

    def _tell(self, what: str, *values: Any) -> None:
        if self.watcher is not None:
            getattr(self.watcher, what)(*values)

    # --- words ---

    def _introduction(self) -> dict[str, Any]:
        return {
            "group": str(self.folder),
            "env": self.plan.env.id,
            "members": [member.name for member in self.members.values()],
            "jobs": self.room.jobs,
            "threads": self.room.threads,
            "notes": list(self.room.notes),
        }

    def _ending(self, signal_name: str | None) -> tuple[str, int, str]:
        """The group's own state, exit code and reason."""
        codes = {member.name: member.exit_code for member in self.members.values()}
        done = sum(code == 0 for code in codes.values())
        if done == len(codes):
            return "done", 0, f"all {done} members are done"
        if signal_name is not None:
            return *ENDINGS[signal_name], f"stopped by {signal_name}, {done} of {len(codes)} members are done"
        bad = {name: code for name, code in codes.items() if code}
        worst = min(bad.values(), key=lambda code: WORST.index(code) if code in WORST else -1)
        named = ", ".join(f"{name} ({self.members[name].state})" for name in bad)
        return "failed", worst, f"{done} of {len(codes)} members are done, not {named}"

    def _broken(self, error: BaseException) -> tuple[str, int, str]:
        for member in self.members.values():
            if member.state == "running":
                member.state = "stopped"
                member.exit_code = 75
                member.reason = "the group's own process failed"
        return "failed", int(getattr(error, "exit_code", 1)), f"{type(error).__name__}: {error}".splitlines()[0]

    def _end(self, state: str, code: int, reason: str) -> None:
        sums = {
            key: sum(each.shown.get(key) or 0 for each in self.members.values()) for key in ("env_steps", "updates")
        }
        row = {"kind": "end", "seconds": round(time.monotonic() - self.began, 3), **sums}
        row |= {"group": str(self.folder), "state": state, "exit_code": code, "reason": reason}
        row["members"] = [member.entry() for member in self.members.values()]
        try:
            self._write(state, code, reason)
        finally:
            self._tell("stop", row)

    def _write(self, state: str, code: int | None, reason: str, before: str | None = None) -> None:
        """group.json, canonical: equal contents are equal bytes."""
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
            **self.kept,
        }
        text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"
        write_file(self.folder / GROUP_FILE, text.encode("ascii"))


def shown(member: Member, stop_request: StopRequest) -> dict[str, Any]:
    """For a display; members that still run when the group is asked to leave are saving."""
    leaving = stop_request and member.state == "running"
    return {**member.show(), **({"state": "saving"} if leaving else {})}


def interactive_watcher() -> GroupWatcher | None:
    """In a terminal or a notebook somebody is looking; a script stays silent unless it asks for a watcher."""
    mode = auto_mode()
    return make_group_watcher(mode) if mode == "live" else None
