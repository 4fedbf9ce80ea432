"""Changing a plan's settings: by the user, or at a given update by its own schedule (`learners.schedule`)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from msgspec.structs import replace as with_fields

from qfleet.errors import UsageError
from qfleet.plan.draft import Assignment, Draft, entries_of
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Sync
from qfleet.plan.toml import to_tables
from qfleet.plan.validate.case import SCHEDULE
from qfleet.plan.validate.check import check

EXAMPLE = "Write for example: learners.schedule='[5000 sync.type=local sync.every_updates=4]'"


@dataclass(frozen=True, slots=True)
class SyncSwitch:
    """How learners synchronise from this update on."""

    updates: int
    sync: Sync


def with_settings(
    plan: Plan, origin: str, settings: Iterable[tuple[str, Any, str]], *, allow_single_learner: bool = False
) -> Plan:
    """A checked plan with changed settings (path, value, origin); `origin` is where the plan itself came from.

    With `allow_single_learner` a plan of one learner may have any sync settings.
    """
    typed = [Assignment(path, value, where, text=True, explicit=True) for path, value, where in settings]
    return with_assignments(plan, origin, typed, allow_single_learner=allow_single_learner)


def with_assignments(
    plan: Plan, origin: str, assignments: Iterable[Assignment], *, allow_single_learner: bool = False
) -> Plan:
    """As `with_settings`, with assignments whose values need not be text."""
    draft = Draft()
    # Not explicit: settings of a variant that is replaced may be dropped.
    draft.apply_layer([replace(entry, explicit=False) for entry in entries_of(to_tables(plan), origin)])
    draft.apply_layer(assignments)
    found = draft.plan()
    if not (allow_single_learner and found.learners.num == 1):
        check(found, draft.origins)
    return found


def sync_switches(plan: Plan) -> list[SyncSwitch]:
    """The entries of `learners.schedule` in order; UsageError for the first invalid one."""
    found = list[SyncSwitch]()
    now = with_fields(plan, learners=with_fields(plan.learners, schedule=()))
    for text in plan.learners.schedule:
        updates, settings = _read(text)
        now = with_settings(now, "plan", [(path, value, SCHEDULE) for path, value in settings])
        found.append(SyncSwitch(updates, now.sync))
    if any(after.updates <= before.updates for before, after in pairwise(found)):
        raise _schedule_error("is not in order", "Each entry must begin with more updates than the one before it.")
    return found


def _read(text: str) -> tuple[int, list[tuple[str, str]]]:
    """The updates and the settings of an entry such as `5000 sync.type=local`."""
    number, *tokens = text.split() or [""]
    settings = [(path, value) for path, _, value in (token.partition("=") for token in tokens)]
    updates = number.replace("_", "")
    if not updates.isdecimal() or int(updates) < 1 or not settings:
        raise _schedule_error(f"has an entry '{text}'", "Each entry is a number of updates, then settings of sync.")
    if other := next((path for path, _ in settings if not path.startswith("sync.")), None):
        raise _schedule_error(f"would change {other}", "It changes how learners synchronise: only sync.* can be in it.")
    return int(updates), settings


def _schedule_error(problem: str, why: str) -> UsageError:
    return UsageError(f"{SCHEDULE} {problem}", why, EXAMPLE)
