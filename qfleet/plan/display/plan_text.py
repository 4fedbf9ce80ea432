"""A plan for people: the call that makes it, what differs from its environment's defaults, and all settings."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from qfleet.errors import QfleetError
from qfleet.escape import escaped
from qfleet.plan.compose import make_plan
from qfleet.plan.display.html import folded, heading, html_table
from qfleet.plan.naming import algorithm_description
from qfleet.plan.paths import defaults, flatten
from qfleet.plan.secrets import redacted_settings
from qfleet.plan.setting_text import format_value

if TYPE_CHECKING:
    from qfleet.plan.schema import Plan

ID = "env.id"
ABSENT = "–"


def changed_settings(plan: "Plan") -> dict[str, tuple[Any, Any]]:
    """The settings that differ from the defaults of the plan's environment: value and default, by path.

    A setting that only this plan's variant of a section has is compared with that variant's own default.
    """
    values = redacted_settings(flatten(plan))
    usual = default_settings(plan)
    for path, value in values.items():
        section = path.removesuffix(".type")
        if section != path and value != usual.get(path):
            usual = usual | _variant_defaults(plan, section)
    return {path: (value, usual.get(path)) for path, value in values.items() if path != ID and value != usual.get(path)}


def _variant_defaults(plan: "Plan", section: str) -> dict[str, Any]:
    """The values that a variant of a section begins with; its `type` is left out, because it was chosen."""
    part = attrgetter(section)(plan)
    found = {} if part is None else flatten(type(part)(), section)
    return {path: value for path, value in found.items() if path != f"{section}.type"}


def default_settings(plan: "Plan") -> dict[str, Any]:
    """All settings that the plan's environment has without any of the user's."""
    try:
        return redacted_settings(flatten(make_plan(plan.env.id)))
    except QfleetError:
        return defaults()


def plan_repr(plan: "Plan") -> str:
    """`Plan.of('CartPole-v1', overrides={'algo.n_step': 3})`."""
    changes = {path: value for path, (value, _) in changed_settings(plan).items()}
    overrides = f", overrides={changes!r}" if changes else ""
    return f"Plan.of({plan.env.id!r}{overrides})"


def plan_text(plan: "Plan") -> str:
    """The first line says what is trained; each further line is a setting that differs, as it is typed."""
    lines = [f"{path}={format_value(value)}" for path, (value, _) in changed_settings(plan).items()]
    return "\n  ".join([_title(plan), *lines])


def _title(plan: "Plan") -> str:
    return f"{escaped(plan.env.id)}: {algorithm_description(plan)}, {plan.until.steps:,} steps, seed {plan.seed}"


def plan_html(plan: "Plan") -> str:
    """What differs from the environment's defaults as a table, and all settings below it."""
    changes = changed_settings(plan)
    rows = [(path, format_value(value), _default_text(usual)) for path, (value, usual) in changes.items()]
    own = html_table(rows, ("setting", "value", "default")) if rows else "<div>the environment's defaults</div>"
    every = redacted_settings(flatten(plan)).items()
    whole = html_table(((path, format_value(value)) for path, value in every), ("setting", "value"))
    return f"{heading('Plan', _title(plan))}{own}{folded(f'all {len(every)} settings', whole)}"


def _default_text(value: Any) -> str:
    return ABSENT if value is None else format_value(value)
