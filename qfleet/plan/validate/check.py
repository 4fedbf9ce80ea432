"""Check a plan: incompatible pairs of settings, settings without effect, rules across settings, and notes."""

from collections.abc import Mapping

from qfleet.errors import UsageError
from qfleet.plan.schema import Plan
from qfleet.plan.validate.advice import NOTES
from qfleet.plan.validate.case import Case
from qfleet.plan.validate.no_effect import NO_EFFECT
from qfleet.plan.validate.offline import OFFLINE_PAIRS, PREFILL_PAIRS
from qfleet.plan.validate.pairs import PAIRS
from qfleet.plan.validate.rules import RULES


def _refuse_pairs(case: Case) -> None:
    """Raise for the first entry of the tables of pairs or of `NO_EFFECT` that applies to the plan."""
    for pair in (*PAIRS, *OFFLINE_PAIRS, *PREFILL_PAIRS):
        if pair.when(case.plan):
            message = f"{case.named(pair.first)} does not go with {case.named(pair.second)}"
            raise UsageError(message, pair.reason, pair.fix)
    for path, has_no_effect, reason in NO_EFFECT:
        if case.set_by_user(path) and has_no_effect(case.plan):
            raise UsageError(f"{case.named(path)} has no effect", reason, f"Leave {path} out.")


def check(plan: Plan, origins: Mapping[str, str] | None = None) -> list[str]:
    """Raise for the first rule that is broken; otherwise return notes to show."""
    case = Case(plan, origins or {})
    _refuse_pairs(case)
    for rule, reason in RULES:
        for problem, fix in rule(case):
            raise UsageError(problem, reason, fix)
    return [note for find in NOTES for note in find(plan)]
