"""The course of a run: turn the line, judge, save, go back when numbers fail, and know when it is done."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from qfleet.act.policy import NonFiniteValues
from qfleet.audit.history import HistoryLog, NoHistory
from qfleet.build.components import SAMPLE, Components, ReplayLost, stream
from qfleet.data import Array, Batch, Sequences
from qfleet.data.state_reader import saved_count, saved_number
from qfleet.errors import DivergedError, EnvError, NoCheckpointError, StorageError
from qfleet.files import make_folder, remove_file
from qfleet.learn import Diverging, PopulationLearner, arrays, restore
from qfleet.learn.peers import Peers
from qfleet.plan import switches
from qfleet.plan.sync_schema import Sync
from qfleet.save import Checkpoint, pack_tensors
from qfleet.training.checkpoints.checkpointer import MALFORMED, Checkpointer, malformed
from qfleet.training.checkpoints.migrations import arrays_in, room_for
from qfleet.training.evaluator import Evaluator
from qfleet.training.log.run_log import Ending, Row, RunLog, short
from qfleet.training.plateau_control import PlateauControl, evaluations
from qfleet.training.process.signals import ENDINGS, StopRequest
from qfleet.training.requests import SyncRequest, heeded, take
from qfleet.training.runtime import Runtime, make_runtime
from qfleet.watch import write_file, write_json
from qfleet.watch.run_files import unwritable

ROLLBACKS = 3
HEED_SECONDS = 1.0
# Events among learners after which no seed decides this run.
TELLING = {
    "learner_lost": "a learner was lost",
    "group_failed": "the group of learners was formed anew",
    "bundle_inexact": "a learner's own environments or replay did not come back",
}
ASYNCHRONOUS = "actors work beside the learner, so their timing decides what is learned from when"
SOLVED = "validation interval is above until.score"
OUT_OF_TIME = "reached until.seconds"
FAULTED = "an environment failed and was made anew, with episodes that no seed decides"
GAVE_UP = "no better validation score within steer.stop_patience"


class Trainer:
    """One run from its present state to its end."""

    def __init__(
        self, line: Components, judge: Evaluator, checkpointer: Checkpointer, run_log: RunLog, asked: StopRequest
    ) -> None:
        self.line = line
        self.judge = judge
        self.checkpointer = checkpointer
        self.run_log = run_log
        self.asked = asked
        self.plan = line.plan
        self.train_state = run_log.train_state
        self.clock = run_log.clock
        self.folder: Path = run_log.folder
        self.runtime: Runtime | None = None  # made when the run begins, or begins again
        self.steering = PlateauControl(line, self.train_state)
        self.history: HistoryLog = NoHistory() if line.remote_actors is None else line.remote_actors.history
        self.tried_at = self.clock()
        self.tried_steps = 0
        self.save_seconds = 0.0
        self.heeded_at = 0.0
        # the updates it was looked at after
        self.switches = switches(self.plan)
        self.scheduled = line.learner.updates
        self.bests: dict[int, int] = {}  # for each kept checkpoint, the step of the best one it names

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return self.line.steps

    # The loop

    def complete(self) -> tuple[Ending, Row | None]:
        """Train and report; numbers that are not finite, or a replay that is lost, mean going back, a few times."""
        trouble: Exception | None = None
        while True:
            try:
                if trouble is not None:
                    self.recover(trouble)
                return self.finish(self.run())
            except (Diverging, NonFiniteValues, ReplayLost) as cause:
                trouble = cause

    def recover(self, cause: Exception) -> None:
        """Go back to the last commit."""
        if isinstance(cause, ReplayLost):
            self.replace_replay(cause)
        else:
            self.roll_back(cause)

    def run(self) -> Ending:
        """Train until something says enough."""
        self.runtime = make_runtime(self.line, self.train_state.skipped_in_a_row, self.run_log.watch)
        if self.line.peers is not None:
            self.line.peers.meet()
        self.do_due()  # an evaluation that a signal cut short comes before the next step
        while (ending := self.ending()) is None:
            self.turn(self.runtime)
            self.do_due()
        return ending

    def turn(self, runtime: Runtime) -> None:
        """Some steps and their updates."""
        for tick in runtime.turn():
            self.train_state.note(tick)
            for fault in tick.stats.get("faults", ()):
                self.run_log.note_fault(fault)
                self.doubt([FAULTED])
            if "reset" in tick.stats:
                self.run_log.tell("reset", f"reset {tick.stats['reset']} of the network", number=tick.stats["reset"])

    def do_due(self) -> None:
        """Rows, evaluation and saving, each when its time has come."""
        self.follow_schedule()  # first, so that whatever is saved now has it behind it
        if self.due(self.plan.log.every_steps, self.train_state.logged_steps):
            self.run_log.log()
        if self.plan.eval.episodes and self.due(self.plan.eval.every_steps, self.train_state.judged_steps):
            self.judge_now()
        if self.save_due():
            self.try_save()
        self.heed()
        self.run_log.show()

    def heed(self) -> None:
        """Tell what happened among learners; agree in another way, if somebody wants it."""
        self.note_learners()
        if self.line.peers is None or self.clock() - self.heeded_at < HEED_SECONDS:
            return
        self.heeded_at = self.clock()
        try:
            wanted = take(self.folder)
        except (ValueError, OSError) as cause:
            self.run_log.warn(f"what was wanted makes no sense: {cause}")
        else:
            if wanted is not None:
                self.grant(self.line.peers, wanted)
        heeded(self.folder)

    def grant(self, peers: Peers, wish: SyncRequest) -> None:
        """Agree in another way, and be as many, because somebody wants it."""
        peers.resize(wish.learners)
        self.agree(peers, wish.sync)
        self.doubt(["learners were told to agree in another way, at a moment that no seed decides"])
        # A run that goes on from a checkpoint agrees as that one says: without this commit, as before.
        self.try_save()

    def follow_schedule(self) -> None:
        """Agree in another way, if the plan says so of as many updates as were made."""
        before = self.scheduled
        self.scheduled = self.line.learner.updates
        due = [switch for switch in self.switches if before < switch.updates <= self.scheduled]
        if due and self.line.peers is not None:
            self.agree(self.line.peers, due[-1].sync)
            self.doubt(self.line.peers.chances())

    def agree(self, peers: Peers, after: Sync) -> None:
        """Agree so from the next update on."""
        before = peers.agreement
        if after != before:
            peers.switch(after)
        tags = [str(sync.__struct_config__.tag) for sync in (before, after)]
        text = f"{peers.num} learners agree by {tags[1]} from now on"
        self.run_log.tell("sync", text, before=tags[0], after=tags[1], learners=peers.num)
        with suppress(StorageError):
            self.run_log.write_status()

    def note_learners(self) -> None:
        """Write down what happened to learners; a run that lost one is not the one its seed decides."""
        if why := getattr(self.line.learner, "not_compiled", ""):
            self.doubt([f"the update could not be compiled and is made step by step, with other last digits ({why})"])
        for event in self.line.peers.take_events() if self.line.peers is not None else ():
            self.run_log.note_learner(event)
            if event["kind"] in TELLING:
                self.train_state.doubt(f"{TELLING[event['kind']]}: {event['what']}")

    def due(self, every: int, before: int) -> bool:
        """Has another multiple of `every` steps been reached?"""
        return self.steps // every > before // every

    def ending(self) -> Ending | None:
        """Why the run is over, if it is."""
        until = self.plan.until
        if self.asked.name is not None:
            state, code = ENDINGS[self.asked.name]
            return Ending(state, code, f"stopped by {self.asked.name}")
        if self.run_log.stop_asked:
            return Ending("stopped", 75, "stopped by a callback")
        if until.score is not None and self.solved(until.score):
            return Ending("done", 0, f"{SOLVED}={until.score:g}")
        if self.steering.gave_up():
            return Ending("done", 0, f"{GAVE_UP}={self.plan.steer.stop_patience}")
        if self.steps >= until.steps:
            return Ending("done", 0, f"reached until.steps={until.steps}")
        if until.seconds is not None and self.run_log.seconds() >= until.seconds:
            return Ending("done", 0, f"{OUT_OF_TIME}={until.seconds:g}")
        return None

    def solved(self, score: float) -> bool:
        """Is the whole interval of the last validation at or above the score?"""
        return self.train_state.last_eval is not None and self.train_state.last_eval["low"] >= score

    # Judging

    def judge_now(self) -> None:
        """Judge the policy, and commit it if it is the best so far."""
        self.line.rest()  # what is committed shall be what was judged, at the same step
        best = self.train_state.best
        before = self.train_state.judged_steps
        is_best = self.validate()
        if self.train_state.judged_steps == self.steps and self.train_state.last_eval is not None:
            self.steer(self.train_state.last_eval["mean"])
            if self.due(self.plan.population.every_steps, before):
                self.exploit(self.train_state.last_eval)
        if is_best and not self.try_save():
            self.lose_best(best)

    def lose_best(self, before: Row | None) -> None:
        """The newest best policy could not be saved: the one before stays the best, and the run says so."""
        lost = self.train_state.best or {}
        self.train_state.best = before
        self.doubt([f"the best policy so far, {lost['mean']:g} at step {lost['env_steps']}, could not be saved"])

    def steer(self, score: float) -> None:
        """Let a validation change what the plan lets it change, and tell."""
        for act in self.steering.see(score):
            self.run_log.tell("steer", act.text, setting=act.setting, before=act.before, after=act.after)
        if self.steering.gave_up():
            text = f"stopping: no score above {self.train_state.peak:g} in {evaluations(self.train_state.stale)}"
            self.run_log.tell("steer", text, setting="steer.stop_patience")

    def exploit(self, judged: Row) -> None:
        """Let the worst member of a population take the best one's weights, and tell."""
        if not isinstance(learner := self.line.learner, PopulationLearner):
            return
        if (worst := learner.exploit(scores := judged["members"])) is not None:
            best = learner.leader
            text = f"member {worst} ({scores[worst]:.4g}) takes the weights of member {best} ({scores[best]:.4g})"
            self.run_log.tell("exploit", text, member=worst, leader=best)

    def interrupted(self) -> bool:
        """Asked between the steps of an evaluation: has somebody asked the run to end?"""
        if self.runtime is not None:
            self.runtime.tend()
        return bool(self.asked)

    def judged(self, *, everyone: bool) -> Row | None:
        """A validation, unless it is cut short: of a population that of its best member, who leads from now on."""
        learner = self.line.learner
        stop = self.interrupted
        if not (isinstance(learner, PopulationLearner) and everyone):
            return self.judge.validate(self.line.policy, stop=stop)
        found = [self.judge.validate(policy, stop=stop) for policy in self.line.policies]
        rows = [row for row in found if row is not None]
        if len(rows) < len(found):
            return None
        learner.lead(scores := [row["mean"] for row in rows])
        return {**rows[learner.leader], "members": scores, "leader": learner.leader}

    def validate(self, *, everyone: bool = True) -> bool:
        """Judge the greedy policy: is it the best so far?"""
        with self.run_log.watch.eval:
            row = self.judged(everyone=everyone)
        if row is None:
            return False  # cut short: not an evaluation, and still due
        self.train_state.judged_steps = self.steps
        self.note_evaluation(row)
        self.run_log.emit("eval", **row)
        return self.train_state.judge({"env_steps": self.steps, **short(row)})

    def note_evaluation(self, row: Row) -> None:
        """Say that episodes were cut, or lost with their environment."""
        if row["cut_episodes"]:
            self.run_log.warn(cut_warning(self.plan.eval.max_steps))
        if row.get("lost_episodes"):
            self.doubt([FAULTED])

    def write_best(self) -> None:
        """best.json says which checkpoint that is; it is gone when a run goes on from before its first evaluation."""
        if self.train_state.best is not None:
            write_json(self.folder / "best.json", {**self.train_state.best, "step": self.train_state.best["env_steps"]})
            return
        try:
            remove_file(self.folder, "best.json")
        except OSError as error:
            raise unwritable(self.folder / "best.json", error) from error

    # Saving

    def require_finite(self) -> None:
        """Weights that are not finite are neither saved nor reported."""
        if not self.line.learner.finite():
            raise NonFiniteValues("weights are not finite")

    def save_due(self) -> bool:
        """Often enough by steps or seconds, but never more than the plan's share of the time."""
        save = self.plan.save
        now = self.clock()
        wanted = self.due(save.every_steps, self.tried_steps) or now - self.tried_at >= save.every_seconds
        return wanted and self.save_seconds <= save.max_share * (now - self.tried_at)

    def try_save(self) -> bool:
        """Save, or endure that the disk says no."""
        try:
            self.save()
        except StorageError as cause:
            self.run_log.require_folder()
            self.run_log.endure(cause)
            return False
        self.run_log.failed_writes = 0
        return True

    def save(self) -> None:
        """Commit this moment; only finite weights get that far."""
        self.run_log.require_folder()
        self.line.rest()
        self.note_learners()
        self.require_finite()
        # A save that fails is due again after the usual time, not in the next step.
        begin = self.tried_at = self.clock()
        self.tried_steps = self.steps
        self.doubt(self.run_log.write_waiting())
        with self.run_log.watch.save:
            meta = {"seconds": self.run_log.seconds(), "rows": self.run_log.rows.position()}
            self.checkpointer.save(self.steps, self.train_state.state_dict(), meta)
            self.history.note("learner", "committed", env_steps=self.steps, updates=self.line.learner.updates)
            self.tidy(self.write_best, self.prune)
        self.run_log.saved_at = self.tried_at = self.clock()
        self.save_seconds = self.tried_at - begin

    def tidy(self, *chores: Callable[[], None]) -> None:
        """What follows a commit. The commit stands: what the disk refuses now is done after the next one."""
        for chore in chores:
            try:
                chore()
            except (StorageError, OSError) as cause:
                self.run_log.warn(
                    f"saved, but not tidied up: {cause.what if isinstance(cause, StorageError) else cause}"
                )

    def prune(self) -> None:
        """Old checkpoints go, but never the best as any kept checkpoint knows it."""
        if self.train_state.best is not None:
            self.bests[self.steps] = self.train_state.best["env_steps"]
        self.bests = dict(list(self.bests.items())[-self.plan.save.keep :])
        self.checkpointer.checkpoints.prune(self.bests.values())

    def load(self, **options: Any) -> int:
        """Go on from the newest valid checkpoint; returns how many lanes had to begin a new episode."""
        if self.line.remote is not None:
            self.line.remote.rest()
        if self.line.peers is not None:
            self.line.peers.forget()
        known = self.train_state.not_exact
        meta, lost = self.checkpointer.checkpoints.restore(self.take_back, **options)
        for reason in known:  # a run that goes back does not forget what happened
            self.train_state.doubt(reason)
        self.bests = {self.steps: self.train_state.best["env_steps"]} if self.train_state.best is not None else {}
        if (
            self.train_state.best is not None
            and self.train_state.best["env_steps"] not in self.checkpointer.checkpoints.steps()
        ):
            self.run_log.warn(
                f"the best checkpoint, step {self.train_state.best['env_steps']}, is gone: a new best is sought"
            )
            self.train_state.best = None
        self.run_log.waiting.clear()
        if missing := self.run_log.rows.cut(int(meta["rows"])):
            self.run_log.warn(f"metrics.jsonl lacks {missing} bytes that the checkpoint counts on")
        self.run_log.go_on(float(meta["seconds"]))
        self.tried_at = self.clock()
        self.tried_steps = self.steps
        self.scheduled = self.line.learner.updates
        self.write_best()
        self.note_inexact(int(lost.sum()))
        return int(lost.sum())

    def take_back(self, found: Checkpoint) -> tuple[Row, Array]:
        """Line and book out of a checkpoint: what it says of itself, and the lanes [B] that could not come back."""
        train_state, lost = self.checkpointer.load(found)
        try:
            self.train_state.load_state_dict(train_state)
            saved_count(found.meta, "rows")
            saved_number(found.meta, "seconds")
        except MALFORMED as error:
            raise malformed(found, error) from error
        return found.meta, lost

    def note_inexact(self, lanes: int) -> None:
        """Remember, for as long as the run lives, that it is no longer the run its seed decides, and why."""
        reasons = [*self.checkpointer.changed_conditions(), *self.unpromised()]
        reasons += [] if self.line.peers is None else self.line.peers.doubts()
        if lanes:
            reasons.append(f"{lanes} of {self.plan.env.num} environments could not be re-driven and began new episodes")
        if self.checkpointer.last is not None and self.checkpointer.last.meta["replay"] == "none":
            reasons.append("the replay was not saved")
        if self.checkpointer.begun_anew:
            reasons.append("an older version began the present block of experience; it is gathered anew")
        self.doubt(reasons)

    def unpromised(self) -> list[str]:
        """Why no seed decides this run whatever happens, if so."""
        found = [*self.line.doubts, *unpromised(self.plan.runtime.device)]
        return found + ([ASYNCHRONOUS] if self.line.remote_actors is not None else [])

    def doubt(self, reasons: Iterable[str]) -> None:
        """The run is not exact, for these reasons if there are any."""
        for reason in reasons:
            self.run_log.warn(f"not exact: {reason}")
            self.train_state.doubt(reason)

    def roll_back(self, cause: Exception) -> None:
        """Numbers stopped being finite: go back to the last commit and draw other batches from there."""
        rollbacks = self.train_state.rollbacks + 1
        if isinstance(cause, Diverging):
            self.keep_batch(cause.batch)
        self.run_log.events.event("rollback", cause=str(cause), env_steps=self.steps, number=rollbacks)
        if rollbacks > ROLLBACKS:
            raise DivergedError(
                f"training diverged at step {self.steps}: {cause}",
                f"Going back to the last checkpoint {ROLLBACKS} times did not help; usual causes are rewards or "
                "observations of very different sizes, or too high a learning rate.",
                f"Lower optim.learning_rate={self.plan.optim.learning_rate:g}, set optim.clip_norm, or try "
                "env.normalize=both; the batch is in debug/.",
            ) from cause
        self.load()
        self.draw_others(rollbacks)
        self.run_log.warn(f"rolled back to step {self.steps}: {cause}")

    def draw_others(self, rollbacks: int) -> None:
        """Draw other batches from here on; those that were skipped before say nothing about them."""
        self.train_state.skipped_in_a_row = 0
        self.train_state.rollbacks = rollbacks
        self.train_state.doubt(
            "numbers were not finite: it went back to a checkpoint, and the clock decides where that is"
        )
        self.line.batch_source.replay.reseed(stream(self.plan.seed, SAMPLE, rollbacks))
        if self.line.peers is not None:
            self.line.peers.reseed(rollbacks)

    def begin(self) -> None:
        """Start acting and commit that; a replay that is lost before has nothing in it yet."""
        while True:
            try:
                self.line.actor.start()
                return self.save()
            except ReplayLost as cause:
                self.restart_replay(cause)

    def come_back(self, **options: Any) -> int:
        """`load`, whatever happens to the replay's process meanwhile."""
        while True:
            try:
                return self.load(**options)
            except ReplayLost as cause:
                self.restart_replay(cause)

    def restart_replay(self, cause: ReplayLost) -> None:
        """The process that held the replay is gone: start another one, a few times."""
        if self.line.remote is None or not self.line.remote.budget.charge(time.monotonic()):
            raise EnvError(
                "the replay's process has failed more often than runtime.restarts allows",
                f"{cause}.",
                "Is there enough memory? runtime.replay_process=false keeps the replay beside the learner.",
            ) from cause
        self.line.remote.start()

    def replace_replay(self, cause: ReplayLost) -> None:
        """Go on from the last commit with another process for the replay."""
        steps = self.steps
        rollbacks = self.train_state.rollbacks
        self.restart_replay(cause)
        self.load()
        if rollbacks > self.train_state.rollbacks:  # the commit is from before them
            self.draw_others(rollbacks)
        self.run_log.events.event("replay_lost", cause=str(cause), steps_lost=steps - self.steps, env_steps=self.steps)

    def keep_batch(self, batch: Batch | Sequences) -> None:
        """The batch that could not be learned from, for the curious."""
        make_folder(self.folder, "debug")
        arrays = {name: value for name in batch.__slots__ if (value := getattr(batch, name)) is not None}
        write_file(self.folder / "debug" / f"batch_{self.steps:012d}.safetensors", pack_tensors(arrays))

    # The end

    def finish(self, ending: Ending) -> tuple[Ending, Row | None]:
        """Commit, then report the best policy on test seeds; what comes after the commit is cut off on resume."""
        if self.asked:
            self.run_log.show_leaving()
        self.save()
        counts = {"env_steps": self.steps, "updates": self.line.learner.updates}
        self.history.note("learner", "closed", **counts, forgiven=self.line.forgiven, done=ending.state == "done")
        # What comes now is judged alone: actors would count on beyond the commit, and take its processor time.
        self.runtime = None
        self.line.actor.dismiss()
        score = None
        if ending.state == "done":
            if self.plan.eval.episodes and self.train_state.judged_steps != self.steps:
                # Not committed: a longer run would not have judged here, nor chosen another leader.
                self.validate(everyone=False)
                self.tidy(self.write_best)
            score = self.report()
        if self.asked and ending.state == "done":
            ending = Ending(*ENDINGS[str(self.asked.name)], "stopped while the final score was measured")
        result = None if score is None else short(score)
        how = {"state": ending.state, "exit_code": ending.exit_code, "reason": ending.reason, "score": result}
        self.run_log.emit("end", **how, **self.run_log.filtered())
        self.doubt(self.run_log.write_waiting())
        return ending, score

    def report(self) -> Row | None:
        """The best checkpoint's score on episodes nothing has seen."""
        if not self.plan.eval.test_episodes or self.asked:
            return None
        step, which = self.adopt_best()
        with self.run_log.watch.eval:
            found_score = self.judge.test(self.line.policy, stop=self.interrupted)
        if found_score is None:
            return None
        row = {"checkpoint": step, "which": which, **self.train_state.chosen(), **found_score}
        self.note_evaluation(row)
        self.run_log.emit("eval", **row)
        return row

    def adopt_best(self) -> tuple[int, str]:
        """Give the policy the weights of the best checkpoint, if it can be read; its step, and what it is called."""
        step = self.train_state.best["env_steps"] if self.train_state.best else self.steps
        net = self.line.policy.net
        before = arrays(net)
        try:
            found = self.checkpointer.checkpoints.load(step, whole=False)
            self.line.policy.follow()  # else what the learner changed last would be copied over the best
            restore(net, arrays_in(found, "model.safetensors", room_for(before.values())))
        except (NoCheckpointError, *MALFORMED) as cause:
            restore(net, before)
            what = cause.what if isinstance(cause, NoCheckpointError) else str(cause)
            self.doubt([f"the best checkpoint cannot be used, the last weights were judged instead: {what}"])
            return self.steps, "latest"
        return step, "best" if self.train_state.best else "latest"

    def close(self) -> None:
        """Let go of files and of the judge's worlds; the line is closed by whoever made it."""
        self.run_log.close()
        self.judge.close()


def cut_warning(max_steps: int) -> str:
    """What scores of episodes that were cut are."""
    return (
        f"evaluation episodes had not ended after eval.max_steps={max_steps} steps and were cut there: "
        "their scores only say how far they came (cut_episodes in the rows)"
    )


def unpromised(device: str | None) -> list[str]:
    """Why a run on this device need not repeat, if so: some kernels of an accelerator add up in any order."""
    if device is None or torch.device(device).type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return []
    return ["determinism on accelerators is not promised"]
