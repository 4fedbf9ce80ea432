"""Evaluation of the greedy policy in worlds of its own: validation seeds choose the best, test seeds only report."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qfleet.act import EvaluationResult, Policy, evaluate_policy, num_eval_lanes
from qfleet.build.components import Components
from qfleet.build.worlds import EnvMaker, make_train_world
from qfleet.data import World
from qfleet.envs import TEST, VALIDATION, make_world
from qfleet.errors import NoCheckpointError
from qfleet.learn import PopulationLearner
from qfleet.nets import load_state_arrays, state_arrays
from qfleet.plan.schema import Plan
from qfleet.save import Checkpoints
from qfleet.training.checkpoints.checkpointer import MALFORMED
from qfleet.training.checkpoints.migrations import max_file_bytes, read_arrays
from qfleet.training.log.info_numbers import FIELD, info_means, info_text
from qfleet.training.log.run_log import RunLog
from qfleet.training.log.run_status import ENV_FAULT, Row, without_returns
from qfleet.training.train_state import TrainState
from qfleet.watch.statistics import summarize

if TYPE_CHECKING:
    from qfleet.training.evaluation.held_out import HeldOutEvaluator

Stop = Callable[[], bool]  # asked between the steps of an evaluation: shall it be interrupted?


@dataclass
class Evaluator:
    """Evaluates a policy; the validation world is kept between calls."""

    plan: Plan
    make: EnvMaker | None = None
    validation: World | None = None

    def world(self, stream: int, episodes: int) -> World:
        """A world with a lane for each of these episodes."""
        return make_world(
            self.plan.env,
            seed=self.plan.seed,
            stream=stream,
            num=num_eval_lanes(episodes),
            make=self.make,
            threads=self.plan.runtime.threads or 1,
            info=self.plan.log.info,
        )

    def validate(self, policy: Policy, stop: Stop = lambda: False) -> Row | None:
        """Play the same validation episodes each time; None if `stop` interrupted it."""
        episodes = self.plan.eval.episodes
        self.validation = self.validation or self.world(VALIDATION, episodes)
        played = evaluate_policy(policy, self.validation, episodes, max_steps=self.plan.eval.max_steps, stop=stop)
        return None if stop() else evaluation("validation", played, self.plan.log.info)

    def test(self, policy: Policy, episodes: int | None = None, stop: Stop = lambda: False) -> Row | None:
        """Play episodes that nothing else in the run has seen; None if `stop` interrupted it."""
        episodes = episodes or self.plan.eval.test_episodes
        with closing(self.world(TEST, episodes)) as world:
            played = evaluate_policy(policy, world, episodes, max_steps=self.plan.eval.max_steps, stop=stop)
        return None if stop() else evaluation("test", played, self.plan.log.info)

    def close(self) -> None:
        """Close the validation world."""
        if self.validation is not None:
            self.validation.close()
            self.validation = None


def shown_world(plan: Plan, make: EnvMaker | None) -> World:
    """A world that shows the spaces of a run: its own, or if that is not installed the recorded one."""
    return make_train_world(plan, make) if plan.eval.on == "data" else Evaluator(plan, make).world(0, 1)


def evaluation(split: str, played: EvaluationResult, info: Sequence[str] = ()) -> Row:
    """The fields of an evaluation row, with the means of the numbers of `log.info`."""
    means = info_means(info, played.info)
    return {"split": split, "epsilon": 0.0, **played.row(), **means, **summarize(played.returns)}


def make_evaluator(components: Components, make: EnvMaker | None) -> "Evaluator | HeldOutEvaluator":
    """What evaluates a run's policy: episodes in its world, or recorded ones."""
    if components.plan.eval.on != "data":
        return Evaluator(components.plan, make)
    from qfleet.training.evaluation.held_out import HeldOutEvaluator

    return HeldOutEvaluator(components)


@dataclass
class RunEvaluation:
    """Evaluates a run's policy and keeps the best evaluation so far in its state."""

    components: Components
    evaluator: "Evaluator | HeldOutEvaluator"
    checkpoints: Checkpoints
    run_log: RunLog

    @property
    def train_state(self) -> TrainState:
        """The counters of the run."""
        return self.run_log.train_state

    def validate(self, stop: Stop, *, all_members: bool = True) -> bool:
        """Evaluate on validation seeds; is the policy the best so far? An interrupted evaluation stays due."""
        with self.run_log.stopwatch.eval:
            row = self.play(stop, all_members=all_members)
        if row is None:
            return False
        steps = self.components.steps
        self.train_state.evaluated_steps = steps
        self.log_evaluation(row)
        return self.train_state.add_evaluation({"env_steps": steps, **without_returns(row)})

    def play(self, stop: Stop, *, all_members: bool) -> Row | None:
        """Evaluate the run's policy, or every member of a population, the best of which leads it from then on."""
        learner = self.components.learner
        if not all_members or not isinstance(learner, PopulationLearner):
            return self.evaluator.validate(self.components.policy, stop=stop)
        results = [self.evaluator.validate(policy, stop=stop) for policy in self.components.policies]
        rows = [row for row in results if row is not None]
        if len(rows) < len(results):
            return None
        scores = [row["mean"] for row in rows]
        learner.choose_leader(scores)
        return {**rows[learner.leader_index], "members": scores, "leader": learner.leader_index}

    def exploit(self, scores: list[float]) -> None:
        """Let the worst member of a population take the weights of the best one."""
        learner = self.components.learner
        if not isinstance(learner, PopulationLearner):
            return
        worst = learner.exploit(scores)
        if worst is None:
            return
        best = learner.leader_index
        text = f"member {worst} ({scores[worst]:.4g}) takes the weights of member {best} ({scores[best]:.4g})"
        self.run_log.log_change("exploit", text, member=worst, leader=best)

    def restore_best(self, before: Row | None) -> None:
        """The newest best policy could not be saved: the one before stays the best."""
        lost = self.train_state.best or {}
        self.train_state.best = before
        reason = f"the best policy so far, {lost['mean']:g} at step {lost['env_steps']}, could not be saved"
        self.run_log.mark_inexact([reason])

    def test_best(self, stop: Stop) -> Row | None:
        """Score the best checkpoint on test seeds, which nothing else in the run has seen."""
        step, which = self.load_best_weights()
        with self.run_log.stopwatch.eval:
            found = self.evaluator.test(self.components.policy, stop=stop)
        if found is None:
            return None
        row = {"checkpoint": step, "which": which, **self.train_state.best_context(), **found}
        self.log_evaluation(row)
        return row

    def load_best_weights(self) -> tuple[int, str]:
        """Load the best checkpoint's weights into the policy, if it can be read; its step, and `best` or `latest`."""
        best = self.train_state.best
        step = best["env_steps"] if best else self.components.steps
        policy = self.components.policy
        before = state_arrays(policy.net)
        try:
            found = self.checkpoints.load(step, whole=False)
            policy.refresh_weights()  # otherwise it would later copy the learner's newest weights over the best
            load_state_arrays(policy.net, read_arrays(found, "model.safetensors", max_file_bytes(before.values())))
        except (NoCheckpointError, *MALFORMED) as cause:
            load_state_arrays(policy.net, before)
            text = cause.what if isinstance(cause, NoCheckpointError) else str(cause)
            reason = f"the best checkpoint cannot be used, the last weights were evaluated instead: {text}"
            self.run_log.mark_inexact([reason])
            return self.components.steps, "latest"
        return step, "best" if best else "latest"

    def log_evaluation(self, row: Row) -> None:
        """Write an evaluation's row; warn if episodes were cut short or lost with their environment."""
        if row["cut_episodes"]:
            self.run_log.warn(cut_warning(self.components.plan.eval.max_steps))
        if row.get("lost_episodes"):
            self.run_log.mark_inexact([ENV_FAULT])
        for name, values in self.train_state.info.recent.items():
            if values and row[f"{FIELD}{name}"] is None:  # else a warning about training episodes is enough
                self.run_log.warn(f"log.info: training episodes have {info_text(name)}, evaluation episodes have not")
        self.run_log.log_row("eval", **row)


def cut_warning(max_steps: int) -> str:
    """What the scores of episodes that were cut short mean."""
    return (
        f"evaluation episodes had not ended after eval.max_steps={max_steps} steps and were cut there: "
        "their scores only say how far they came (cut_episodes in the rows)"
    )
