"""Rules that look at several settings at once: one table of small functions, each with its reason.

A rule answers None, or what is wrong and what to do. Settings the user did not write are judged more mildly:
a period that never comes due in a shortened run is only wrong if somebody asked for it on the command line.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from qfleet.errors import UsageError
from qfleet.plan import paths
from qfleet.plan.draft import DEFAULT, show
from qfleet.plan.presets import ATARI
from qfleet.plan.schema import ConstantEpsilon, CopyTarget, LinearEpsilon, Plan, PrioritizedSampler

COMMAND_LINE = "command line"
PYTHON = "Python"
DEVICES = ["cpu", "cuda", "mps", "xpu"]

Problem: TypeAlias = tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Case:
    """A plan under judgement, and where its values came from."""

    plan: Plan
    origins: Mapping[str, str]

    def named(self, path: str) -> str:
        """The setting with its value and origin, for messages."""
        return f"{path}={show(paths.flatten(self.plan).get(path))} ({self.origins.get(path, DEFAULT)})"

    def asked_now(self, path: str) -> bool:
        """Whether this very command asked for it."""
        return self.origins.get(path) in (COMMAND_LINE, PYTHON)


Rule: TypeAlias = Callable[[Case], Problem]


def updates_per_step(plan: Plan) -> float:
    """How many updates the gate allows per environment step."""
    return plan.replay.samples_per_insert / plan.algo.batch_size


def total_updates(plan: Plan) -> int:
    """How many updates the whole run makes if no other end comes first."""
    return math.floor(updates_per_step(plan) * max(0, plan.until.steps - plan.algo.learn_start_steps))


def _env_is_named(case: Case) -> Problem:
    if 0 < len(case.plan.env.id) <= 500 and case.plan.env.id.isprintable() and not re.search(r"\s", case.plan.env.id):
        return None
    return f"{case.named('env.id')} is not an environment id", "Give an id such as CartPole-v1 or ALE/Pong-v5."


def _options_are_names(case: Case) -> Problem:
    wrong = next((name for name in case.plan.env.options if not name.isidentifier()), None)
    if wrong is None:
        return None
    return f"env.options has a key {wrong!r} ({case.origins.get('env.options', DEFAULT)})", "Rename or remove it."


def _batch_fits(case: Case) -> Problem:
    capacity, batch = case.plan.replay.capacity, case.plan.algo.batch_size
    if batch <= capacity:
        return None
    what = f"{case.named('algo.batch_size')} is more than {case.named('replay.capacity')}"
    return what, f"Set replay.capacity to {batch} or more, or lower algo.batch_size."


def _windows_fit(case: Case) -> Problem:
    need = case.plan.env.num * (case.plan.algo.n_step + 1)
    if case.plan.replay.capacity >= need:
        return None
    what = f"{case.named('replay.capacity')} cannot hold {case.named('algo.n_step')} for {case.named('env.num')}"
    return what, f"Set replay.capacity to {need} or more."


def _learning_starts(case: Case) -> Problem:
    start, end = case.plan.algo.learn_start_steps, case.plan.until.steps
    if start < end or not case.asked_now("algo.learn_start_steps"):
        return None
    what = f"{case.named('algo.learn_start_steps')} is not before the end, {case.named('until.steps')}"
    return what, f"Raise until.steps above {start}, or add algo.learn_start_steps={end // 10}."


def _some_updates(case: Case) -> Problem:
    if total_updates(case.plan) > 0 or not case.asked_now("replay.samples_per_insert"):
        return None
    what = f"{case.named('replay.samples_per_insert')} makes 0 updates in {case.named('until.steps')}"
    return what, f"Raise it: {case.plan.algo.batch_size} is one update per step with this batch size."


def _epsilon_falls(case: Case) -> Problem:
    explore = case.plan.algo.explore
    if isinstance(explore, ConstantEpsilon) or explore.start >= explore.end:
        return None
    what = f"{case.named('algo.explore.start')} is below {case.named('algo.explore.end')}"
    return what, "Swap them, or set algo.explore.type=constant and algo.explore.epsilon."


def _epsilon_moves(case: Case) -> Problem:
    explore = case.plan.algo.explore
    if isinstance(explore, ConstantEpsilon) or explore.start != explore.end:
        return None
    path = "algo.explore.steps" if isinstance(explore, LinearEpsilon) else "algo.explore.half_life_steps"
    if not case.asked_now(path):
        return None
    return f"{case.named(path)} has no effect", "Leave it out, or let algo.explore.start and algo.explore.end differ."


def _beta_rises(case: Case) -> Problem:
    sampler = case.plan.replay.sampler
    if not isinstance(sampler, PrioritizedSampler) or sampler.beta_start <= sampler.beta_end:
        return None
    what = f"{case.named('replay.sampler.beta_start')} is above {case.named('replay.sampler.beta_end')}"
    return what, "Swap them; 0.4 to 1.0 is usual."


def _priorities_matter(case: Case) -> Problem:
    sampler = case.plan.replay.sampler
    if not isinstance(sampler, PrioritizedSampler) or sampler.alpha > 0:
        return None
    what = f"replay.sampler.type=prioritized has no effect with {case.named('replay.sampler.alpha')}"
    return what, "Set replay.sampler.type=uniform, or an alpha such as 0.6."


def _steps_matter(case: Case) -> Problem:
    if case.plan.algo.discount > 0 or case.plan.algo.n_step == 1:
        return None
    return f"{case.named('algo.n_step')} has no effect with {case.named('algo.discount')}", "Set algo.n_step=1."


def _score_is_seen(case: Case) -> Problem:
    if case.plan.until.score is None or case.plan.eval.every_steps <= case.plan.until.steps:
        return None
    if not case.asked_now("until.score"):
        return None
    what = f"{case.named('until.score')} has no effect: {case.named('eval.every_steps')}, {case.named('until.steps')}"
    return what, f"Set eval.every_steps to {case.plan.until.steps} or less."


def _score_is_measured(case: Case) -> Problem:
    if case.plan.until.score is None or case.plan.eval.episodes > 0 or not case.asked_now("until.score"):
        return None
    what = f"{case.named('until.score')} has no effect with {case.named('eval.episodes')}"
    return what, "Set eval.episodes to 20 or so, or leave until.score out."


def _target_moves(case: Case) -> Problem:
    path, target = "algo.target.every_updates", case.plan.algo.target
    if not isinstance(target, CopyTarget) or not case.asked_now(path):
        return None
    if target.every_updates <= total_updates(case.plan):
        return None
    what = f"{case.named(path)} has no effect: the run makes {total_updates(case.plan)} updates"
    return what, f"Set {path} to {max(1, total_updates(case.plan) // 10)} or so, or raise until.steps."


def _only_atari(path: str) -> Rule:
    def rule(case: Case) -> Problem:
        if paths.flatten(case.plan)[path] is None or ATARI.search(case.plan.env.id):
            return None
        return f"{case.named(path)} has no effect on {case.plan.env.id}", f"Leave {path} out."

    return rule


def _device_is_known(case: Case) -> Problem:
    device = case.plan.runtime.device
    if device is None or re.fullmatch(rf"({'|'.join(DEVICES)})(:\d{{1,3}})?", device):
        return None
    near = "cuda" if device == "gpu" else paths.nearest(device, DEVICES)
    fix = f"Did you mean runtime.device={near}?" if near else "Leave it out to have the device chosen for you."
    return f"{case.named('runtime.device')} is not a device", fix


RULES: tuple[tuple[Rule, str], ...] = (
    (_env_is_named, "An environment id is one word without spaces."),
    (_options_are_names, "Options are passed to the environment as keyword arguments, so they must be names."),
    (_device_is_known, f"The devices are {', '.join(DEVICES)}, with a number if there are several (cuda:1)."),
    (_batch_fits, "A batch is drawn from the replay, which would never hold that many steps."),
    (_windows_fit, "Every environment needs room for the steps that one n-step return spans."),
    (_learning_starts, "Learning would start after the run has ended, so nothing would be learned."),
    (_some_updates, "Updates per step are replay.samples_per_insert / algo.batch_size, rounded down over the run."),
    (_epsilon_falls, "Exploration is meant to fall; a rising epsilon unlearns what was found."),
    (_epsilon_moves, "Epsilon starts where it ends, so it has no time to take."),
    (_beta_rises, "The correction for prioritised sampling must grow towards its end value."),
    (_priorities_matter, "With alpha 0 every step is equally likely, which is uniform sampling at a higher price."),
    (_steps_matter, "With discount 0 only the first reward counts, so further steps change nothing."),
    (_score_is_seen, "The score is measured by evaluations, and none happens before the last step."),
    (_score_is_measured, "The score is measured by evaluations, and there are none with 0 episodes."),
    (_target_moves, "The target network would keep its first, random weights for the whole run."),
    (
        _only_atari("env.sticky"),
        "Sticky actions are a feature of the Atari emulator (ids ALE/... and ...NoFrameskip-v4).",
    ),
    (_only_atari("env.frame_size"), "Only Atari pictures are resized (ids ALE/... and ...NoFrameskip-v4)."),
)


def _not_exact(plan: Plan) -> str | None:
    return "save.replay=none: a resumed run begins with an empty replay, so it is not exact" * (
        plan.save.replay == "none"
    )


def _still_exploring(plan: Plan) -> str | None:
    explore, steps = plan.algo.explore, plan.until.steps
    if not isinstance(explore, LinearEpsilon) or explore.steps <= steps:
        return None
    left = explore.start + (explore.end - explore.start) * steps / explore.steps
    return f"epsilon will still be {left:.2f} at the end: algo.explore.steps={explore.steps}, until.steps={steps}"


def _nothing_learned(plan: Plan) -> str | None:
    if total_updates(plan) > 0:
        return None
    start = f"algo.learn_start_steps={plan.algo.learn_start_steps}, until.steps={plan.until.steps}"
    return f"no update will be made before the end: {start}"


NOTES: tuple[Callable[[Plan], str | None], ...] = (_not_exact, _still_exploring, _nothing_learned)


def check(plan: Plan, origins: Mapping[str, str] | None = None) -> list[str]:
    """Raise for the first rule that is broken; otherwise answer with notes worth showing."""
    case = Case(plan, origins or {})
    for rule, reason in RULES:
        if problem := rule(case):
            raise UsageError(problem[0], reason, problem[1])
    return [note for find in NOTES if (note := find(plan))]
