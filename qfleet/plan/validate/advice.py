"""Notes about a plan that is valid but may surprise."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from qfleet.plan.derived import known_updates, total_updates
from qfleet.plan.schema import AverageTarget, ExponentialAnneal, FreshReplay, LinearEpsilon, PeriodicReset, Plan
from qfleet.plan.secrets import typed_secrets

Notes: TypeAlias = Iterator[str]


def _not_exact(plan: Plan) -> Notes:
    if plan.save.replay == "none":
        yield "save.replay=none: a resumed run begins with an empty replay, so it is not exact"


def _still_exploring(plan: Plan) -> Notes:
    explore = plan.algo.explore
    steps = plan.until.steps
    if isinstance(explore, LinearEpsilon) and explore.steps > steps:
        left = explore.start + (explore.end - explore.start) * steps / explore.steps
        yield f"epsilon will still be {left:.2f} at the end: algo.explore.steps={explore.steps}, until.steps={steps}"


def _nothing_learned(plan: Plan) -> Notes:
    if total_updates(plan) <= 0:
        start = f"algo.learn_start_steps={plan.algo.learn_start_steps}, until.steps={plan.until.steps}"
        yield f"no update will be made before the end: {start}"


def _target_stays(plan: Plan) -> Notes:
    target = plan.algo.target
    total = known_updates(plan)
    if isinstance(target, AverageTarget) or isinstance(plan.replay, FreshReplay):
        return
    if 0 < total < target.every_updates:
        setting = f"algo.target.every_updates={target.every_updates}"
        yield f"the target network keeps its first weights: {setting}, the run makes {total} updates"


def _reset_at_the_end(plan: Plan) -> Notes:
    reset = plan.algo.reset
    total = total_updates(plan)
    if plan.until.epochs is not None:
        return  # not known yet
    if not isinstance(reset, PeriodicReset) or total < reset.every_updates:
        return
    left = total % reset.every_updates
    if left < reset.every_updates // 4:
        yield f"the last reset comes {left} updates before the end: algo.reset.every_updates={reset.every_updates}"


def _still_annealing(plan: Plan) -> Notes:
    anneal = plan.algo.anneal
    total = known_updates(plan)
    if isinstance(anneal, ExponentialAnneal) and anneal.updates > total:
        late = f"algo.anneal.updates={anneal.updates}, but the run makes {total} updates"
        yield f"{late}: n and discount stay on their way"


def _rate_is_zero(plan: Plan) -> Notes:
    end = plan.optim.decay_updates
    total = total_updates(plan)
    if plan.until.epochs is not None:
        return  # not known yet
    if end is not None and end < total:
        yield f"the learning rate is 0 from update {end} on: optim.decay_updates={end}, the run makes {total} updates"


def _typed_secret(plan: Plan) -> Notes:
    for name in typed_secrets(plan)[:1]:
        better = f"better set a variable, export MY_KEY=..., and give env.secrets.{name}=MY_KEY"
        yield f"env.options.{name} looks like a secret, and is stored in run.toml (mode 0600): {better}"


NOTES: tuple[Callable[[Plan], Notes], ...] = (
    _not_exact,
    _still_exploring,
    _nothing_learned,
    _target_stays,
    _reset_at_the_end,
    _still_annealing,
    _rate_is_zero,
    _typed_secret,
)
