"""Checking `env.options` of built-in worlds, and adding the values of `env.secrets`."""

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from qfleet.errors import UsageError, register_secret
from qfleet.plan.part import Scalar
from qfleet.plan.paths import convert
from qfleet.plan.schema import Env
from qfleet.plan.setting_text import accepted_values, format_value

_MISSING = re.compile(r"__init__\(\) missing \d+ required [\w-]+ arguments?: ((?:'\w+'(?:, | and |, and )?)+)")


class Option(NamedTuple):
    """The type of an option, and a valid value."""

    hint: Any
    example: Scalar


def checked_options(options: Mapping[str, Scalar], known: Mapping[str, Option], world: str) -> dict[str, Scalar]:
    """The options; a known one of a wrong type or out of range is refused, unknown ones stay unchecked."""
    return {
        name: _checked(name, value, known[name], world) if name in known else value for name, value in options.items()
    }


def secret_variables(env: Env) -> dict[str, str]:
    """The variables that `env.secrets` names, for a child: its fork server may have started before they were set."""
    return {name: os.environ[name] for name in env.secrets.values() if name in os.environ}


def options_with_secrets(env: Env) -> dict[str, Any]:
    """The options with the values of the variables that `env.secrets` names, read when an environment is made."""
    options: dict[str, Any] = dict(env.options)
    for name, variable in env.secrets.items():
        if variable not in os.environ:
            raise UsageError(
                f"env.secrets.{name}={variable}: there is no environment variable {variable}",
                "The option's value is taken from it, so that it stands in no file and on no command line.",
                f"Set it first, on every machine of the run: export {variable}=...",
            )
        options[name] = os.environ[variable]
        register_secret(options[name])
    return options


def missing_arguments(error: BaseException) -> list[str]:
    """The constructor's arguments that have no default, if their absence is the error."""
    found = _MISSING.search(str(error)) if isinstance(error, TypeError) else None
    return [] if found is None else re.findall(r"'(\w+)'", found[1])


def _checked(name: str, value: Scalar, option: Option, world: str) -> Scalar:
    path = f"env.options.{name}"
    try:
        converted: Scalar = convert(value, option.hint)
    except ValueError as error:
        raise UsageError(
            f"{path}={format_value(value)} is not valid",
            f"{path} must be {accepted_values(option.hint)} on {world}.",
            f"Write for example {path}={format_value(option.example)}",
        ) from error
    return converted
