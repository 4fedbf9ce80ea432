"""The diary: everything a run tells its readers. Rows, events, status, warnings, the live screen and callbacks."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from qfleet.build.components import Components, ReplayLost
from qfleet.errors import StorageError
from qfleet.plan.validate.placement import num_senders
from qfleet.system.timers import Stopwatch
from qfleet.training.log.timing import RunTimes
from qfleet.training.train_state import TrainState
from qfleet.watch import EventLog, RowLog, Watcher, read_json, write_json
from qfleet.watch.run_directory import resume_command
from qfleet.watch.text import LEAVING

LIVE_SECONDS = 0.25
STATUS_SECONDS = 5.0
FAILED_WRITES = 3
MOST_WAITING = 1_000  # rows that are kept in memory while the disk refuses them
ALARMING_VALUE = 1e6
CLOCK_ENDS = "until.seconds is set, so the clock decides where it ends"

Row = dict[str, Any]
Callback = Callable[[Row], object]


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    state: str
    exit_code: int | None
    reason: str


RUNNING = Ending("running", None, "")


class RunLog:
    """Writes down what happens to a line, in its folder and to whoever watches."""

    def __init__(
        self,
        line: Components,
        folder: Path,
        watcher: Watcher | None = None,
        callbacks: Iterable[Callback] = (),
        clock: Callable[[], float] = time.monotonic,
        require_folder: Callable[[], None] = lambda: None,
    ) -> None:
        self.require_folder = require_folder  # raises once the folder was renamed or removed
        self.line = line
        self.plan = line.plan
        self.folder = folder
        self.train_state = TrainState()
        self.watcher = watcher
        self.callbacks = list(callbacks)
        self.clock = clock
        self.rows = RowLog(folder / "metrics.jsonl")
        self.events = EventLog(folder / "events.jsonl")
        self.warnings: list[str] = []
        self.kept_out: Row = {}  # the last share that a filter told
        self.stop_asked = False  # by a callback
        self.failed_writes = 0  # in a row
        self.waiting: list[Row] = []  # rows that could not be written yet
        self.dropped = 0  # rows that never will be
        self.live_at = self.status_at = 0.0
        self.age: float | None = None  # of what was drawn, as the last row says
        self.lag: float | None = None
        self.go_on(0.0)
        self.begin()

    def begin(self) -> None:
        """The time of the run is taken from here."""
        self.times = RunTimes(self.line)

    @property
    def watch(self) -> Stopwatch:
        """Takes the time of this process."""
        return self.times.watch

    def go_on(self, seconds: float) -> None:
        """Count time from here, after so many seconds of earlier stretches."""
        self.seconds_before, self.began = seconds, self.clock()
        self.saved_at = self.clock()
        self.row_mark = (self.clock(), self.steps, self.updates)

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return self.line.steps

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self.line.learner.updates

    def seconds(self) -> float:
        """Seconds of running, earlier stretches included."""
        return self.seconds_before + self.clock() - self.began

    # Rows

    def emit(self, kind: str, **fields: Any) -> None:
        """One row to the file, the watcher and the callbacks."""
        row = self.write_row(kind, **fields)
        for callback in self.callbacks:
            if isinstance(answer := callback(row), bool | np.bool_) and answer:
                self.stop_asked = True

    def write_row(self, kind: str, **fields: Any) -> Row:
        """One row to the file and the watcher."""
        self.require_folder()
        seconds = round(self.seconds(), 3)
        row = {"kind": kind, "seconds": seconds, "env_steps": self.steps, "updates": self.updates, **fields}
        self.waiting.append(row)
        try:
            self.write_rows()
        except StorageError as cause:
            self.endure(cause)
        if self.watcher is not None:
            self.watcher.row(row)
        return row

    def write_rows(self) -> None:
        """Write the rows that wait, in order; those that the disk refuses wait for the next one."""
        too_many = len(self.waiting) - MOST_WAITING
        if too_many > 0:
            self.dropped += too_many
            del self.waiting[:too_many]
        while self.waiting:
            self.rows.row(self.waiting[0])
            del self.waiting[0]

    def write_waiting(self) -> list[str]:
        """Before a checkpoint, which counts the rows: write those that wait, or answer what is missing."""
        with suppress(StorageError):
            self.write_rows()
        missing = self.dropped + len(self.waiting)
        self.dropped = 0
        self.waiting.clear()  # a later row would stand behind what the checkpoint counts
        return [f"metrics.jsonl lacks rows that were refused: {missing}"] if missing else []

    def tell(self, kind: str, text: str, **fields: Any) -> None:
        """Something that the run did to itself: an event, a row, and a line on the screen."""
        self.events.event(kind, text=text, env_steps=self.steps, **fields)
        self.emit(kind, text=text, **fields)

    def log(self) -> None:
        """A progress row."""
        train_state = self.train_state
        train_state.logged_steps = self.steps
        if abs(train_state.value_mean) > ALARMING_VALUE:
            self.warn(f"values have grown beyond {ALARMING_VALUE:g}: check reward scale, learning rate, target network")
        steps_per_second, updates_per_second = self.speed()
        self.row_mark = (self.clock(), self.steps, self.updates)
        news = self.line.batch_source.news()
        self.lag = train_state.take_lag()
        self.age = news.get("replay_age")
        self.emit(
            "progress",
            steps_per_second=round(steps_per_second, 1),
            updates_per_second=round(updates_per_second, 1),
            epsilon=self.line.actor.explorer.epsilon(self.steps),
            loss=train_state.take_loss(),
            return_mean=train_state.return_mean(),
            episodes=train_state.episodes,
            value_mean=train_state.value_mean,
            gradient_norm=train_state.gradient_norm,
            replay_size=len(self.line.batch_source.replay),
            dormant=self.line.dormant(),
            **self.line.moving(),
            policy_lag=self.lag,
            **news,
            **({} if self.line.peers is None else {"sent_bytes": self.line.peers.take_sent_bytes()}),
            **self.times.state(),
            **self.times.take_shares(),
        )

    def speed(self) -> tuple[float, float]:
        """Steps and updates per second since the last row."""
        then, steps, updates = self.row_mark
        span = max(self.clock() - then, 1e-9)
        return (self.steps - steps) / span, (self.updates - updates) / span

    # The live screen, and signs of life

    def show(self) -> None:
        """Refresh what a watcher and status.json show, each at its own pace."""
        if self.watcher is not None and self.clock() - self.live_at > LIVE_SECONDS:
            self.live_at = self.clock()
            self.watcher.live(self.snapshot())
        if self.clock() - self.status_at > STATUS_SECONDS:
            self.require_folder()
            with suppress(StorageError):  # a sign of life is not worth the run
                self.write_status()

    def show_leaving(self) -> None:
        """Say that the run saves and leaves, before it does."""
        if self.watcher is not None:
            self.watcher.live({**self.snapshot(), "leaving": LEAVING})

    def snapshot(self) -> Row:
        """What a live display shows."""
        train_state = self.train_state
        (steps_per_second, updates_per_second) = self.speed()
        return {
            "env_steps": self.steps,
            "until_steps": self.plan.until.steps,
            "updates": self.updates,
            "seconds": self.seconds(),
            "steps_per_second": steps_per_second,
            "updates_per_second": updates_per_second,
            "epsilon": self.line.actor.explorer.epsilon(self.steps),
            "loss": train_state.loss_sum / train_state.loss_count if train_state.loss_count else None,
            "return_mean": train_state.return_mean(),
            "replay_size": len(self.line.batch_source.replay),
            "replay_capacity": self.line.batch_source.replay.capacity,
            "checkpoint_age_seconds": self.clock() - self.saved_at,
            "eval": train_state.last_eval,
            "best": train_state.best,
            "policy_lag": self.lag,
            "replay_age": self.age,
            **self.times.state(),
            "warnings": list(self.warnings),
        }

    # Trouble

    def warn(self, text: str) -> None:
        """Say it once, on the screen and in the events."""
        if text not in self.warnings:
            self.warnings.append(text)
            self.events.event("warning", text=text, env_steps=self.steps)

    def note_fault(self, fault: Row) -> None:
        """An environment failed and is made anew; that one is given up is worth a word on the screen."""
        fields = {"fault" if name == "kind" else name: value for name, value in fault.items()}
        self.events.event("env_fault", env_steps=self.steps, **fields)
        if fault["quarantined"]:
            lanes = ", ".join(map(str, fault["quarantined"]))
            whose = f"actor {fault['actor']}, " if "actor" in fault else ""  # each counts its own environments
            what = f"failed more often than env.rebuilds and is given up: {fault['what']}"
            self.warn(f"{whose}environment {lanes} {what}")

    def note_actor(self, kind: str, **fields: Any) -> None:
        """An actor was lost, came back or is slow; that one is slow only its user can mend."""
        self.events.event(kind, **fields)
        if kind == "actor_slow":
            self.warn(f"actor {fields['worker']} brings in {fields['share']:.0%} of what the others do")
        if kind == "actor_lost" and fields["restart_seconds"] is None:
            self.note_given_up(f"actor {fields['worker']}", num_senders(self.plan), "actors", fields["words"])

    def note_given_up(self, who: str, num: int, of: str, why: str) -> None:
        """Somebody failed more often than the plan allows: say what that means, now and at the end."""
        limit = "runtime.restarts" if of == "actors" else "learners.restarts"
        text = f"{who} (of {num}) was lost for good at step {self.steps}: {why or 'it did not say why'}"
        self.train_state.lose(text)
        self.warn(f"{text}; it is not started again ({limit}), and the run goes on without it")

    def note_learner(self, event: Row) -> None:
        """Somebody came, left or was lost among the learners; what is lost is worth a word on the screen."""
        kind = event["kind"]
        fields = {name: value for name, value in event.items() if name != "kind"}
        self.events.event(kind, env_steps=self.steps, **fields)
        if kind == "learner_lost":
            self.note_lost_learner(event)
        if kind == "learner_slow":
            self.warn(f"learner {event['learner']} is much slower than the fastest one (learners.balance)")
        if kind == "codec_given_up":
            found = f"what comes through points elsewhere (cosine {event['cosine']:g})"
            self.warn(f"sync.codec is given up, nothing is compressed any more: {found}")
        if kind == "group_failed":
            self.warn(f"the group of learners is formed anew: {event['what']}")
        if kind == "bundle_inexact":
            self.warn(f"not exact: learner {event['learner']}: {event['what']}")

    def note_lost_learner(self, event: Row) -> None:
        """A learner is gone; another one comes in its place, or not."""
        if event["replaced"]:
            self.warn(f"learner {event['learner']} is lost: {event['what']}; another one is started")
        else:
            self.note_given_up(f"learner {event['learner']}", self.plan.learners.num, "learners", event["what"])

    def endure(self, cause: StorageError) -> None:
        """A disk that says no is reported and tried again, a few times in a row."""
        self.failed_writes += 1
        self.warn(f"not written: {cause.what}")
        if self.failed_writes == FAILED_WRITES:
            raise cause

    # Status

    def write_status(self, ending: Ending = RUNNING, score: Row | None = None) -> Row:
        """status.json: how the run stands, and how to go on."""
        self.status_at = self.clock()
        status = {
            "state": ending.state,
            "exit_code": ending.exit_code,
            "reason": ending.reason,
            "env_steps": self.steps,
            "updates": self.updates,
            "seconds": round(self.seconds(), 3),
            "resume": resume_command(self.folder),
            "best": self.train_state.best,
            **self.train_state.chosen(),
            "score": None if score is None else short(score),
            **self.exactness(),
            "lost": self.train_state.lost,
            "pid": os.getpid() if ending is RUNNING else None,
            **self.filtered(),
            **self.together(),
            "profile": self.times.profile(),
        }
        write_json(self.folder / "status.json", status)
        return status

    def exactness(self) -> Row:
        """`exact`: the plan and its seed decide this run, stopped and resumed or not; otherwise the reasons."""
        clock = self.plan.until.seconds is not None
        reasons = [*self.train_state.not_exact, *([CLOCK_ENDS] if clock else [])]
        return {"exact": self.train_state.exact and not reasons, "not_exact": reasons}

    def warn_of_clock(self) -> None:
        """Say beforehand that the clock decides where the run ends, if so."""
        if self.plan.until.seconds is not None:
            self.warn(f"not exact: {CLOCK_ENDS}")

    def filtered(self) -> Row:
        """The share of items that the replay kept out, if it does so; as last heard if its process is gone."""
        if (filter := self.line.batch_source.replay.filter) is not None:
            with suppress(ReplayLost):
                self.kept_out = {"filtered": filter.share}
        return self.kept_out

    def together(self) -> Row:
        """How several learners agree at present."""
        peers = self.line.peers
        if peers is None:
            return {}
        return {"together": {"sync": msgspec.to_builtins(peers.agreement), "learners": peers.num}}

    def write_failure(self, ending: Ending, *, begun: bool, refused: bool = False) -> Row:
        """Leave word of an error; a run that had not begun again keeps what it knew before, all of it if refused."""
        how = {"state": ending.state, "exit_code": ending.exit_code, "reason": ending.reason}
        try:
            self.require_folder()
        except StorageError:
            return how  # there is no place to leave word in
        self.events.event("failed", what=ending.reason, exit_code=ending.exit_code)
        with suppress(StorageError):
            if not begun:
                before = read_json(self.folder / "status.json")
                if not (refused and before.get("exit_code") is not None):
                    write_json(self.folder / "status.json", {**before, **how})
                return how
            self.write_row("end", **how, score=None)
            return self.write_status(ending)
        return how

    def close(self) -> None:
        """Let go of the rows, and of callbacks that hold files."""
        self.rows.close()
        for callback in self.callbacks:
            getattr(callback, "close", lambda: None)()


def short(row: Row) -> Row:
    """An evaluation without its list of returns."""
    return {name: value for name, value in row.items() if name != "returns"}
