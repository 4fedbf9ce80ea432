"""Gymnasium wrappers that a plan names in `env.wrappers`: finding them, and applying them to each environment."""

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym

from qfleet.envs.lookup.user_code import NamedCode, attribute_of, import_module, load_from_file, module_file
from qfleet.envs.single_env import AnyEnv, describe_error
from qfleet.errors import EnvError, QfleetError, UsageError, redact_error
from qfleet.plan.schema import Env
from qfleet.plan.validate.wrapper_text import EXAMPLE, REASON, WrapperText, split_wrapper
from qfleet.system.child_process import StopRequested

OWN_FUNCTION = "or name a function of your own that takes the environment and returns it wrapped: file.py:function"


@dataclass(frozen=True, slots=True)
class NamedWrapper:
    """A wrapper that was found, with its settings."""

    code: NamedCode
    make: Callable[..., AnyEnv]
    settings: dict[str, Any]

    def wrap(self, env: AnyEnv) -> AnyEnv:
        """The environment inside the wrapper; an error names the wrapper and closes the environment."""
        try:
            self._require_arguments(env)
            return self._checked(self.make(env, **self.settings))
        except BaseException as error:
            with contextlib.suppress(Exception):
                env.close()
            if isinstance(error, QfleetError | StopRequested | KeyboardInterrupt):
                raise
            redact_error(error)
            raise self._failed(error) from error

    def _require_arguments(self, env: AnyEnv) -> None:
        try:
            signature = inspect.signature(self.make)
        except (TypeError, ValueError):  # of native code
            return
        try:
            signature.bind(env, **self.settings)
        except TypeError as error:
            name = self.code.text.partition("(")[0]
            raise UsageError(
                f"{self.code}: it is not called with the right settings: {error}",
                f"It takes {_parameters(signature)}.",
                f"Write its settings as in a call, env.wrappers=[{name}(name=value)], {OWN_FUNCTION}",
            ) from error

    def _checked(self, made: Any) -> AnyEnv:
        missing = [part for part in ("observation_space", "action_space", "reset", "step") if not hasattr(made, part)]
        if missing:
            raise UsageError(
                f"{self.code} made a {type(made).__name__}, which is not a Gymnasium environment.",
                f"It lacks {', '.join(missing)}.",
                "Name a gymnasium.Wrapper class, or a function that takes an environment and returns it wrapped.",
            )
        return made  # type: ignore[no-any-return]

    def _failed(self, error: BaseException) -> QfleetError:
        if isinstance(error, TypeError | ValueError | AssertionError | gym.error.Error):
            return UsageError(
                f"{self.code} cannot wrap this environment: it {describe_error(error)}",
                "The wrapper's constructor refused the environment or its settings.",
                "Correct its settings or its place in env.wrappers; the first one is the innermost.",
            )
        return EnvError(
            f"{self.code}: the wrapper {describe_error(error)}",
            "This came from the wrapper's own constructor.",
            "Mend the wrapper.",
        )


def wrapped(env: Env, make: Callable[[], AnyEnv]) -> Callable[[], AnyEnv]:
    """The function with the plan's wrappers around what it makes; their code is imported now."""
    if not env.wrappers:
        return make
    wrappers = find_wrappers(env)

    def make_wrapped() -> AnyEnv:
        found = make()
        for wrapper in wrappers:
            found = wrapper.wrap(found)
        return found

    return make_wrapped


def find_wrappers(env: Env) -> list[NamedWrapper]:
    """Import the plan's wrappers; a file is run once, also if the environment is in it too."""
    loaded = {Path(env.id.rpartition(":")[0]).resolve()}
    found = []
    for text in env.wrappers:
        parts = _split(text)
        path = Path(parts.place).resolve()
        found.append(_find(text, parts, reload=path not in loaded))
        loaded.add(path)
    return found


def absolute_wrappers(env: Env) -> tuple[str, ...]:
    """The plan's wrappers with absolute paths of their files."""
    return tuple(_split(text).absolute for text in env.wrappers)


def wrapper_files(env: Env) -> dict[str, str]:
    """The files of the wrappers' modules, found without importing them."""
    names = [f"{_split(text).place}:" for text in env.wrappers]
    return {name: file for name in names if (file := module_file(name)) is not None}


def _split(text: str) -> WrapperText:
    try:
        return split_wrapper(text)
    except ValueError as error:
        raise UsageError(f"env.wrappers has an entry {text!r}: {error}", REASON, EXAMPLE) from error


def _find(text: str, parts: WrapperText, *, reload: bool) -> NamedWrapper:
    code = NamedCode("env.wrappers", text, "wrapper", gym.Wrapper)
    if parts.place.endswith(".py"):
        make = load_from_file(code, Path(parts.place), parts.name, reload=reload)
    else:
        make = attribute_of(code, import_module(code, parts.place), parts.name, parts.place)
    try:
        return NamedWrapper(code, make, parts.settings)
    except ValueError as error:
        raise UsageError(f"env.wrappers has an entry {text!r}: {error}", REASON, EXAMPLE) from error


def _parameters(signature: inspect.Signature) -> str:
    """The settings that a wrapper takes, as text; the environment is its first argument."""
    names = list(signature.parameters.values())[1:]
    shown = [name.name if name.default is name.empty else f"{name.name}={name.default!r}" for name in names]
    return ", ".join(shown) or "no settings"
