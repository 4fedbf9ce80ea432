"""What a run reports: rows, events, status, warnings, the live screen and callbacks."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qfleet.build.components import Components
from qfleet.errors import StorageError
from qfleet.system.timers import Stopwatch
from qfleet.training.callbacks import RowCallback
from qfleet.training.log.info_numbers import InfoNumbers
from qfleet.training.log.run_status import RUNNING, Ending, Row, RunStatus, overwrite_status, record_refusal
from qfleet.training.log.timing import RunTimes
from qfleet.training.train_state import TrainState
from qfleet.watch import EventLog, RowLog, Watcher
from qfleet.watch.text import LEAVING

if TYPE_CHECKING:
    from qfleet.training.log.fault_log import FaultLog

LIVE_SECONDS = 0.25
STATUS_SECONDS = 5.0
MAX_FAILED_WRITES = 3  # in a row
MAX_PENDING_ROWS = 1_000  # kept in memory while the disk refuses them
ALARMING_VALUE = 1e6


class RunLog:
    """Reports what happens in a run: to the files of its folder, the watcher and the callbacks."""

    def __init__(
        self,
        components: Components,
        folder: Path,
        watcher: Watcher | None = None,
        callbacks: Iterable[RowCallback] = (),
        clock: Callable[[], float] = time.monotonic,
        require_folder: Callable[[], None] = lambda: None,
    ) -> None:
        self.require_folder = require_folder  # raises once the folder was renamed or removed
        self.components = components
        self.folder = folder
        self.train_state = TrainState(info=InfoNumbers(components.plan.log.info))
        self.watcher = watcher
        self.callbacks = list(callbacks)
        self.clock = clock
        self.rows = RowLog(folder / "metrics.jsonl")
        self.events = EventLog(folder / "events.jsonl")
        self.warnings: list[str] = []
        self.status = RunStatus(components, self.train_state, folder)
        self.stop_requested = False  # by a callback
        self.more_metrics: Callable[[], Row] = dict  # of callback objects, for progress rows
        self.failed_writes = 0  # in a row
        self.pending_rows: list[Row] = []  # that could not be written yet
        self.num_dropped_rows = 0
        self.live_at = 0.0
        self.status_at = 0.0
        self.replay_age: float | None = None  # of sampled batches, as in the last row
        self.policy_lag: float | None = None
        self.continue_clock(0.0)
        self.start_timing()

    @cached_property
    def faults(self) -> "FaultLog":
        """Records faults; most runs have none."""
        from qfleet.training.log.fault_log import FaultLog

        return FaultLog(self.components, self.train_state, self.events, self.warn)

    def start_timing(self) -> None:
        """Measure the stages of the run from here on."""
        self.times = RunTimes(self.components)

    @property
    def stopwatch(self) -> Stopwatch:
        """Measures the stages of this process."""
        return self.times.stopwatch

    def continue_clock(self, seconds_before: float) -> None:
        """Count the run's seconds from here, after those before the last checkpoint."""
        self.seconds_before = seconds_before
        self.began_at = self.clock()
        self.saved_at = self.clock()
        self.row_mark = (self.clock(), self.steps, self.updates)

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return self.components.steps

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self.components.learner.updates

    def seconds(self) -> float:
        """Seconds that the run has taken, those before the last checkpoint included."""
        return self.seconds_before + self.clock() - self.began_at

    # Rows

    def log_row(self, kind: str, **fields: Any) -> None:
        """Write one row to the file, the watcher and the callbacks."""
        row = self.write_row(kind, **fields)
        for callback in self.callbacks:
            if isinstance(stop := callback(row), bool | np.bool_) and stop:
                self.stop_requested = True

    def write_row(self, kind: str, **fields: Any) -> Row:
        """Write one row to the file and the watcher."""
        self.require_folder()
        seconds = round(self.seconds(), 3)
        row = {"kind": kind, "seconds": seconds, "env_steps": self.steps, "updates": self.updates, **fields}
        self.pending_rows.append(row)
        try:
            self.write_rows()
        except StorageError as cause:
            self.note_failed_write(cause)
        if self.watcher is not None:
            self.watcher.row(row)
        return row

    def write_rows(self) -> None:
        """Write pending rows in order; rows that the disk refuses are tried again with the next one."""
        excess = len(self.pending_rows) - MAX_PENDING_ROWS
        if excess > 0:
            self.num_dropped_rows += excess
            del self.pending_rows[:excess]
        while self.pending_rows:
            self.rows.row(self.pending_rows[0])
            del self.pending_rows[0]

    def flush_rows(self) -> None:
        """Before a checkpoint, which stores the file's length: write pending rows, or give them up."""
        with suppress(StorageError):
            self.write_rows()
        missing = self.num_dropped_rows + len(self.pending_rows)
        self.num_dropped_rows = 0
        self.pending_rows.clear()  # written later they would lie beyond that length
        if missing:
            self.mark_inexact([f"metrics.jsonl lacks rows that were refused: {missing}"])

    def log_change(self, kind: str, text: str, **fields: Any) -> None:
        """Report a change that the run made to itself: an event, a row and a line on the screen."""
        self.events.event(kind, text=text, env_steps=self.steps, **fields)
        self.log_row(kind, text=text, **fields)

    def log_progress(self) -> None:
        """Write a progress row."""
        train_state = self.train_state
        train_state.logged_steps = self.steps
        if abs(train_state.value_mean) > ALARMING_VALUE:
            self.warn(f"values have grown beyond {ALARMING_VALUE:g}: check reward scale, learning rate, target network")
        steps_per_second, updates_per_second = self.speed()
        self.row_mark = (self.clock(), self.steps, self.updates)
        metrics = self.components.batch_source.take_metrics()
        self.policy_lag = train_state.take_lag()
        self.replay_age = metrics.get("replay_age")
        self.log_row(
            "progress",
            steps_per_second=round(steps_per_second, 1),
            updates_per_second=round(updates_per_second, 1),
            epsilon=self.components.actor.explorer.epsilon(self.steps),
            loss=train_state.take_loss(),
            return_mean=train_state.return_mean(),
            length_mean=train_state.length_mean(),
            episodes=train_state.episodes,
            value_mean=train_state.value_mean,
            gradient_norm=train_state.gradient_norm,
            replay_size=len(self.components.batch_source.replay),
            dormant=self.components.dormant(),
            **self.components.current_settings(),
            policy_lag=self.policy_lag,
            **metrics,
            **({} if self.components.peers is None else {"sent_bytes": self.components.peers.take_sent_bytes()}),
            **self.times.state(),
            **self.times.take_shares(),
            **train_state.info.means(),
            **self.more_metrics(),
        )
        for text in train_state.info.problems():
            self.warn(text)

    def speed(self) -> tuple[float, float]:
        """Steps and updates per second since the last row."""
        then, steps, updates = self.row_mark
        span = max(self.clock() - then, 1e-9)
        return (self.steps - steps) / span, (self.updates - updates) / span

    # The live screen

    def refresh(self) -> None:
        """Refresh the live screen and status.json, each at its own period."""
        if self.watcher is not None and self.clock() - self.live_at > LIVE_SECONDS:
            self.live_at = self.clock()
            self.watcher.live(self.snapshot())
        if self.clock() - self.status_at > STATUS_SECONDS:
            self.require_folder()
            with suppress(StorageError):  # it is written again soon
                self.write_status()

    def show_leaving(self) -> None:
        """Show that the run is about to save and leave."""
        if self.watcher is not None:
            self.watcher.live({**self.snapshot(), "leaving": LEAVING})

    def snapshot(self) -> Row:
        """What the live screen shows."""
        train_state = self.train_state
        steps_per_second, updates_per_second = self.speed()
        return {
            "env_steps": self.steps,
            "until_steps": self.components.plan.until.steps,
            "updates": self.updates,
            "seconds": self.seconds(),
            "steps_per_second": steps_per_second,
            "updates_per_second": updates_per_second,
            "epsilon": self.components.actor.explorer.epsilon(self.steps),
            "loss": train_state.loss_sum / train_state.loss_count if train_state.loss_count else None,
            "return_mean": train_state.return_mean(),
            "replay_size": len(self.components.batch_source.replay),
            "replay_capacity": self.components.batch_source.replay.capacity,
            "checkpoint_age_seconds": self.clock() - self.saved_at,
            "eval": train_state.last_eval,
            "best": train_state.best,
            "policy_lag": self.policy_lag,
            "replay_age": self.replay_age,
            **self.times.state(),
            "warnings": list(self.warnings),
        }

    # Warnings

    def warn(self, text: str) -> None:
        """Show a text on the screen and in the events, once."""
        if text not in self.warnings:
            self.warnings.append(text)
            self.events.event("warning", text=text, env_steps=self.steps)

    def mark_inexact(self, reasons: Iterable[str]) -> None:
        """Warn, and keep for as long as the run lives, that its seed no longer decides it."""
        for reason in reasons:
            self.warn(f"not exact: {reason}")
            self.train_state.mark_inexact(reason)

    def note_failed_write(self, cause: StorageError) -> None:
        """Warn of a write that failed; raise it if too many failed in a row."""
        self.failed_writes += 1
        self.warn(f"not written: {cause.what}")
        if self.failed_writes == MAX_FAILED_WRITES:
            raise cause

    def drain_learner_events(self) -> None:
        """Record what happened to other learners, and to the compiled update, since the last call."""
        if self.components.peers is not None or self.components.plan.runtime.compile:
            self.faults.drain_learner_events()

    # Status

    def write_status(self, ending: Ending = RUNNING, score: Row | None = None) -> Row:
        """Write status.json."""
        self.status_at = self.clock()
        return self.status.write(ending, score, self.seconds(), self.times.profile())

    def write_failure(self, ending: Ending, *, begun: bool, refused: bool = False) -> Row:
        """Record an error; a run that had not begun keeps its status but for the error, or all of it if refused."""
        failed = ending.row()
        try:
            self.require_folder()
        except StorageError:
            return failed  # there is no folder to record it in
        with suppress(StorageError):
            self.events.event("failed", what=ending.reason, exit_code=ending.exit_code)
        if not begun:
            record_refusal(self.folder, failed, refused=refused)
            return failed
        with suppress(StorageError):
            self.write_row("end", **failed, score=None)
        try:
            return self.write_status(ending)
        except StorageError:
            overwrite_status(self.folder, {**failed, "pid": None})
        return failed

    def close(self) -> None:
        """Close the file of rows, and callbacks that hold files."""
        self.rows.close()
        for callback in self.callbacks:
            getattr(callback, "close", lambda: None)()
