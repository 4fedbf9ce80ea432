"""What `env.options` may hold in worlds whose options qfleet knows: names, types and ranges."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from qfleet.errors import UsageError, keep_secret
from qfleet.plan.draft import show
from qfleet.plan.part import Scalar
from qfleet.plan.paths import convert, expected
from qfleet.plan.schema import Env


class Option(NamedTuple):
    """What one option accepts, and a value that is right."""

    hint: Any
    example: Scalar


def fitting(options: Mapping[str, Scalar], known: Mapping[str, Option], world: str) -> dict[str, Scalar]:
    """The options, once those that are known are seen to be of the right type and in range."""
    return {name: _fit(name, value, known[name], world) if name in known else value for name, value in options.items()}


def secret_variables(env: Env) -> dict[str, str]:
    """The variables that `env.secrets` names, for a child: the fork server that it comes from may not know them yet."""
    return {name: os.environ[name] for name in env.secrets.values() if name in os.environ}


def with_secrets(env: Env) -> dict[str, Any]:
    """The options, and the values of the variables that `env.secrets` names; asked for when an environment is made."""
    found: dict[str, Any] = dict(env.options)
    for name, variable in env.secrets.items():
        if variable not in os.environ:
            raise UsageError(
                f"env.secrets.{name}={variable}: there is no environment variable {variable}",
                "The option's value is taken from it, so that it stands in no file and on no command line.",
                f"Set it first, on every machine of the run: export {variable}=...",
            )
        found[name] = os.environ[variable]
        keep_secret(found[name])
    return found


def _fit(name: str, value: Scalar, option: Option, world: str) -> Scalar:
    path = f"env.options.{name}"
    try:
        fit: Scalar = convert(value, option.hint)
    except ValueError as error:
        raise UsageError(
            f"{path}={show(value)} is not valid",
            f"{path} must be {expected(option.hint)} on {world}.",
            f"Write for example {path}={show(option.example)}",
        ) from error
    return fit
