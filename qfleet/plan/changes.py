"""A plan with other settings: changed by a person, or after so many updates by itself (`learners.schedule`)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from msgspec.structs import replace as with_fields

from qfleet.errors import UsageError
from qfleet.plan.draft import Assignment, Draft, entries_of
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Sync
from qfleet.plan.toml import plain
from qfleet.plan.validate.case import SCHEDULE
from qfleet.plan.validate.check import check

EXAMPLE = "Write for example: learners.schedule='[5000 sync.type=local sync.every_updates=4]'"


@dataclass(frozen=True, slots=True)
class Switch:
    """How learners agree once so many updates were made."""

    updates: int
    sync: Sync


def changed(plan: Plan, origin: str, settings: Iterable[tuple[str, Any, str]], *, alone: bool = False) -> Plan:
    """A checked plan with other settings (path, value, where from); `origin` is where the plan came from.

    `alone`: a single learner may be told how it would agree.
    """
    draft = Draft()
    # Nobody asked for what goes away with a variant that is replaced.
    draft.lay([replace(entry, asked=False) for entry in entries_of(plain(plan), origin)])
    draft.lay([Assignment(path, value, where, text=True, asked=True) for path, value, where in settings])
    found = draft.plan()
    if not (alone and found.learners.num == 1):
        check(found, draft.origins)
    return found


def switches(plan: Plan) -> list[Switch]:
    """What `learners.schedule` says, in order; UsageError for the first entry that makes no sense."""
    found = list[Switch]()
    now = with_fields(plan, learners=with_fields(plan.learners, schedule=()))
    for text in plan.learners.schedule:
        updates, settings = _read(text)
        now = changed(now, "plan", [(path, value, SCHEDULE) for path, value in settings])
        found.append(Switch(updates, now.sync))
    if any(after.updates <= before.updates for before, after in pairwise(found)):
        raise _wrong("is not in order", "Each entry begins with more updates than the one before it.")
    return found


def _read(text: str) -> tuple[int, list[tuple[str, str]]]:
    """The updates and the settings of an entry such as `5000 sync.type=local`."""
    number, *words = text.split() or [""]
    settings = [(path, value) for path, _, value in (word.partition("=") for word in words)]
    updates = number.replace("_", "")
    if not updates.isdecimal() or int(updates) < 1 or not settings:
        raise _wrong(f"has an entry '{text}'", "Each entry is a number of updates, then settings of sync.")
    if other := next((path for path, _ in settings if not path.startswith("sync.")), None):
        raise _wrong(f"would change {other}", "It says how learners agree: only sync.* can be in it.")
    return int(updates), settings


def _wrong(what: str, why: str) -> UsageError:
    return UsageError(f"{SCHEDULE} {what}", why, EXAMPLE)
