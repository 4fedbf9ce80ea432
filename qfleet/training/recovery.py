"""Going back to a checkpoint: on resume, when numbers are not finite, and when the replay's process is lost."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfleet.build.components import Components
from qfleet.build.seeds import SAMPLE, stream
from qfleet.data import Array, Batch, Sequences, State
from qfleet.data.state_reader import saved_count, saved_number
from qfleet.errors import DivergedError, EnvError
from qfleet.files import make_folder
from qfleet.learn import Diverging
from qfleet.save import Checkpoint, pack_tensors
from qfleet.system.worker_errors import WorkerLost
from qfleet.training.checkpointing import Saver
from qfleet.training.checkpoints.checkpointer import MALFORMED, Checkpointer, malformed
from qfleet.training.log.run_log import RunLog
from qfleet.training.log.run_status import Row, inexact_reasons
from qfleet.training.requests import SyncControl
from qfleet.training.train_state import TrainState
from qfleet.watch import write_file

MAX_ROLLBACKS = 3
ROLLED_BACK = "numbers were not finite: it went back to a checkpoint, and the clock decides where that is"


@dataclass
class Recovery:
    """Restores a run from its newest valid checkpoint, and restarts the replay's process."""

    components: Components
    checkpointer: Checkpointer
    run_log: RunLog
    saver: Saver
    sync_control: SyncControl | None  # where several learners are synchronised

    @property
    def train_state(self) -> TrainState:
        """The counters of the run."""
        return self.run_log.train_state

    def recover(self, cause: Exception) -> None:
        """Go back to the last commit."""
        if isinstance(cause, WorkerLost):
            self.replace_replay(cause)
        else:
            self.roll_back(cause)

    def load_or_restart_replay(self, **options: Any) -> int:
        """`load`; if the replay's process is lost meanwhile, start another one and load again."""
        while True:
            try:
                return self.load(**options)
            except WorkerLost as cause:
                self.restart_replay(cause)

    def load(self, **options: Any) -> int:
        """Go on from the newest valid checkpoint; returns how many lanes had to begin a new episode."""
        if self.components.remote_replay is not None:
            self.components.remote_replay.flush()
        if self.components.peers is not None:
            self.components.peers.discard_state()
        known = self.train_state.not_exact
        meta, lost = self.checkpointer.checkpoints.restore(self.restore, **options)
        for reason in known:  # a run that goes back does not forget what happened
            self.train_state.mark_inexact(reason)
        self.forget_missing_best()
        self.run_log.pending_rows.clear()
        if missing := self.run_log.rows.cut(int(meta["rows"])):
            self.run_log.warn(f"metrics.jsonl lacks {missing} bytes that the checkpoint counts on")
        self.run_log.continue_clock(float(meta["seconds"]))
        if self.sync_control is not None:
            self.sync_control.restart()
        self.saver.restart()
        num_lost = int(lost.sum())
        self.run_log.mark_inexact(self.changes_since_checkpoint(num_lost))
        return num_lost

    def restore(self, found: Checkpoint) -> tuple[Row, Array]:
        """Load components and train state; returns the checkpoint's meta data and the lanes [B] that were lost."""
        train_state, lost = self.checkpointer.load(found)
        try:
            self.train_state.load_state_dict(train_state)
            self.restore_callbacks(train_state, found.path)
            saved_count(found.meta, "rows")
            saved_number(found.meta, "seconds")
        except MALFORMED as error:
            raise malformed(found, error) from error
        return found.meta, lost

    def restore_callbacks(self, train_state: State, checkpoint: Path) -> None:
        """Restore the state of callback objects; warn of those that were not passed again."""
        if self.saver.callbacks is not None:
            self.saver.callbacks.load_state_dict(train_state, checkpoint)
        elif "callbacks" in train_state:
            from qfleet.training.callbacks.dispatch import saved_states, warn_of_unused  # most runs have none

            warn_of_unused(self.run_log, saved_states(train_state))

    def forget_missing_best(self) -> None:
        """Look for a new best policy if the checkpoint of the best one is missing."""
        best = self.train_state.best
        if best is not None and best["env_steps"] not in self.checkpointer.checkpoints.steps():
            self.run_log.warn(f"the best checkpoint, step {best['env_steps']}, is gone: a new best is sought")
            self.train_state.best = None

    def changes_since_checkpoint(self, num_lost: int) -> list[str]:
        """Why the seed no longer decides the run after it was loaded; `num_lost` lanes began new episodes."""
        checkpointer = self.checkpointer
        peers = self.components.peers
        reasons = [*checkpointer.changed_conditions(), *inexact_reasons(self.components)]
        reasons += [] if peers is None else peers.inexact_resume_reasons()
        if num_lost:
            num = self.components.plan.env.num
            reasons.append(f"{num_lost} of {num} environments could not be re-driven and began new episodes")
        if checkpointer.last is not None and checkpointer.last.meta["replay"] == "none":
            reasons.append("the replay was not saved")
        if checkpointer.discards_fresh_block:
            reasons.append("an older version began the present block of experience; it is gathered anew")
        return reasons

    def roll_back(self, cause: Exception) -> None:
        """Numbers are not finite: go back to the last commit and draw other batches from there."""
        rollbacks = self.train_state.rollbacks + 1
        steps = self.components.steps
        where = ""
        if isinstance(cause, Diverging):
            self.write_batch(cause.batch)
            where = "; the batch is in debug/"
        self.run_log.events.event("rollback", cause=str(cause), env_steps=steps, number=rollbacks)
        if rollbacks > MAX_ROLLBACKS:
            raise DivergedError(
                f"training diverged at step {steps}: {cause}",
                f"Going back to the last checkpoint {MAX_ROLLBACKS} times did not help; usual causes are rewards or "
                "observations of very different sizes, or too high a learning rate.",
                f"Lower optim.learning_rate={self.components.plan.optim.learning_rate:g}, set optim.clip_norm, or try "
                f"env.normalize=both{where}.",
            ) from cause
        self.load()
        self.draw_other_batches(rollbacks)
        self.run_log.warn(f"rolled back to step {self.components.steps}: {cause}")

    def draw_other_batches(self, rollbacks: int) -> None:
        """Reseed the sampler; updates that were skipped before say nothing about the new batches."""
        self.train_state.skipped_in_a_row = 0
        self.train_state.rollbacks = rollbacks
        self.train_state.mark_inexact(ROLLED_BACK)
        self.components.batch_source.replay.reseed(stream(self.components.plan.seed, SAMPLE, rollbacks))
        if self.components.peers is not None:
            self.components.peers.reseed(rollbacks)

    def write_batch(self, batch: Batch | Sequences) -> None:
        """Write the batch that could not be learned from into debug/."""
        folder = self.run_log.folder
        make_folder(folder, "debug")
        arrays = {name: value for name in batch.__slots__ if (value := getattr(batch, name)) is not None}
        write_file(folder / "debug" / f"batch_{self.components.steps:012d}.safetensors", pack_tensors(arrays))

    def restart_replay(self, cause: WorkerLost) -> None:
        """Start another process for the replay, as often as the restart budget allows."""
        remote = self.components.remote_replay
        if remote is None:  # it was another worker
            raise cause
        if not remote.budget.charge(time.monotonic()):
            raise EnvError(
                "the replay's process has failed more often than runtime.restarts allows",
                f"the replay is lost: {cause}.",
                "Is there enough memory? runtime.replay_process=false keeps the replay beside the learner.",
            ) from cause
        remote.start()

    def replace_replay(self, cause: WorkerLost) -> None:
        """Go on from the last commit with another process for the replay."""
        steps = self.components.steps
        rollbacks = self.train_state.rollbacks
        self.restart_replay(cause)
        self.load()
        if rollbacks > self.train_state.rollbacks:  # the commit is from before them
            self.draw_other_batches(rollbacks)
        now = self.components.steps
        self.run_log.events.event(
            "replay_lost", cause=f"the replay is lost: {cause}", steps_lost=steps - now, env_steps=now
        )
