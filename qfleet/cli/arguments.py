"""What is typed after a verb: `path=value` tokens, numbers, and the parser's complaints as errors of ours."""

import re
from collections.abc import Sequence
from typing import Any

from cyclopts import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from qfleet.errors import UsageError
from qfleet.plan import Composed, compose
from qfleet.plan.part import Count, Positive
from qfleet.plan.paths import index, nearest, nearest_path, parse
from qfleet.plan.schema import OwnTorso
from qfleet.plan.validate.case import COMMAND_LINE

SETTING = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def split_words(words: Sequence[str]) -> tuple[str | None, list[tuple[str, str, str]]]:
    """The environment, if one is named, and the `path=value` settings, in any order."""
    env_id = None
    settings = []
    for word in words:
        if match := SETTING.fullmatch(word):
            settings.append((match[1], match[2], COMMAND_LINE))
        elif env_id is None:
            env_id = word
        else:
            raise UsageError(
                f"unexpected word {word!r} after {env_id}",
                "What follows the environment is a setting, written path=value without spaces.",
                f"Did you mean {near}=VALUE?" if (near := nearest_path(word)) else "Write for example algo.n_step=3",
            )
    return env_id, settings


def compose_words(
    words: Sequence[str], preset: str | None, plan: str | None, flags: dict[str, str | None] | None = None
) -> Composed:
    """The plan a command asks for; `flags` are options that stand for a plan path."""
    env_id, settings = split_words(words)
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
    return composed


def whole(option: str, text: str | None, least: int = 1, example: int = 100) -> int | None:
    """The whole number given to an option, 1 or more unless 0 is allowed."""
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


def refuse_both(json: bool, quiet: bool) -> None:
    """`--json` and `--quiet` contradict each other."""
    if json and quiet:
        raise UsageError(
            "--json and --quiet are given together",
            "One asks for every row, the other for none.",
            "Leave one of them out.",
        )


# --- the parser's complaints ---


def translate(error: CycloptsError) -> UsageError:
    """The parser's complaint in our three sentences."""
    verb = " ".join(("qfleet", *(error.command_chain or ())))
    match error:
        case UnknownOptionError():
            return _unknown_option(error, verb)
        case UnknownCommandError():
            return _unknown_command((error.unused_tokens or [""])[0], _commands(error.app), verb)
        case UnusedCliTokensError():
            return _unexpected(error, verb)
        case MissingArgumentError():
            return _missing(error, verb)
        case RepeatArgumentError():
            name = error.token.keyword
            return UsageError(f"{name} is given twice", "It can have one value only.", "Leave one of them out.")
        case CoercionError() if error.token is not None:
            name = error.token.keyword or verb
            return UsageError(
                f"{name}={error.token.value} is not valid",
                f"{name} is a switch: it takes no value.",
                f"Write {name} alone, or leave it out.",
            )
    return UsageError(" ".join(str(error).split()), f"{verb} could not be understood.", f"See {verb} --help")


def _commands(app: Any) -> list[str]:
    return [name for name in app if not name.startswith("-")] if app is not None else []


def _unknown_command(word: str, names: list[str], verb: str) -> UsageError:
    if word.startswith("-"):
        near = nearest(word, ["--help", "--version", "--install-completion", "--debug"])
        fix = f"Did you mean {near}?" if near else f"See {verb} --help"
        return UsageError(f"unknown option {word}", f"{verb} has --help, --version, --install-completion.", fix)
    near = nearest(word, names)
    fix = f"Did you mean {verb} {near}?" if near else f"See {verb} --help"
    return UsageError(f"unknown command {word}", f"{verb} has {', '.join(names)}.", fix)


def _unexpected(error: UnusedCliTokensError, verb: str) -> UsageError:
    word = (error.unused_tokens or [""])[0]
    if names := _commands(error.app):
        return _unknown_command(word, names, verb)
    return UsageError(
        f"unexpected word {word!r}", f"{verb} has all the words it can take.", f"Leave it out; see {verb} --help"
    )


def _unknown_option(error: UnknownOptionError, verb: str) -> UsageError:
    word = (error.token.keyword or error.token.value).split("=")[0]
    names = [name for argument in error.argument_collection for name in argument.names if name.startswith("--")]
    path = word.lstrip("-").replace("-", "_")
    near = nearest(word, names)
    if path in index().paths() and word not in names:
        fix = f"Settings of the plan have no dashes: {path}=VALUE"
    else:
        fix = f"Did you mean {near}?" if near else f"See {verb} --help"
    why = f"{verb} has {', '.join(names)}." if names else f"{verb} has no options."
    return UsageError(f"unknown option {word}", why, fix)


def _missing(error: MissingArgumentError, verb: str) -> UsageError:
    name = error.keyword or (error.argument.name if error.argument else "a word")
    if name.startswith("-"):
        return UsageError(f"{name} needs a value", f"Nothing follows {name}.", f"See {verb} --help")
    return UsageError(f"{verb} needs {name}", f"{name} says what to work on, and it is missing.", f"See {verb} --help")
