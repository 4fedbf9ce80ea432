"""Importing code that a plan names: an environment or a wrapper, in a module or in a file."""

import contextlib
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym

from qfleet.envs.single_env import describe_error
from qfleet.errors import EnvError, UsageError
from qfleet.heartbeat import IMPORT, env_call

MOST_NAMED = 8  # classes in a message


@dataclass(frozen=True, slots=True)
class NamedCode:
    """What is said in messages about code that a plan names: the setting, its text, and what the code is."""

    setting: str
    text: str
    kind: str = "environment"
    parent: type = gym.Env  # the class that such classes derive from

    def __str__(self) -> str:
        return f"{self.setting}={self.text!r}"


def module_file(name: str) -> str | None:
    """The file of the module in `module:Name`, found without importing it; None for a file, or if there is none."""
    module = name.rpartition(":")[0]
    if not _is_module(module) or module.endswith(".py"):
        return None
    file = getattr(sys.modules.get(module), "__file__", None) or _origin(module)
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


def import_module(code: NamedCode, name: str) -> ModuleType:
    """Import a module by name; installed modules take precedence over those in the current folder."""
    _stay_importable(str(Path.cwd()))
    try:
        if not _is_module(name):
            raise ImportError(f"{name!r} is not the name of a module")
        with env_call(IMPORT):
            return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{code}: the module {name!r} could not be imported.",
            f"Python's error: {error}.",
            _import_advice(name, error),
        ) from error
    except (Exception, SystemExit) as error:
        raise EnvError(
            f"{code.text}: importing {name} {describe_error(error)}",
            f"The module must be imported without errors before its {code.kind} can be made.",
            "Mend the module.",
        ) from error


def _import_advice(name: str, error: ImportError) -> str:
    """What to do: a module that is there may ask for something else, as sumo_rl asks for SUMO_HOME."""
    missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
    if missing or not _is_module(name):
        return (
            "Install the package, or run from the folder that holds it; a file is given as path/to/file.py:ClassName."
        )
    return f"{name} itself is there: do what the error asks for. `python -c 'import {name}'` must work first."


def load_from_file(code: NamedCode, path: Path, attribute: str, *, reload: bool = True) -> Callable[..., Any]:
    """A class or function of a file, which is run for it; without `reload` only if it was not run before."""
    if not path.is_file():
        raise UsageError(
            f"{code}: there is no file {path}.",
            f"An own {code.kind} is given as path/to/file.py:ClassName.",
            "Correct the path; it is relative to the folder the command runs in.",
        )
    module = None if reload else sys.modules.get(_module_key(path))
    return attribute_of(code, _load(code, path) if module is None else module, attribute, str(path))


def attribute_of(code: NamedCode, module: ModuleType, attribute: str, place: str) -> Callable[..., Any]:
    """A class or function of a module; `place` is the module or its file, for the message."""
    found = getattr(module, attribute, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    classes = sorted(key for key, value in vars(module).items() if _is_candidate(value, module, code.parent))
    near = difflib.get_close_matches(attribute, classes, n=MOST_NAMED, cutoff=0.5) or classes[:MOST_NAMED]
    takes = "returns one" if code.parent is gym.Env else "takes an environment and returns it wrapped"
    raise UsageError(
        f"{code}: {place} has no class or function {attribute!r}.",
        f"Its {code.kind} classes are: {', '.join(near) or 'none'}{', ...' if len(near) < len(classes) else ''}.",
        f"Name a gymnasium.{code.parent.__name__} class, or a function that {takes}, after the colon.",
    )


def _is_candidate(value: Any, module: ModuleType, parent: type) -> bool:
    """Is it a class that could be meant? A file's own; a package also has those that it takes from its modules."""
    if not isinstance(value, type) or not issubclass(value, parent):
        return False
    package = module.__name__.partition(".")[0]
    return value.__module__ == module.__name__ or value.__module__.startswith(f"{package}.")


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


def _module_key(path: Path) -> str:
    return f"qfleet_own_{path.stem}"


def _load(code: NamedCode, path: Path) -> ModuleType:
    key = _module_key(path)
    spec = importlib.util.spec_from_file_location(key, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{code}: {path} cannot be loaded.", "It is not Python source.", "Give a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # dataclasses look up their own module
    try:
        with _importable(str(path.resolve().parent)), env_call(IMPORT):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[key]
        raise EnvError(
            f"{code.text}: running {path} {describe_error(error)}",
            f"The file must run without errors before its {code.kind} can be made.",
            "Mend the file.",
        ) from error
    return module
