"""Notes about a plan that is valid but may surprise."""

from collections.abc import Callable

from qfleet.plan.derived import total_updates
from qfleet.plan.schema import CopyTarget, ExponentialAnneal, FreshReplay, LinearEpsilon, PeriodicReset, Plan
from qfleet.plan.secrets import typed_secrets


def _not_exact(plan: Plan) -> str | None:
    if plan.save.replay != "none":
        return None
    return "save.replay=none: a resumed run begins with an empty replay, so it is not exact"


def _still_exploring(plan: Plan) -> str | None:
    explore = plan.algo.explore
    steps = plan.until.steps
    if not isinstance(explore, LinearEpsilon) or explore.steps <= steps:
        return None
    left = explore.start + (explore.end - explore.start) * steps / explore.steps
    return f"epsilon will still be {left:.2f} at the end: algo.explore.steps={explore.steps}, until.steps={steps}"


def _nothing_learned(plan: Plan) -> str | None:
    if total_updates(plan) > 0:
        return None
    start = f"algo.learn_start_steps={plan.algo.learn_start_steps}, until.steps={plan.until.steps}"
    return f"no update will be made before the end: {start}"


def _target_stays(plan: Plan) -> str | None:
    target = plan.algo.target
    total = total_updates(plan)
    if (
        not isinstance(target, CopyTarget)
        or isinstance(plan.replay, FreshReplay)
        or not 0 < total < target.every_updates
    ):
        return None
    setting = f"algo.target.every_updates={target.every_updates}"
    return f"the target network keeps its first weights: {setting}, the run makes {total} updates"


def _reset_at_the_end(plan: Plan) -> str | None:
    reset = plan.algo.reset
    total = total_updates(plan)
    if not isinstance(reset, PeriodicReset) or total < reset.every_updates:
        return None
    left = total % reset.every_updates
    if left >= reset.every_updates // 4:
        return None
    return f"the last reset comes {left} updates before the end: algo.reset.every_updates={reset.every_updates}"


def _still_annealing(plan: Plan) -> str | None:
    anneal = plan.algo.anneal
    total = total_updates(plan)
    if not isinstance(anneal, ExponentialAnneal) or anneal.updates <= total:
        return None
    return f"algo.anneal.updates={anneal.updates}, but the run makes {total} updates: n and discount stay on their way"


def _rate_is_zero(plan: Plan) -> str | None:
    end = plan.optim.decay_updates
    total = total_updates(plan)
    if end is None or end >= total:
        return None
    return f"the learning rate is 0 from update {end} on: optim.decay_updates={end}, the run makes {total} updates"


def _typed_secret(plan: Plan) -> str | None:
    found = typed_secrets(plan)
    if not found:
        return None
    name = found[0]
    better = f"better set a variable, export MY_KEY=..., and give env.secrets.{name}=MY_KEY"
    return f"env.options.{name} looks like a secret, and is stored in run.toml (mode 0600): {better}"


NOTES: tuple[Callable[[Plan], str | None], ...] = (
    _not_exact,
    _still_exploring,
    _nothing_learned,
    _target_stays,
    _reset_at_the_end,
    _still_annealing,
    _rate_is_zero,
    _typed_secret,
)
