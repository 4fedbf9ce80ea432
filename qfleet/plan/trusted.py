"""Settings that choose an address to connect to, a place to write to, a program to run, or whom to trust: all of them.

They are accepted from the user's own command line, and from a run that this user signed (`training/env_trust.py`). From
any other plan file or run folder they are refused. Add every new setting of this kind to TRUSTED. Code that `env.id`
and `env.wrappers` name has the same rule.
"""

from typing import Any

from qfleet.plan.paths import flatten
from qfleet.plan.schema import Env, Plan

PLACE_MARKS = set("/\\:")  # of a path, an address or a module in the options of an environment
TRUSTED = ("runtime.address", "runtime.allow_no_token", "save.dataset")


def names_code(env_id: str) -> bool:
    """Whether an environment id names code to import (`module:Id`, `file.py:Class`); a plan file may not."""
    return ":" in env_id


def trusted_settings(plan: Plan) -> dict[str, Any]:
    """The settings of TRUSTED that this plan uses; absent, `none` and `false` need no trust."""
    values = flatten(plan)
    return {path: values[path] for path in TRUSTED if values.get(path)}


def needs_trust(env: Env) -> bool:
    """Does it name code to import, environment variables to read, or a file or module in its options?"""
    names = any(isinstance(value, str) and set(value) & PLACE_MARKS for value in env.options.values())
    return names_code(env.id) or bool(env.wrappers) or bool(env.secrets) or names
