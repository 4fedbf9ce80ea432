"""A wrapper as the plan names it: `module:Class` or `file.py:Class`, with settings `module:Class(name=value)`."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfleet.plan.draft import DEFAULT
from qfleet.plan.setting_text import format_value
from qfleet.plan.validate.case import Case, Problems

PATTERN = re.compile(r"(?P<place>.+?):(?P<name>[A-Za-z_]\w*)(?P<settings>\(.*\))?")
WORDS = {"true": True, "false": False, "none": None}  # as a plan writes them
LONGEST = 500
EXAMPLE = "Write for example env.wrappers=[gymnasium.wrappers:TimeLimit(max_episode_steps=200)]"
REASON = "A wrapper is module:Class or path/to/file.py:Class, with its settings as in a call: Class(name=value)."


@dataclass(frozen=True, slots=True)
class WrapperText:
    """The parts of a wrapper's text."""

    place: str  # a module, or the path of a Python file
    name: str  # of a class or function in it
    settings_text: str = ""  # "(name=value)", or empty

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings as keyword arguments; ValueError if the text is something else."""
        return read_settings(self.settings_text) if self.settings_text else {}

    @property
    def absolute(self) -> str:
        """The same text with the absolute path of its file, which is valid in every folder."""
        place = str(Path(self.place).resolve()) if self.place.endswith(".py") else self.place
        return f"{place}:{self.name}{self.settings_text}"


def split_wrapper(text: str) -> WrapperText:
    """The parts of a wrapper's text; ValueError if it is not one."""
    found = PATTERN.fullmatch(text)
    if found is None or len(text) > LONGEST or not text.isprintable():
        raise ValueError("it does not name a class in a module or file")
    return WrapperText(found["place"], found["name"], found["settings"] or "")


def read_settings(text: str) -> dict[str, Any]:
    """The settings in `(name=value, ...)`: numbers, texts in quotes, true, false, none, and lists of these."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"its settings {text} cannot be read") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"its settings {text} are not of the form (name=value)")
    if any(word.arg is None for word in call.keywords):
        raise ValueError(f"its settings {text} are not of the form (name=value)")
    return {str(word.arg): _read_value(word.value) for word in call.keywords}


def _read_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id.lower() in WORDS:
        return WORDS[node.id.lower()]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("its settings must be numbers, texts in quotes, true, false, none or lists") from error


def wrappers_are_named(case: Case) -> Problems:
    """A rule of plans: every entry of env.wrappers can be read."""
    for text in case.plan.env.wrappers:
        try:
            split_wrapper(text).settings  # noqa: B018  it raises
        except ValueError as error:
            origin = case.origins.get("env.wrappers", DEFAULT)
            yield f"env.wrappers has an entry {format_value(text)}: {error} ({origin})", EXAMPLE
