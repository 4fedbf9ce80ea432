"""Settings that name a place to connect to, a program to run, or whom to trust: the list of them, kept here alone.

They count when the user's own command line names them, or a run that this user signed (`training/env_trust.py`). From a
plan file or a run folder that may come from anywhere they are refused. A new setting of this kind is added to TRUSTED.
Code that `env.id` names has the same rule (`layers.names_code`).
"""

from typing import Any

from qfleet.plan.paths import flatten
from qfleet.plan.schema import Plan

TRUSTED = ("runtime.address", "runtime.allow_no_token")


def trusted_settings(plan: Plan) -> dict[str, Any]:
    """Those of TRUSTED that this plan uses; nothing, `none` and `false` ask for no trust."""
    values = flatten(plan)
    return {path: values[path] for path in TRUSTED if values.get(path)}
