"""Settings that choose an address to connect to, a program to run, or whom to trust; the only list of them.

They are accepted from the user's own command line, and from a run that this user signed (`training/env_trust.py`). From
any other plan file or run folder they are refused. Add every new setting of this kind to TRUSTED. Code that `env.id`
names has the same rule (`compose.names_code`).
"""

from typing import Any

from qfleet.plan.paths import flatten
from qfleet.plan.schema import Plan

TRUSTED = ("runtime.address", "runtime.allow_no_token")


def trusted_settings(plan: Plan) -> dict[str, Any]:
    """The settings of TRUSTED that this plan uses; absent, `none` and `false` need no trust."""
    values = flatten(plan)
    return {path: values[path] for path in TRUSTED if values.get(path)}
