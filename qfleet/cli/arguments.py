"""Command-line arguments: `path=value` settings, numbers, sections of the help."""

import re
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Group, Parameter

from qfleet.errors import UsageError
from qfleet.plan import Composed, compose
from qfleet.plan.part import Count, Positive
from qfleet.plan.paths import parse
from qfleet.plan.schema import Custom, OwnTorso
from qfleet.plan.setting_text import nearest_path
from qfleet.plan.validate.case import COMMAND_LINE

# The sections of `qfleet --help`.
TRAIN = Group("Train", sort_key=1)
LOOK = Group("Look", sort_key=2)
PREPARE = Group("Prepare", sort_key=3)
ABOUT = Group("About", sort_key=4)
COMMANDS = Group("Commands", sort_key=1)
# Arguments that several verbs take.
PlanArguments = Annotated[
    str,
    Parameter(
        name="ENV",
        help="Environment id or plan file (.toml), then any settings path=value (see: qfleet plan show ENV).",
    ),
]
Preset = Annotated[str | None, Parameter(help="Named preset over the environment's defaults (see: qfleet presets).")]
PlanFile = Annotated[str | None, Parameter(help="Plan file (TOML); the command line wins over it.")]

SETTING = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[tuple[str, str, str]]]:
    """The environment, if one is named, and the `path=value` settings, in any order."""
    env_id = None
    settings = []
    for token in arguments:
        if match := SETTING.fullmatch(token):
            settings.append((match[1], match[2], COMMAND_LINE))
        elif env_id is None:
            env_id = token
        else:
            raise UsageError(
                f"unexpected argument {token!r} after {env_id}",
                "After the environment come settings, written path=value without spaces.",
                f"Did you mean {near}=VALUE?" if (near := nearest_path(token)) else "Write for example algo.n_step=3",
            )
    return env_id, settings


def compose_arguments(
    arguments: Sequence[str], preset: str | None, plan: str | None, flags: dict[str, str | None] | None = None
) -> Composed:
    """Compose the plan of a command; `flags` are the values of options that set a plan path."""
    env_id, settings = split_arguments(arguments)
    settings += [(path, value, COMMAND_LINE) for path, value in (flags or {}).items() if value is not None]
    if env_id is not None and env_id.endswith(".toml") and plan is None:
        env_id, plan = None, env_id
    composed = compose(env_id, preset, plan, settings)
    if isinstance(composed.plan.net.torso, OwnTorso):
        raise UsageError(
            f"net.torso.type=own needs Python ({composed.origins['net.torso.type']})",
            "A network of your own is an object, which a command line cannot name.",
            "Call qfleet.train(plan, torso=my_module) from Python, or set net.torso.type=mlp",
        )
    if named := [name for name in Custom.__struct_fields__ if getattr(composed.plan.custom, name) is not None]:
        raise UsageError(
            f"custom.{named[0]} needs Python ({composed.origins[f'custom.{named[0]}']})",
            "A part of your own is an object, which a command line cannot name.",
            f"Call qfleet.train(plan, {named[0]}=...) from Python, or remove custom.{named[0]} from the plan.",
        )
    return composed


def parse_count(option: str, text: str | None, least: int = 1, example: int = 100) -> int | None:
    """The integer given to an option: at least 1, or at least 0 with `least=0`."""
    if text is None:
        return None
    try:
        return int(parse(text, Positive if least else Count))
    except ValueError as error:
        raise UsageError(
            f"{option} {text} is not valid",
            f"{option} must be an integer of at least {least}.",
            f"Write for example {option} {example}",
        ) from error


def refuse_json_with_quiet(json: bool, quiet: bool) -> None:
    """Raise if both `--json` and `--quiet` are given."""
    if json and quiet:
        raise UsageError(
            "--json and --quiet are given together",
            "One asks for every row, the other for none.",
            "Leave one of them out.",
        )
