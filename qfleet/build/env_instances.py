"""Environments that the user gives as objects of `gymnasium.make`: how a run makes more of them."""

import dataclasses
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from qfleet.build.custom_parts import as_env_maker
from qfleet.build.worlds import EnvMaker
from qfleet.errors import UsageError

Layer = tuple[Any, dict[str, Any]]  # a wrapper's class and the arguments that it was called with
MAIN = "__main__:"


def env_maker(argument: str, env: Any) -> EnvMaker | None:
    """A function that makes environments: the user's own function or class, or one that repeats how an object was made.

    The wrappers around the object are made again too, by their classes: another process knows no module `__main__`.
    """
    if not isinstance(env, gymnasium.Env) or env.spec is None:
        return as_env_maker(argument, env)
    known = gymnasium.registry.get(env.spec.id)
    num_registered = 0 if known is None else len(known.additional_wrappers)
    added = env.spec.additional_wrappers[num_registered:]
    if lost := [each.name for each in added if each.kwargs is None]:
        raise _unrecorded(argument, lost[0], env.spec.id)
    kinds = [type(layer) for layer in _layers(env)[: len(added)]]
    layers = [(kind, each.kwargs or {}) for kind, each in zip(reversed(kinds), added, strict=True)]
    return partial(make_again, _bare(env.spec, num_registered), layers)


def make_again(spec: EnvSpec, layers: list[Layer]) -> "gymnasium.Env[Any, Any]":
    """Make an environment like the one that the user made."""
    env = gymnasium.make(spec)
    for kind, arguments in layers:
        env = kind(env, **arguments)
    return env


def _layers(env: "gymnasium.Env[Any, Any]") -> list["gymnasium.Env[Any, Any]"]:
    """The wrappers around an environment, the outermost first."""
    found: list[gymnasium.Env[Any, Any]] = []
    while isinstance(env, gymnasium.Wrapper):
        found.append(env)
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
