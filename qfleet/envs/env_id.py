"""Resolving an `env.id` to a function that makes one environment."""

import contextlib
import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym

from qfleet.envs import atari, minatar
from qfleet.envs.options import missing_arguments, options_with_secrets
from qfleet.envs.single_env import describe_error
from qfleet.envs.sync_vector import AnyEnv
from qfleet.errors import EnvError, QfleetError, UsageError, redact_error
from qfleet.heartbeat import IMPORT, env_call
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
        return _with_clear_errors(env, _from_file(env.id, Path(path), name), render_mode)
    if env.id.startswith("MinAtar/"):
        return _with_clear_errors(env, _minatar(env.id), render_mode)
    return _with_clear_errors(env, _registered(env.id), render_mode)


def absolute_id(env_id: str) -> str:
    """`file.py:Class` with the file's absolute path, which is valid in every folder; other ids unchanged."""
    path, _, name = env_id.rpartition(":")
    return f"{Path(path).resolve()}:{name}" if path.endswith(".py") else env_id


def module_file(env_id: str) -> str | None:
    """The file of the module in `module:Id`, found without importing it; None for other ids, or if there is none."""
    name = env_id.rpartition(":")[0]
    if not _is_module(name) or name.endswith(".py"):
        return None
    file = getattr(sys.modules.get(name), "__file__", None) or _origin(name)
    return None if file is None else str(Path(file).resolve())


def _is_module(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _origin(module: str) -> str | None:
    # importlib.util.find_spec would import the parent packages.
    path = [*sys.path, str(Path.cwd())]
    spec = None
    for name in accumulate(module.split("."), "{}.{}".format):
        found = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((each for each in found if each is not None), None)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec.origin if spec is not None and spec.has_location else None


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
                _install_extra(env.id) or "Install the package that the message names.",
            ) from error
        except StopRequested:
            raise
        except (Exception, SystemExit) as error:
            redact_error(error)
            raise _make_error(env, render_mode, error) from error

    return make_env


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
        _import(name, module)
        make_own = getattr(sys.modules[module], plain, None)
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
        _install_extra(name)
        or "Use a known id, module:Id for one that a module registers, or path/to/file.py:ClassName for your own.",
    )


def _install_extra(name: str) -> str:
    """How to install the packages of an id, if qfleet has an extra for them."""
    for extra, parts in _EXTRAS.items():
        if any(part in name for part in parts):
            return f'Install what is missing: pip install "qfleet[{extra}]"'
    return ""


def _import(name: str, module: str) -> None:
    # At the end of sys.path: installed modules take precedence in every folder.
    _stay_importable(str(Path.cwd()))
    try:
        if not _is_module(module):
            raise ImportError(f"{module!r} is not the name of a module")
        with env_call(IMPORT):
            importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"env.id={name!r}: the module {module!r} could not be imported.",
            f"Python's error: {error}.",
            _import_advice(module, error),
        ) from error
    except (Exception, SystemExit) as error:
        raise EnvError(
            f"{name}: importing {module} {describe_error(error)}",
            "The module must be imported without errors before its environment can be made.",
            "Mend the module.",
        ) from error


def _import_advice(module: str, error: ImportError) -> str:
    """What to do: a module that is there may ask for something else, as sumo_rl asks for SUMO_HOME."""
    missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
    if missing or not _is_module(module):
        return (
            "Install the package, or run from the folder that holds it; a file is given as path/to/file.py:ClassName."
        )
    return f"{module} itself is there: do what the error asks for. `python -c 'import {module}'` must work first."


def _from_file(name: str, path: Path, attribute: str) -> Callable[..., AnyEnv]:
    if not path.is_file():
        raise UsageError(
            f"env.id={name!r}: there is no file {path}.",
            "An own environment is given as path/to/file.py:ClassName.",
            "Correct the path; it is relative to the folder the command runs in.",
        )
    module = _load(name, path)
    make = getattr(module, attribute, None)
    if not callable(make):
        classes = sorted(key for key, value in vars(module).items() if _is_env_class(value, module))
        raise UsageError(
            f"env.id={name!r}: {path} has no class or function {attribute!r}.",
            f"Its environment classes are: {', '.join(classes) or 'none'}.",
            "Name a gymnasium.Env class, or a function that returns one, after the colon.",
        )
    return make  # type: ignore[no-any-return]


def _is_env_class(value: Any, module: ModuleType) -> bool:
    return isinstance(value, type) and issubclass(value, gym.Env) and value.__module__ == module.__name__


def _stay_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


@contextlib.contextmanager
def _importable(folder: str) -> Iterator[None]:
    """Put a folder first in sys.path inside the block, as for a script in it, and last afterwards for lazy imports."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        _stay_importable(folder)


def _load(name: str, path: Path) -> ModuleType:
    key = f"qfleet_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(key, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"env.id={name!r}: {path} cannot be loaded.", "It is not Python source.", "Give a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # dataclasses look up their own module
    try:
        with _importable(str(path.resolve().parent)), env_call(IMPORT):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[key]
        raise EnvError(
            f"{name}: running {path} {describe_error(error)}",
            "The file must run without errors before its environment can be made.",
            "Mend the file.",
        ) from error
    return module
