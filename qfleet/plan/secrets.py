"""Secrets of an environment: names of variables in `env.secrets`; and options whose names say that they are secrets.

A plan holds the names of environment variables, never their values. A value that was typed as an option has to be kept
in run.toml, so that the run can go on, but is shown and written nowhere else.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from qfleet.plan.schema import Plan

HIDDEN = "(hidden)"
OPTIONS = "env.options"
SECRET = re.compile(r"secret|passw|passphrase|credential|apikey", re.IGNORECASE)
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # access_key, accessKey and ACCESS_KEY have the same two


def looks_secret(name: str) -> bool:
    """Does an option's name say that its value is a secret?"""
    words = {word.lower() for word in WORDS.findall(name)}
    return SECRET.search(name) is not None or bool(words & {"key", "keys", "token", "tokens"})


def typed_secrets(plan: Plan) -> list[str]:
    """Options that look like secrets and whose values stand in the plan itself."""
    return [name for name in plan.env.options if looks_secret(name)]


def hidden(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they may be shown."""
    return {name: HIDDEN if looks_secret(name) else value for name, value in options.items()}


def hidden_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their paths, as they may be shown and written."""
    return {p: hidden(value) if p == OPTIONS and isinstance(value, Mapping) else value for p, value in values.items()}


def hidden_words(words: Iterable[str]) -> list[str]:
    """The words of a command, as they may be shown and written."""
    return [_hidden_word(word) for word in words]


def _hidden_word(word: str) -> str:
    path, given, _ = word.partition("=")
    if given and path.startswith(f"{OPTIONS}.") and looks_secret(path.removeprefix(f"{OPTIONS}.")):
        return f"{path}={HIDDEN}"
    whole = path == OPTIONS and any(looks_secret(name) for name in re.findall(r"[\w-]+", word))
    return f"{path}={HIDDEN}" if whole else word
