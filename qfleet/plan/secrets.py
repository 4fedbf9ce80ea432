"""Secrets of an environment: names of variables in `env.secrets`, and options whose names look like secrets.

A plan holds the names of environment variables, never their values. A secret typed as an option is kept in run.toml,
so that the run can be resumed, but is shown and written nowhere else.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qfleet.plan.schema import Plan
from qfleet.plan.toml import write_plan

HIDDEN = "(hidden)"
OPTIONS = "env.options"
SECRET = re.compile(r"secret|passw|passphrase|credential|apikey", re.IGNORECASE)
NAME_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # access_key, accessKey and ACCESS_KEY have the same parts


def looks_secret(name: str) -> bool:
    """Does an option's name look like that of a secret?"""
    parts = {part.lower() for part in NAME_PARTS.findall(name)}
    return SECRET.search(name) is not None or bool(parts & {"key", "keys", "token", "tokens"})


def typed_secrets(plan: Plan) -> list[str]:
    """Options that look like secrets, whose values are in the plan itself."""
    return [name for name in plan.env.options if looks_secret(name)]


def redacted_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the values of secrets hidden."""
    return {name: HIDDEN if looks_secret(name) else value for name, value in options.items()}


def redacted_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by path, with the values of secrets hidden."""
    return {p: redacted_options(v) if p == OPTIONS and isinstance(v, Mapping) else v for p, v in values.items()}


def redacted_arguments(arguments: Iterable[str]) -> list[str]:
    """Command-line arguments with the values of secrets hidden."""
    return [_redacted_argument(argument) for argument in arguments]


def write_run_plan(plan: Plan, file: Path) -> None:
    """Write a run's plan; if a secret was typed into it, only this user can ever read the file and its folder."""
    if not typed_secrets(plan):
        write_plan(plan, file)
        return
    file.parent.chmod(0o700)
    write_plan(plan, file, mode=0o600)


def _redacted_argument(argument: str) -> str:
    path, given, _ = argument.partition("=")
    if given and path.startswith(f"{OPTIONS}.") and looks_secret(path.removeprefix(f"{OPTIONS}.")):
        return f"{path}={HIDDEN}"
    whole = path == OPTIONS and any(looks_secret(name) for name in re.findall(r"[\w-]+", argument))
    return f"{path}={HIDDEN}" if whole else argument
