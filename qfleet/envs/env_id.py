"""Resolving an `env.id` to a function that makes one environment."""

import contextlib
import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgspec

from qfleet.envs import atari, minatar
from qfleet.envs.lookup.user_code import NamedCode, import_module, load_from_file
from qfleet.envs.lookup.wrappers import absolute_wrappers, wrapped
from qfleet.envs.options import missing_arguments, options_with_secrets
from qfleet.envs.single_env import describe_error
from qfleet.envs.sync_vector import AnyEnv
from qfleet.errors import EnvError, QfleetError, UsageError, redact_error
from qfleet.install import install_command
from qfleet.plan.schema import Env
from qfleet.plan.secrets import redacted_options
from qfleet.system.child_process import StopRequested

_EXTRAS = {
    "box2d": ("LunarLander", "BipedalWalker", "CarRacing"),
    "atari": ("ALE/", "NoFrameskip"),
    "minatar": ("MinAtar/",),
}


def env_maker(env: Env, render_mode: str | None = None) -> Callable[[], AnyEnv]:
    """The function that makes one copy of the plan's environment, with `env.options` as keyword arguments."""
    path, _, name = env.id.rpartition(":")
    if path.endswith(".py"):
        make = load_from_file(NamedCode("env.id", env.id), Path(path), name)
        return _with_clear_errors(env, make, render_mode)
    if env.id.startswith("MinAtar/"):
        return _with_clear_errors(env, _minatar(env.id), render_mode)
    return _with_clear_errors(env, _registered(env.id), render_mode)


def absolute_id(env_id: str) -> str:
    """`file.py:Class` with the file's absolute path, which is valid in every folder; other ids unchanged."""
    path, _, name = env_id.rpartition(":")
    return f"{Path(path).resolve()}:{name}" if path.endswith(".py") else env_id


def absolute_env(env: Env) -> Env:
    """The same environment with absolute paths of its files: run.toml must not depend on the current folder."""
    return msgspec.structs.replace(env, id=absolute_id(env.id), wrappers=absolute_wrappers(env))


def user_env_maker(env: Env, make: Callable[[], AnyEnv], render_mode: str | None = None) -> Callable[[], AnyEnv]:
    """The user's own function with clear errors; it gets the render mode if it has that argument."""
    _require_maker(make)
    for key, value in (("options", redacted_options(env.options)), ("secrets", env.secrets)):
        if value:
            raise UsageError(
                f"env.{key}={value} has no effect.",
                "The environment is made by your own function, which takes no arguments.",
                f"Remove env.{key}, or use the values inside the function.",
            )
    return _with_clear_errors(env, make, render_mode if render_mode and _takes(make, "render_mode") else None)


def _require_maker(make: object) -> None:
    """Refuse an environment instead of a function: it can be neither copied nor made again."""
    if callable(make) and not isinstance(make, gym.Env | gym.vector.VectorEnv):
        return
    several = isinstance(make, gym.vector.VectorEnv)
    kind = "a vector environment" if several else "an environment" if isinstance(make, gym.Env) else "an object"
    raise UsageError(
        f"env= was given {kind} ({type(make).__name__}), not the function that makes one",
        "A run makes several environments: for training, for evaluation, and again after a failure or on resume.",
        f"Give the class or a function without arguments: env=lambda: {_maker_expression(make)}"
        + ("; env.num says how many are made." if several else ""),
    )


def _maker_expression(given: object) -> str:
    """The Python expression that makes such an environment."""
    if isinstance(given, str):
        return f"gym.make({given!r})"
    spec = getattr(given, "spec", None)
    return f"gym.make({spec.id!r})" if spec is not None else f"{type(given).__name__}(...)"


def _takes(make: Callable[..., object], argument: str) -> bool:
    try:
        return argument in inspect.signature(make).parameters
    except (TypeError, ValueError):
        return False


def _with_clear_errors(env: Env, make: Callable[..., AnyEnv], render_mode: str | None = None) -> Callable[[], AnyEnv]:
    rendering = {} if render_mode is None else {"render_mode": render_mode}

    def make_env() -> AnyEnv:
        options = options_with_secrets(env)
        try:
            return make(**options, **rendering)
        except QfleetError:
            raise
        except gym.error.DependencyNotInstalled as error:
            raise UsageError(
                f"env.id={env.id!r} needs a package that is not installed.",
                f"{error}.",
                install_extra(env.id) or "Install the package that the message names.",
            ) from error
        except StopRequested:
            raise
        except (Exception, SystemExit) as error:
            redact_error(error)
            raise _make_error(env, render_mode, error) from error

    return wrapped(env, make_env)


def _make_error(env: Env, render_mode: str | None, error: BaseException) -> QfleetError:
    if isinstance(error, TypeError) and render_mode and "render_mode" in str(error):
        return UsageError(
            f"env.id={env.id!r} cannot be recorded: its constructor takes no render_mode.",
            f"Making it with render_mode={render_mode!r} raised: {error}.",
            f"Give its __init__ the argument render_mode=None, and let render() return a picture for {render_mode!r}.",
        )
    if needed := missing_arguments(error):
        return UsageError(
            f"env.id={env.id!r} needs options that were not given: {', '.join(needed)}.",
            f"Making the environment raised: {error}.",
            f"Give its constructor's arguments: {' '.join(f'env.options.{name}=...' for name in needed)}",
        )
    if isinstance(error, TypeError | ValueError | AssertionError | gym.error.Error) and env.options:
        return UsageError(
            f"env.options={redacted_options(env.options)} was refused by {env.id!r}.",
            f"Making the environment raised: {error}.",
            "Options are keyword arguments of the environment's constructor: correct or remove them.",
        )
    return EnvError(
        f"{env.id}: the environment could not be made: it {describe_error(error)}",
        "This came from its own constructor.",
        "Mend the environment.",
    )


def _registered(name: str) -> Callable[..., AnyEnv]:
    module, _, plain = name.rpartition(":")
    if module:
        make_own = getattr(import_module(NamedCode("env.id", name), module), plain, None)
        if plain not in gym.registry and callable(make_own):  # module:Class
            return make_own  # type: ignore[no-any-return]
    try:
        entry = gym.spec(plain).entry_point
    except gym.error.Error as error:
        raise unknown_id_error(plain) from error
    if str(entry).startswith("ale_py"):
        raise UsageError(
            f"env.id={name!r} is an Atari id without the standard preprocessing.",
            "qfleet plays ALE/X-v5 (sticky) and XNoFrameskip-v4 (not sticky), both with 4 frames per step.",
            "Use one of these two, with env.sticky= to change the stickiness.",
        )

    def make(**options: Any) -> AnyEnv:  # unlike a partial, it refuses options of the same name
        # qfleet checks results itself, once for all lanes; gymnasium's checker would slow down every step.
        return gym.make(plain, disable_env_checker=True, **options)

    return make


def _minatar(name: str) -> Callable[..., AnyEnv]:
    if name not in minatar.IDS:
        raise unknown_id_error(name)
    game, minimal = minatar.IDS[name]

    def make(**options: Any) -> AnyEnv:  # unlike a partial, it refuses options of the same name
        return minatar.MinAtar(game, minimal=minimal, **options)

    return make


def unknown_id_error(name: str) -> UsageError:
    """The error for an unknown id, with the nearest ids and the package that may be missing."""
    with contextlib.suppress(UsageError):
        atari.register()  # so that Atari ids can be suggested
    ids = [*gym.registry, *minatar.IDS]
    game = name.rpartition("/")[2].lower().split("-")[0]
    near = difflib.get_close_matches(name, ids, n=3, cutoff=0.6)
    near += [each for each in ids if each.rpartition("/")[2].lower().startswith(game) and each not in near][-3:]
    return UsageError(
        f"env.id={name!r} is not a known environment.",
        f"The nearest known ids are {', '.join(near)}." if near else "No known id is like it.",
        install_extra(name)
        or "Use a known id, module:Id for one that a module registers, or path/to/file.py:ClassName for your own.",
    )


def install_extra(name: str) -> str:
    """How to install the packages of an id, if qfleet has an extra for them."""
    for extra, parts in _EXTRAS.items():
        if any(part in name for part in parts):
            return f"Install what is missing: {install_command(extra)}"
    return ""
