"""Checking a plan: pairs that do not go together, rules that are broken, and what is worth telling."""

from collections.abc import Mapping

from qfleet.errors import UsageError
from qfleet.plan.schema import Plan
from qfleet.plan.validate.advice import NOTES
from qfleet.plan.validate.case import Case
from qfleet.plan.validate.no_effect import IDLE
from qfleet.plan.validate.pairs import PAIRS
from qfleet.plan.validate.rules import RULES


def _require_pairs(case: Case) -> None:
    """Raise for the first of `pairs.PAIRS` and `idle.IDLE` that the plan falls into."""
    for pair in PAIRS:
        if pair.when(case.plan):
            what = f"{case.named(pair.first)} does not go with {case.named(pair.second)}"
            raise UsageError(what, pair.reason, pair.fix)
    for path, idle, reason in IDLE:
        if case.asked_now(path) and idle(case.plan):
            raise UsageError(f"{case.named(path)} has no effect", reason, f"Leave {path} out.")


def check(plan: Plan, origins: Mapping[str, str] | None = None) -> list[str]:
    """Raise for the first rule that is broken; otherwise answer with notes worth showing."""
    case = Case(plan, origins or {})
    _require_pairs(case)
    for rule, reason in RULES:
        if problem := rule(case):
            raise UsageError(problem[0], reason, problem[1])
    return [note for find in NOTES if (note := find(plan))]
