"""The course of a run: turn the line, write rows, judge, save, and know when it is done."""

import os
import shlex
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qfleet.act.policy import NonFiniteValues
from qfleet.data import Batch
from qfleet.errors import DivergedError, NoCheckpointError, StorageError
from qfleet.learn import Diverging, restore
from qfleet.run.book import Book
from qfleet.run.inline import Inline
from qfleet.run.judge import Judge
from qfleet.run.keeper import Keeper
from qfleet.run.signals import ENDINGS, Asked
from qfleet.run.wiring import SAMPLE, Line, stream
from qfleet.save import pack_tensors, unpack_tensors
from qfleet.watch import EventLog, RowLog, Watcher, program, read_json, write_file, write_json

LIVE_SECONDS = 0.25
STATUS_SECONDS = 5.0
FAILED_SAVES = 3
ROLLBACKS = 3
ALARMING_VALUE = 1e6

SOLVED = "validation interval is above until.score"

Row = dict[str, Any]
Callback = Callable[[Row], object]


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    state: str
    exit_code: int | None
    reason: str


RUNNING = Ending("running", None, "")


class Course:
    """One run from its present state to its end. All files of the run directory but the plan are written here."""

    def __init__(
        self,
        line: Line,
        judge: Judge,
        keeper: Keeper,
        folder: Path,
        *,
        asked: Asked,
        watcher: Watcher | None = None,
        callbacks: Iterable[Callback] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.line, self.judge, self.keeper, self.folder = line, judge, keeper, folder
        self.asked, self.watcher, self.callbacks, self.clock = asked, watcher, list(callbacks), clock
        self.plan, self.book = line.plan, Book()
        self.rows, self.events = RowLog(folder / "metrics.jsonl"), EventLog(folder / "events.jsonl")
        self.runtime = Inline(line)
        self.began = clock()
        self.seconds_before = 0.0
        self.saved_at = self.tried_at = clock()
        self.tried_steps, self.save_seconds, self.failed_saves = 0, 0.0, 0
        self.row_mark = (clock(), 0, 0)
        self.live_at = self.status_at = 0.0
        self.bests: list[int] = []  # steps of the best checkpoints that the kept ones name
        self.stopped_by_callback = False
        self.warnings: list[str] = []

    # What the run is at

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return self.line.actor.steps

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self.line.learner.updates

    def seconds(self) -> float:
        """Seconds of running, earlier stretches included."""
        return self.seconds_before + self.clock() - self.began

    # The loop

    def complete(self) -> tuple[Ending, Row | None]:
        """Train and report; numbers that are not finite mean going back, a few times."""
        while True:
            try:
                return self.finish(self.run())
            except (Diverging, NonFiniteValues) as cause:
                self.roll_back(cause)

    def run(self) -> Ending:
        """Train until something says enough."""
        self.do_due()  # an evaluation that a signal cut short comes before the next step
        while (ending := self.ending()) is None:
            self.turn()
            self.do_due()
        return ending

    def turn(self) -> None:
        """One step in every lane and its updates."""
        for tick in self.runtime.turn():
            self.book.note(tick)

    def do_due(self) -> None:
        """Rows, evaluation and saving, each when its time has come."""
        if self.due(self.plan.log.every_steps, self.book.logged_steps):
            self.log()
        if self.plan.eval.episodes and self.due(self.plan.eval.every_steps, self.book.judged_steps):
            self.judge_now()
        if self.save_due():
            self.try_save()
        if self.watcher is not None and self.clock() - self.live_at > LIVE_SECONDS:
            self.live_at = self.clock()
            self.watcher.live(self.snapshot())
        if self.clock() - self.status_at > STATUS_SECONDS:
            with suppress(StorageError):  # a sign of life is not worth the run
                self.write_status()

    def due(self, every: int, before: int) -> bool:
        """Has another multiple of `every` steps been reached?"""
        return self.steps // every > before // every

    def ending(self) -> Ending | None:
        """Why the run is over, if it is."""
        until = self.plan.until
        if self.asked.name is not None:
            state, code = ENDINGS[self.asked.name]
            return Ending(state, code, f"stopped by {self.asked.name}")
        if self.stopped_by_callback:
            return Ending("stopped", 75, "stopped by a callback")
        if until.score is not None and self.solved(until.score):
            return Ending("done", 0, f"{SOLVED}={until.score:g}")
        if self.steps >= until.steps:
            return Ending("done", 0, f"reached until.steps={until.steps}")
        if until.seconds is not None and self.seconds() >= until.seconds:
            return Ending("done", 0, f"reached until.seconds={until.seconds:g}")
        return None

    def solved(self, score: float) -> bool:
        """Is the whole interval of the last validation at or above the score?"""
        return self.book.last_eval is not None and self.book.last_eval["low"] >= score

    # Rows

    def emit(self, kind: str, **fields: Any) -> None:
        """One row to the file, the watcher and the callbacks."""
        row = self.write_row(kind, **fields)
        for callback in self.callbacks:
            if isinstance(answer := callback(row), bool | np.bool_) and answer:
                self.stopped_by_callback = True

    def write_row(self, kind: str, **fields: Any) -> Row:
        """One row to the file and the watcher."""
        seconds = round(self.seconds(), 3)
        row = {"kind": kind, "seconds": seconds, "env_steps": self.steps, "updates": self.updates, **fields}
        try:
            self.rows.row(row)
        except StorageError as cause:
            self.endure(cause)
        if self.watcher is not None:
            self.watcher.row(row)
        return row

    def log(self) -> None:
        """A progress row."""
        self.book.logged_steps = self.steps
        if abs(self.book.value_mean) > ALARMING_VALUE:
            self.warn(f"values have grown beyond {ALARMING_VALUE:g}: check reward scale, learning rate, target network")
        self.emit(
            "progress",
            **self.rates(),
            epsilon=self.line.actor.epsilon(self.steps),
            loss=self.book.take_loss(),
            return_mean=self.book.return_mean(),
            episodes=self.book.episodes,
            value_mean=self.book.value_mean,
            gradient_norm=self.book.gradient_norm,
            replay_size=len(self.line.feed.replay),
        )

    def rates(self) -> Row:
        """Speed since the last row."""
        now, (then, steps, updates) = self.clock(), self.row_mark
        self.row_mark = (now, self.steps, self.updates)
        span = max(now - then, 1e-9)
        return {
            "steps_per_second": round((self.steps - steps) / span, 1),
            "updates_per_second": round((self.updates - updates) / span, 1),
        }

    def snapshot(self) -> Row:
        """What a live display shows."""
        now, (then, steps, updates) = self.clock(), self.row_mark
        span = max(now - then, 1e-9)
        return {
            "env_steps": self.steps,
            "until_steps": self.plan.until.steps,
            "updates": self.updates,
            "seconds": self.seconds(),
            "steps_per_second": (self.steps - steps) / span,
            "updates_per_second": (self.updates - updates) / span,
            "epsilon": self.line.actor.epsilon(self.steps),
            "loss": self.book.loss_sum / self.book.loss_count if self.book.loss_count else None,
            "return_mean": self.book.return_mean(),
            "replay_size": len(self.line.feed.replay),
            "replay_capacity": self.plan.replay.capacity,
            "checkpoint_age_seconds": now - self.saved_at,
            "eval": self.book.last_eval,
            "best": self.book.best,
            "warnings": self.warnings[-3:],
        }

    def warn(self, text: str) -> None:
        """Say it once, on the screen and in the events."""
        if text not in self.warnings:
            self.warnings.append(text)
            self.events.event("warning", text=text, env_steps=self.steps)

    # Judging

    def judge_now(self) -> None:
        """Judge the policy, and commit it if it is the best so far."""
        best = self.book.best
        if self.validate() and not self.try_save():
            self.book.best = best

    def validate(self) -> bool:
        """Judge the greedy policy: is it the best so far? Of equals the later one is, for it has seen more."""
        row = self.judge.validate(self.line.policy, stop=lambda: bool(self.asked))
        if row is None:
            return False  # cut short: not an evaluation, and still due
        self.book.judged_steps = self.steps
        self.emit("eval", **row)
        self.book.last_eval = {"env_steps": self.steps, **short(row)}
        if self.book.best is not None and row["mean"] < self.book.best["mean"]:
            return False
        self.book.best = self.book.last_eval
        return True

    def write_best(self) -> None:
        """best.json says which checkpoint that is; it is gone when a run goes on from before its first evaluation."""
        if self.book.best is not None:
            write_json(self.folder / "best.json", {**self.book.best, "step": self.book.best["env_steps"]})
        else:
            (self.folder / "best.json").unlink(missing_ok=True)

    # Saving

    def require_finite(self) -> None:
        """Weights that are not finite are neither saved nor reported."""
        if not self.line.learner.finite():
            raise NonFiniteValues("weights are not finite")

    def save_due(self) -> bool:
        """Often enough by steps or seconds, but never more than the plan's share of the time."""
        save, now = self.plan.save, self.clock()
        wanted = self.due(save.every_steps, self.tried_steps) or now - self.tried_at >= save.every_seconds
        return wanted and self.save_seconds <= save.max_share * (now - self.tried_at)

    def try_save(self) -> bool:
        """Save, or endure that the disk says no."""
        try:
            self.save()
        except StorageError as cause:
            self.endure(cause)
            return False
        self.failed_saves = 0
        return True

    def endure(self, cause: StorageError) -> None:
        """A disk that says no is reported and tried again, a few times in a row."""
        self.failed_saves += 1
        self.warn(f"not written: {cause.what}")
        if self.failed_saves == FAILED_SAVES:
            raise cause

    def save(self) -> None:
        """Commit this moment; only finite weights get that far."""
        self.require_finite()
        # A save that fails is due again after the usual time, not in the next step.
        begin = self.tried_at = self.clock()
        self.tried_steps = self.steps
        meta = {"seconds": self.seconds(), "rows": self.rows.position()}
        self.keeper.save(self.steps, self.book.state_dict(), meta)
        self.write_best()
        self.prune()
        self.saved_at = self.tried_at = self.clock()
        self.save_seconds = self.saved_at - begin

    def prune(self) -> None:
        """Old checkpoints go, but never the best as any kept checkpoint knows it."""
        if self.book.best is not None:
            self.bests = [*self.bests, self.book.best["env_steps"]][-self.plan.save.keep :]
        self.keeper.checkpoints.prune(self.bests)

    def load(self, **options: Any) -> int:
        """Go on from the newest valid checkpoint; returns how many lanes had to begin a new episode."""
        meta, (book, lost) = self.keeper.checkpoints.restore(
            lambda found: (found.meta, self.keeper.load(found)), **options
        )
        self.book.load_state_dict(book)
        if self.book.best is not None and self.book.best["env_steps"] not in self.keeper.checkpoints.steps():
            self.warn(f"the best checkpoint, step {self.book.best['env_steps']}, is gone: a new best is sought")
            self.book.best = None
        if missing := self.rows.cut(int(meta["rows"])):
            self.warn(f"metrics.jsonl lacks {missing} bytes that the checkpoint counts on")
        self.seconds_before, self.began = float(meta["seconds"]), self.clock()
        self.saved_at = self.tried_at = self.clock()
        self.tried_steps = self.steps
        self.row_mark = (self.clock(), self.steps, self.updates)
        self.runtime = Inline(self.line)
        self.write_best()
        self.note_inexact(int(lost.sum()))
        return int(lost.sum())

    def note_inexact(self, lanes: int) -> None:
        """Remember, for as long as the run lives, that it is no longer the run its seed decides, and why."""
        reasons = self.keeper.changed_conditions()
        if lanes:
            reasons.append(f"{lanes} of {self.plan.env.num} environments could not be re-driven and began new episodes")
        if self.plan.save.replay == "none":
            reasons.append("the replay was not saved")
        for reason in reasons:
            self.warn(f"not exact: {reason}")
            self.book.exact = False

    def roll_back(self, cause: Exception) -> None:
        """Numbers stopped being finite: go back to the last commit and draw other batches from there."""
        rollbacks = self.book.rollbacks + 1
        if isinstance(cause, Diverging):
            self.keep_batch(cause.batch)
        self.events.event("rollback", cause=str(cause), env_steps=self.steps, number=rollbacks)
        if rollbacks > ROLLBACKS:
            raise DivergedError(
                f"training diverged at step {self.steps}: {cause}",
                f"Going back to the last checkpoint {ROLLBACKS} times did not help; usual causes are rewards or "
                "observations of very different sizes, or too high a learning rate.",
                f"Lower optim.learning_rate={self.plan.optim.learning_rate:g}, set optim.clip_norm, or try "
                "env.normalize=both; the batch is in debug/.",
            ) from cause
        self.load()
        self.book.rollbacks = rollbacks
        self.line.feed.replay.rng = stream(self.plan.seed, SAMPLE, rollbacks)
        self.warn(f"rolled back to step {self.steps}: {cause}")

    def keep_batch(self, batch: Batch) -> None:
        """The batch that could not be learned from, for the curious."""
        (self.folder / "debug").mkdir(exist_ok=True)
        arrays = {name: getattr(batch, name) for name in ("obs", "action", "reward", "discount", "next_obs", "weight")}
        write_file(self.folder / "debug" / f"batch_{self.steps:012d}.safetensors", pack_tensors(arrays))

    # The end

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
            "resume": f"{program()} resume {shlex.quote(str(self.folder))}",
            "best": self.book.best,
            "score": None if score is None else short(score),
            "exact": self.book.exact,
            "pid": os.getpid() if ending is RUNNING else None,
        }
        write_json(self.folder / "status.json", status)
        return status

    def fail(self, ending: Ending) -> Row:
        """Leave word of an error; a run that had not got as far as its checkpoint keeps what it knew before."""
        self.events.event("failed", what=ending.reason, exit_code=ending.exit_code)
        with suppress(StorageError):
            if self.keeper.last is None:
                known = read_json(self.folder / "status.json")
                status = {**known, "state": ending.state, "exit_code": ending.exit_code, "reason": ending.reason}
                write_json(self.folder / "status.json", status)
                return status
            self.write_row("end", state=ending.state, exit_code=ending.exit_code, reason=ending.reason, score=None)
            return self.write_status(ending)
        return {"state": ending.state, "exit_code": ending.exit_code, "reason": ending.reason}

    def finish(self, ending: Ending) -> tuple[Ending, Row | None]:
        """Commit, then report the best policy on test seeds; what comes after the commit is cut off on resume."""
        self.save()
        score = None
        if ending.state == "done":
            if self.plan.eval.episodes and self.book.judged_steps != self.steps:
                self.validate()  # not committed: a longer run would not have judged here
                self.write_best()
            score = self.report()
        if self.asked and ending.state == "done":
            ending = Ending(*ENDINGS[str(self.asked.name)], "stopped while the final score was measured")
        result = None if score is None else short(score)
        self.emit("end", state=ending.state, exit_code=ending.exit_code, reason=ending.reason, score=result)
        return ending, score

    def report(self) -> Row | None:
        """The best checkpoint's score on episodes nothing has seen."""
        if not self.plan.eval.test_episodes or self.asked:
            return None
        step = self.adopt_best()
        found_score = self.judge.test(self.line.policy, stop=lambda: bool(self.asked))
        if found_score is None:
            return None
        row = {"checkpoint": step, **found_score}
        self.emit("eval", **row)
        return row

    def adopt_best(self) -> int:
        """Give the policy the weights of the best checkpoint, if it can be read; returns its step."""
        step = self.book.best["env_steps"] if self.book.best else self.steps
        try:
            found = self.keeper.checkpoints.load(step, whole=False)
            restore(self.line.policy.net, unpack_tensors(found.read("model.safetensors")))
        except NoCheckpointError as cause:
            self.warn(f"the best checkpoint cannot be used, the last weights are: {cause.what}")
            return self.steps
        return step

    def close(self) -> None:
        """Let go of files and worlds, and of callbacks that hold some."""
        self.rows.close()
        for callback in self.callbacks:
            getattr(callback, "close", lambda: None)()
        self.judge.close()
        self.line.close()


def short(row: Row) -> Row:
    """An evaluation without its list of returns."""
    return {name: value for name, value in row.items() if name != "returns"}
