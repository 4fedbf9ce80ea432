"""Environments that the user gives as objects of `gymnasium.make`: how a run makes more of them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from qfleet.errors import UsageError

Layer = tuple[Any, dict[str, Any]]  # a wrapper's class and the arguments that it was called with
MAIN = "__main__:"


@dataclass(frozen=True)
class EnvRecipe:
    """Makes environments like one that the user has made."""

    id: str
    wrappers: str  # names and arguments, for run.toml
    spec: EnvSpec
    layers: list[Layer]

    def __call__(self) -> "gymnasium.Env[Any, Any]":
        """Make one."""
        env = gymnasium.make(self.spec)
        for kind, arguments in self.layers:
            env = kind(env, **arguments)
        return env


def recipe_of(argument: str, env: "gymnasium.Env[Any, Any]", spec: EnvSpec) -> EnvRecipe:
    """How an environment was made, with the wrappers around it.

    They are made again by their classes: another process knows no module `__main__`.
    """
    known = gymnasium.registry.get(spec.id)
    num_registered = 0 if known is None else len(known.additional_wrappers)
    added = spec.additional_wrappers[num_registered:]
    if lost := [each.name for each in added if each.kwargs is None]:
        raise _unrecorded(argument, lost[0], spec.id)
    kinds = _wrappers(env)[: len(added)]
    layers = [(kind, each.kwargs or {}) for kind, each in zip(reversed(kinds), added, strict=True)]
    named = ", ".join(f"{kind.__module__}:{kind.__qualname__}({', '.join(values)})" for kind, values in layers)
    return EnvRecipe(spec.id, named, _bare(spec, num_registered), layers)


def _wrappers(env: "gymnasium.Env[Any, Any]") -> list[Any]:
    """The classes of the wrappers around an environment, the outermost first."""
    found: list[Any] = []
    while isinstance(env, gymnasium.Wrapper):
        found.append(type(env))
        env = env.env
    return found


def _bare(spec: EnvSpec, num_registered: int) -> EnvSpec:
    """How the innermost environment was made; a window for each of many environments helps nobody."""
    kwargs = dict(spec.kwargs)
    if kwargs.get("render_mode") == "human":
        del kwargs["render_mode"]
    entry: Any = spec.entry_point
    if isinstance(entry, str) and entry.startswith(MAIN):
        entry = load_env_creator(entry)
    wrappers = spec.additional_wrappers[:num_registered]
    return dataclasses.replace(spec, kwargs=kwargs, entry_point=entry, additional_wrappers=wrappers)


def _unrecorded(argument: str, wrapper: str, env_id: str) -> UsageError:
    return UsageError(
        f"{argument}= was given an environment inside the wrapper {wrapper}, which cannot be made again",
        "A run makes several environments, and this wrapper does not record how it was called: it does not derive from "
        "gymnasium.utils.RecordConstructorArgs.",
        f"Give a function instead: {argument}=lambda: {wrapper}(gymnasium.make({env_id!r}), ...)",
    )
