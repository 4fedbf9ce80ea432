"""The whole run as frozen data."""

from qfleet.plan.changes import SyncSwitch, sync_switches, with_assignments, with_settings
from qfleet.plan.compose import Composed, compose, make_plan
from qfleet.plan.derived import largest_n_step, total_updates, updates_per_step
from qfleet.plan.paths import flatten
from qfleet.plan.presets.environments import defaults_for
from qfleet.plan.schema import Plan
from qfleet.plan.toml import diff, json_schema, plan_hash, read_plan, read_tables_in, read_toml, to_toml, write_plan
from qfleet.plan.trusted import names_code, needs_trust, trusted_settings
from qfleet.plan.validate.check import check

__all__ = [
    "Composed",
    "Plan",
    "SyncSwitch",
    "check",
    "compose",
    "defaults_for",
    "diff",
    "flatten",
    "json_schema",
    "largest_n_step",
    "make_plan",
    "names_code",
    "needs_trust",
    "plan_hash",
    "read_plan",
    "read_tables_in",
    "read_toml",
    "sync_switches",
    "to_toml",
    "total_updates",
    "trusted_settings",
    "updates_per_step",
    "with_assignments",
    "with_settings",
    "write_plan",
]
