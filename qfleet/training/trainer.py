"""The training loop: act and learn; evaluate, save and adjust when due; recover from faults; report at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from qfleet.act.policy import NonFiniteValues
from qfleet.build.components import Components
from qfleet.build.worlds import EnvMaker
from qfleet.data import Tick
from qfleet.learn import Diverging
from qfleet.plan import sync_switches
from qfleet.plan.schema import Plan
from qfleet.plan.traits import learns_from_data
from qfleet.system.worker_errors import WorkerLost
from qfleet.training.callbacks import Callback
from qfleet.training.checkpointing import Saver, is_due
from qfleet.training.checkpoints.checkpointer import Checkpointer, evaluation_decides
from qfleet.training.inline import InlineLoop
from qfleet.training.log.run_log import RunLog
from qfleet.training.log.run_status import ENV_FAULT, Ending, Row, inexact_reasons, without_returns
from qfleet.training.process.forward_signals import ENDINGS
from qfleet.training.process.signals import StopRequest

if TYPE_CHECKING:
    from qfleet.build.components import DatasetRecorder
    from qfleet.training.async_loop import AsyncLoop
    from qfleet.training.callbacks.dispatch import RunCallbacks
    from qfleet.training.evaluator import RunEvaluation
    from qfleet.training.offline_loop import OfflineLoop
    from qfleet.training.plateau_control import PlateauControl
    from qfleet.training.recovery import Recovery
    from qfleet.training.requests import SyncControl

SOLVED = "validation interval is above until.score"
OUT_OF_TIME = "reached until.seconds"
GAVE_UP = "no better validation score within steer.stop_patience"
EVALUATED_MORE = "a callback asked for an evaluation, and scores change what is learned"


@dataclass(eq=False)
class Trainer:
    """One run from its present state to its end."""

    components: Components
    env: EnvMaker | None  # of the user's own
    checkpointer: Checkpointer
    run_log: RunLog
    stop_request: StopRequest
    callback_objects: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        self.train_state = self.run_log.train_state
        self.loop: InlineLoop | OfflineLoop | AsyncLoop | None = (
            None  # made when training starts, and again after a recovery
        )
        self.sync_control = None if self.components.peers is None else self.make_sync_control()
        self.callbacks = self.make_callbacks() if self.callback_objects else None
        self.saver = Saver(self.components, self.checkpointer, self.run_log, self.callbacks)

    # Parts that a run may not need, imported and made when it does

    def make_sync_control(self) -> "SyncControl":
        """Switches how several learners are synchronised."""
        from qfleet.training.requests import SyncControl

        switches = sync_switches(self.plan) if self.plan.learners.schedule else []
        return SyncControl(self.components, self.run_log, switches, self.components.learner.updates)

    def make_callbacks(self) -> "RunCallbacks":
        """Calls the callback objects."""
        from qfleet.training.callbacks.dispatch import RunCallbacks

        return RunCallbacks(self.callback_objects, self.run_log)

    @cached_property
    def evaluation(self) -> "RunEvaluation":
        """Evaluates the policy."""
        from qfleet.training.evaluator import RunEvaluation, make_evaluator

        evaluator = make_evaluator(self.components, self.env)
        return RunEvaluation(self.components, evaluator, self.checkpointer.checkpoints, self.run_log)

    @cached_property
    def plateau_control(self) -> "PlateauControl":
        """Adjusts settings when scores stop improving."""
        from qfleet.training.plateau_control import PlateauControl

        return PlateauControl(self.components, self.train_state)

    @cached_property
    def recovery(self) -> "Recovery":
        """Goes back to a checkpoint."""
        from qfleet.training.recovery import Recovery

        return Recovery(self.components, self.checkpointer, self.run_log, self.saver, self.sync_control)

    @property
    def plan(self) -> Plan:
        """The plan, whose end a callback may move."""
        return self.components.plan

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return self.components.steps

    # The start

    def start(self) -> None:
        """Begin the first episodes and save. A replay's process that is lost before is started again: it is empty."""
        self.checkpointer.require_space()
        self.run_log.mark_inexact(inexact_reasons(self.components))
        if self.components.peers is not None:
            self.run_log.mark_inexact(self.components.peers.nondeterminism_reasons())
        while True:
            try:
                self.components.actor.start()
                if learns_from_data(self.plan):
                    from qfleet.training.offline_loop import record_first_parameters  # an extra

                    record_first_parameters(self.components, self.run_log)
                return self.saver.save()
            except WorkerLost as cause:
                self.recovery.restart_replay(cause)

    def resume(self, *, strict: bool) -> int:
        """Go on from the newest valid checkpoint; returns how many lanes had to begin a new episode."""
        num_lost = self.recovery.load_or_restart_replay(strict=strict)
        if self.components.recorder is not None and self.ending() is None:
            self.components.recorder.require_open()
        return num_lost

    # The loop

    def train(self) -> tuple[Ending, Row | None]:
        """Train to the end and report; numbers that are not finite, or a lost replay, mean going back a few times."""
        fault: Exception | None = None
        while True:
            try:
                if fault is not None:
                    self.recovery.recover(fault)
                return self.finish(self.run())
            except (Diverging, NonFiniteValues, WorkerLost) as cause:
                fault = cause

    def run(self) -> Ending:
        """Train until the run is over."""
        self.loop = self.make_loop()
        if self.components.peers is not None:
            self.components.peers.publish_weights()
        if self.callbacks is not None:
            self.callbacks.start()
        self.do_due()  # an evaluation that a signal interrupted comes before the next step
        while (ending := self.ending()) is None:
            for tick in self.loop.turn():
                self.add_tick(tick)
            self.do_due()
        return ending

    def make_loop(self) -> "InlineLoop | OfflineLoop | AsyncLoop":
        """The loop for the run's components; it goes on counting updates that were skipped in a row."""
        actors = self.components.remote_actors
        skipped = self.train_state.skipped_in_a_row
        if learns_from_data(self.plan):
            from qfleet.training.offline_loop import OfflineLoop

            return OfflineLoop(self.components, skipped, self.run_log.stopwatch)
        if actors is None:
            return InlineLoop(self.components, skipped, self.run_log.stopwatch)
        from qfleet.training.async_loop import AsyncLoop  # most runs act in one thread

        return AsyncLoop(self.components, actors, skipped, self.run_log.stopwatch)

    def add_tick(self, tick: Tick) -> None:
        """Count what a step or an update reports; log faults of environments and resets of the network."""
        self.train_state.add_tick(tick)
        if self.callbacks is not None and self.callbacks.wants_updates and "loss" in tick.stats:
            self.callbacks.call("on_update")
        for fault in tick.stats.get("faults", ()):
            self.run_log.faults.env_fault(fault)
            self.run_log.mark_inexact([ENV_FAULT])
        for text in tick.stats.get("warnings", ()):
            self.run_log.warn(text)
        if "reset" in tick.stats:
            number = tick.stats["reset"]
            self.run_log.log_change("reset", f"reset {number} of the network", number=number)

    def do_due(self) -> None:
        """Log, evaluate, save and apply requests, each when it is due."""
        if self.sync_control is not None:
            self.sync_control.follow_schedule()  # first, so that a save now includes it
        if self.callbacks is not None:
            self.callbacks.after_turn()
        if is_due(self.steps, self.plan.log.every_steps, self.train_state.logged_steps):
            self.run_log.log_progress()
        if self.plan.eval.episodes and is_due(self.steps, self.plan.eval.every_steps, self.train_state.evaluated_steps):
            self.evaluate()
        if self.saver.due():
            self.saver.try_save()
        if self.callbacks is not None:
            self.do_requested(self.callbacks)
        self.run_log.drain_learner_events()
        if self.sync_control is not None:
            self.sync_control.poll(self.saver.try_save)
        self.run_log.refresh()

    def do_requested(self, callbacks: "RunCallbacks") -> None:
        """Evaluate and save if callbacks asked for it and it was not done anyway."""
        requests = callbacks.requests
        if requests.evaluate:
            requests.evaluate = False
            if self.train_state.evaluated_steps != self.steps:
                if evaluation_decides(self.plan):
                    self.run_log.mark_inexact([EVALUATED_MORE])
                self.evaluate()
        if requests.save:
            requests.save = False
            self.saver.try_save()

    def evaluate(self) -> None:
        """Evaluate the policy, adjust what depends on its score, and commit the policy if it is the best so far."""
        self.components.wait_until_idle()  # the commit holds the weights that were evaluated, at the same step
        best = self.train_state.best
        before = self.train_state.evaluated_steps
        is_best = self.evaluation.validate(self.interrupted)
        evaluation = self.train_state.last_eval
        if self.train_state.evaluated_steps == self.steps and evaluation is not None:
            self.adjust(evaluation["mean"])
            if is_due(self.steps, self.plan.population.every_steps, before):
                self.evaluation.exploit(evaluation.get("members", []))
            if self.callbacks is not None:
                self.callbacks.after_evaluation()
        if is_best and not self.saver.try_save():
            self.evaluation.restore_best(best)

    def adjust(self, score: float) -> None:
        """Change the settings that the plan lets depend on validation scores."""
        for change in self.plateau_control.adjust(score):
            fields = {"setting": change.setting, "before": change.before, "after": change.after}
            self.run_log.log_change("steer", change.text, **fields)
        if self.plateau_control.gave_up():
            self.run_log.log_change("steer", self.plateau_control.farewell(), setting="steer.stop_patience")

    def interrupted(self) -> bool:
        """Called between the steps of an evaluation: was the run asked to stop? Watches over actors meanwhile."""
        if self.loop is not None:
            self.loop.poll()
        return bool(self.stop_request)

    # The end

    def ending(self) -> Ending | None:
        """Why the run is over, if it is."""
        until = self.plan.until
        if self.stop_request.name is not None:
            return Ending(*ENDINGS[self.stop_request.name], f"stopped by {self.stop_request.name}")
        if self.run_log.stop_requested:
            return Ending("stopped", 75, "stopped by a callback")
        if self.callbacks is not None and self.callbacks.requests.ending is not None:
            return self.callbacks.requests.ending
        if until.score is not None and self.solved(until.score):
            return Ending("done", 0, f"{SOLVED}={until.score:g}")
        if self.plan.steer.stop_patience is not None and self.plateau_control.gave_up():
            return Ending("done", 0, f"{GAVE_UP}={self.plan.steer.stop_patience}")
        if self.steps >= until.steps:
            return Ending("done", 0, f"reached until.steps={until.steps}")
        if until.seconds is not None and self.run_log.seconds() >= until.seconds:
            return Ending("done", 0, f"{OUT_OF_TIME}={until.seconds:g}")
        return None

    def solved(self, score: float) -> bool:
        """Is the whole interval of the last validation at or above the score?"""
        return self.train_state.last_eval is not None and self.train_state.last_eval["low"] >= score

    def finish(self, ending: Ending) -> tuple[Ending, Row | None]:
        """Commit, then test the best policy; rows after the commit are cut off when the run is resumed."""
        if self.stop_request:
            self.run_log.show_leaving()
        self.saver.save()
        self.saver.record_end(done=ending.state == "done")
        # Actors would count on beyond the commit, and take processor time from the final evaluation.
        self.loop = None
        self.components.actor.stop()
        for text in self.train_state.info.problems(enough_episodes=1):
            self.run_log.warn(text)
        if self.components.recorder is not None and ending.state == "done":
            self.publish_dataset(self.components.recorder)
        score = self.final_score() if ending.state == "done" else None
        if self.stop_request and ending.state == "done":
            ending = Ending(*ENDINGS[str(self.stop_request.name)], "stopped while the final score was measured")
        result = None if score is None else without_returns(score)
        if self.callbacks is not None:
            self.callbacks.end(ending, result)
        more = {**self.run_log.status.filtered(), **self.run_log.more_metrics()}
        self.run_log.log_row("end", **ending.row(), score=result, **more)
        self.run_log.flush_rows()
        return ending, score

    def publish_dataset(self, recorder: "DatasetRecorder") -> None:
        """Complete the data set of `save.dataset`."""
        dataset = recorder.publish(self.steps)
        manifest = dataset.manifest
        counts = {"episodes": manifest.num_episodes, "steps": manifest.num_steps, "version": dataset.version}
        text = f"data set {dataset.place.url}: {manifest.num_episodes:,} episodes, {manifest.num_steps:,} steps"
        self.run_log.log_change("dataset", text, url=dataset.place.url, **counts)

    def final_score(self) -> Row | None:
        """Evaluate the last policy if that is due, and the best one on test seeds."""
        if self.plan.eval.episodes and self.train_state.evaluated_steps != self.steps:
            # Not committed: a longer run would not have evaluated here, nor chosen another leader.
            self.evaluation.validate(self.interrupted, all_members=False)
            if self.callbacks is not None and self.train_state.evaluated_steps == self.steps:
                self.callbacks.call("on_evaluation")  # what it asks for comes too late
            self.saver.tidy(self.saver.write_best)
        if not self.plan.eval.test_episodes or self.stop_request:
            return None
        return self.evaluation.test_best(self.interrupted)

    def close(self) -> None:
        """Close files and the evaluation's worlds; the components are closed where they were made."""
        self.run_log.close()
        if self.callbacks is not None:
            self.callbacks.close()
        if "evaluation" in vars(self):
            self.evaluation.evaluator.close()
