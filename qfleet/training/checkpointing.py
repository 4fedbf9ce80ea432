"""When a run is saved, what is committed, and which checkpoints are kept."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from qfleet.act.policy import NonFiniteValues
from qfleet.audit.history import HistoryLog
from qfleet.build.components import Components
from qfleet.errors import StorageError
from qfleet.files import remove_file
from qfleet.training.checkpoints.checkpointer import Checkpointer
from qfleet.training.log.run_log import RunLog
from qfleet.watch import write_json
from qfleet.watch.run_files import unwritable_error

if TYPE_CHECKING:
    from qfleet.training.callbacks.dispatch import RunCallbacks


class Saver:
    """Saves a run often enough, but never for more than the plan's share of the time."""

    def __init__(
        self,
        components: Components,
        checkpointer: Checkpointer,
        run_log: RunLog,
        callbacks: "RunCallbacks | None" = None,
    ) -> None:
        self.components = components
        self.checkpointer = checkpointer
        self.run_log = run_log
        self.callbacks = callbacks
        self.plan = components.plan.save
        self.train_state = run_log.train_state
        self.clock = run_log.clock
        actors = components.remote_actors
        self.history: HistoryLog | None = None if actors is None else actors.history
        self.tried_at = self.clock()
        self.tried_steps = 0
        self.save_seconds = 0.0  # that the last save took
        self.best_steps: dict[int, int] = {}  # for each kept checkpoint, the step of the best one it names

    def due(self) -> bool:
        """Is a save due by steps or seconds, and within the plan's share of the time?"""
        waited = self.clock() - self.tried_at
        wanted = is_due(self.components.steps, self.plan.every_steps, self.tried_steps)
        return (wanted or waited >= self.plan.every_seconds) and self.save_seconds <= self.plan.max_share * waited

    def try_save(self) -> bool:
        """Save; a disk that refuses is tolerated a few times in a row."""
        try:
            self.save()
        except StorageError as cause:
            self.run_log.require_folder()
            self.run_log.note_failed_write(cause)
            return False
        self.run_log.failed_writes = 0
        return True

    def save(self) -> None:
        """Commit the present state of the run; weights that are not finite are refused."""
        self.run_log.require_folder()
        self.components.wait_until_idle()
        self.run_log.drain_learner_events()
        if not self.components.learner.is_finite():
            raise NonFiniteValues("weights are not finite")
        self.mark_tried()  # a save that fails is due again after the usual time, not in the next step
        began_at = self.tried_at
        self.run_log.flush_rows()
        before = self.checkpointer.last
        with self.run_log.stopwatch.save:
            self.commit()
            self.tidy(self.write_best, self.prune)
        self.run_log.saved_at = self.tried_at = self.clock()
        self.save_seconds = self.tried_at - began_at
        last = self.checkpointer.last
        if self.callbacks is not None and last is not None and last is not before:
            self.callbacks.after_save(last.path)

    def mark_tried(self) -> None:
        """Count the time and steps to the next save from here."""
        self.tried_at = self.clock()
        self.tried_steps = self.components.steps

    def commit(self) -> None:
        """Write a checkpoint."""
        steps = self.components.steps
        meta = {"seconds": self.run_log.seconds(), "rows": self.run_log.rows.position()}
        more = {} if self.callbacks is None else self.callbacks.state_dict()
        self.checkpointer.save(steps, {**self.train_state.state_dict(), **more}, meta)
        if self.history is not None:
            self.history.note("learner", "committed", env_steps=steps, updates=self.components.learner.updates)

    def tidy(self, *chores: Callable[[], None]) -> None:
        """Do the chores that follow a commit; one that the disk refuses is done after the next commit."""
        for chore in chores:
            try:
                chore()
            except (StorageError, OSError) as cause:
                text = cause.what if isinstance(cause, StorageError) else cause
                self.run_log.warn(f"saved, but not tidied up: {text}")

    def write_best(self) -> None:
        """Write best.json, which names the best checkpoint; remove it if the run has none."""
        best = self.train_state.best
        folder = self.run_log.folder
        if best is not None:
            write_json(folder / "best.json", {**best, "step": best["env_steps"]})
            return
        try:
            remove_file(folder, "best.json")
        except OSError as error:
            raise unwritable_error(folder / "best.json", error) from error

    def prune(self) -> None:
        """Delete old checkpoints, but never one that a kept checkpoint names as the best."""
        if self.train_state.best is not None:
            self.best_steps[self.components.steps] = self.train_state.best["env_steps"]
        self.best_steps = dict(list(self.best_steps.items())[-self.plan.keep :])
        self.checkpointer.checkpoints.prune(self.best_steps.values())

    def record_end(self, *, done: bool) -> None:
        """Record in the history of operations that the learner has finished."""
        if self.history is None:
            return
        counts = {"env_steps": self.components.steps, "updates": self.components.learner.updates}
        self.history.note("learner", "closed", **counts, forgiven=self.components.forgiven, done=done)

    def restart(self) -> None:
        """The run was loaded from a checkpoint: count from there."""
        self.mark_tried()
        best = self.train_state.best
        self.best_steps = {} if best is None else {self.components.steps: best["env_steps"]}
        self.write_best()


def is_due(steps: int, every_steps: int, before: int) -> bool:
    """Has another multiple of `every_steps` been reached since step `before`?"""
    return steps // every_steps > before // every_steps
