"""The environments that are registered here: where each comes from, its spaces, and what it needs for training."""

import contextlib
import difflib
import fnmatch
import importlib.util
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import gymnasium as gym
from gymnasium import spaces

from qfleet.data.joint_actions import MAX_OUTPUTS
from qfleet.envs import atari, minatar
from qfleet.envs.env_id import env_maker, install_extra
from qfleet.envs.spaces import adapt_actions, adapt_obs
from qfleet.errors import QfleetError, UsageError
from qfleet.plan.schema import Env

VERSION = re.compile(r"(?P<name>.+)-v(?P<number>\d+)")
ATARI_EXAMPLE = "ALE/Pong-v5"
ATARI_IDS = re.compile(r"ALE/\w+-v5|\w+NoFrameskip-v4")
# Packages that the groups of Gymnasium need, if they are more than its own.
PACKAGES = {
    "box2d": "Box2D",
    "mujoco": "mujoco",
    "phys2d": "jax",
    "tabular": "jax",
    "MinAtar": "minatar",
    "ale_py": "ale_py",
}
QUICK = ("classic_control", "toy_text", "MinAtar")  # made in a moment, without large packages
OWN = ("box2d", "mujoco", *QUICK)  # Gymnasium's and qfleet's; code of other packages is not run for a list
FEW = 5  # so many are made, though they are not quick
UNKNOWN = "?"
SOURCES = {"ale_py": "Atari (ale-py)", "MinAtar": "MinAtar"}


class EnvEntry(NamedTuple):
    """One environment of the list."""

    id: str
    source: str
    observation: str
    action: str
    trains: str  # yes, no or ?
    note: str  # what is missing, or what training on it needs


def list_envs(pattern: str | None = None, *, all_versions: bool = False) -> list[EnvEntry]:
    """The registered environments whose ids match, in groups by where they come from.

    Only the newest version of each, and no retired ids, unless `all_versions`.
    """
    found = dict(_registered_groups())
    ids = list(found) if all_versions else newest(_current(found))
    chosen = [name for name in ids if matches(name, pattern)]
    if not chosen:
        raise _none_found(pattern or "", list(found))
    order = list(dict.fromkeys(found.values()))
    chosen.sort(key=lambda name: order.index(found[name]))
    return [_entry(name, found[name], make=_may_make(found[name], len(chosen))) for name in chosen]


def matches(name: str, pattern: str | None) -> bool:
    """Does an id match? A pattern is a part of it, or has wildcards; upper and lower case are the same."""
    if pattern is None:
        return True
    if any(mark in pattern for mark in "*?["):
        return fnmatch.fnmatch(name.lower(), pattern.lower())
    return pattern.lower() in name.lower()


def newest(ids: Iterable[str]) -> list[str]:
    """Of the ids that differ only in their version, the newest."""
    best: dict[str, tuple[int, str]] = {}
    for name in ids:
        found = VERSION.fullmatch(name)
        key = found["name"] if found else name
        number = int(found["number"]) if found else 0
        best[key] = max(best.get(key, (-1, "")), (number, name))
    return [name for _, name in best.values()]


def _registered_groups() -> Iterator[tuple[str, str]]:
    """Every id and its group."""
    try:
        atari.register()
    except UsageError:
        yield ATARI_EXAMPLE, "ale_py"  # of all games, with how to install them
    for name, spec in gym.registry.items():
        yield name, _group(spec.entry_point)
    for name in minatar.IDS:
        yield name, "MinAtar"


def _group(entry_point: Any) -> str:
    """Where an environment comes from: a part of Gymnasium, or the package of its code."""
    text = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "") or ""
    module = text.partition(":")[0].split(".")
    if module[0] != "gymnasium":
        return module[0] or "Python"
    return module[2] if len(module) > 3 else "retired"


def _current(groups: dict[str, str]) -> list[str]:
    """The ids that are meant for new work."""
    return [
        name
        for name, group in groups.items()
        if group != "retired" and (group != "ale_py" or ATARI_IDS.fullmatch(name))
    ]


def _may_make(group: str, num: int) -> bool:
    return group in QUICK or (group in OWN and num <= FEW)


def _entry(name: str, group: str, *, make: bool) -> EnvEntry:
    source = SOURCES.get(group, f"Gymnasium {group}" if group in (*PACKAGES, *QUICK, "retired") else group)
    if group == "retired":
        return EnvEntry(name, source, "-", "-", "no", "it was replaced by a newer version or another package")
    package = PACKAGES.get(group)
    if package is not None and not is_installed(package):
        return EnvEntry(name, source, "-", "-", "no", missing_text(name, package))
    if group == "ale_py":
        return _atari_entry(name, source)
    if make:
        return _made_entry(name, source)
    if group == "mujoco":
        return EnvEntry(name, source, "Box", "Box", "yes", "env.bins; many dimensions need net.decoupled=true")
    return EnvEntry(name, source, "-", "-", "yes" if group in OWN else UNKNOWN, f"see: qfleet env check {name}")


def is_installed(package: str) -> bool:
    """Is there such a package? It is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def missing_text(name: str, package: str) -> str:
    """What to install for an environment."""
    return install_extra(name) or f"Install the package {package}"


def _atari_entry(name: str, source: str) -> EnvEntry:
    size = atari.FRAME_SIZE
    observation = f"Box({atari.STACK}, {size}, {size}) uint8"
    if ATARI_IDS.fullmatch(name):
        return EnvEntry(name, source, observation, "Discrete", "yes", "")
    game = name.removeprefix("ALE/").partition("-")[0].removesuffix("Deterministic").removesuffix("NoFrameskip")
    return EnvEntry(name, source, "-", "Discrete", "no", f"without the standard preprocessing; use ALE/{game}-v5")


def _made_entry(name: str, source: str) -> EnvEntry:
    """The entry of an environment that is made to look at its spaces."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an older version
            env = env_maker(Env(id=name))()
    except QfleetError as error:
        return EnvEntry(name, source, "-", "-", "no", error.fix or error.what)
    try:
        observation = space_text(env.observation_space)
        action = space_text(env.action_space)
        return EnvEntry(name, source, observation, action, *_training_text(env.observation_space, env.action_space))
    finally:
        with contextlib.suppress(Exception):
            env.close()


def _training_text(observation: spaces.Space[Any], action: spaces.Space[Any]) -> tuple[str, str]:
    """Can qfleet train on such spaces, and with which settings?"""
    try:
        adapt_obs(observation, "it")
        counts = adapt_actions(action, None, "it").counts
    except UsageError as error:
        return "no", error.why
    notes = ["env.bins"] if isinstance(action, spaces.Box) else []
    notes += ["net.decoupled=true"] if math.prod(counts) > MAX_OUTPUTS else []
    return "yes", ", ".join(notes)


def space_text(space: spaces.Space[Any]) -> str:
    """A space in a few characters: Box(4,) float32, Discrete(2)."""
    if isinstance(space, spaces.Box):
        return f"Box{space.shape} {space.dtype}"
    if isinstance(space, spaces.Discrete):
        return f"Discrete({space.n})"
    if isinstance(space, spaces.Tuple):
        return f"Tuple({', '.join(map(space_text, space.spaces))})"
    if isinstance(space, spaces.Dict):
        return f"Dict({', '.join(space.spaces)})"
    return type(space).__name__


def _none_found(pattern: str, ids: list[str]) -> UsageError:
    near = difflib.get_close_matches(pattern, ids, n=3, cutoff=0.5)
    return UsageError(
        f"no environment matches {pattern!r}",
        f"The nearest ids are {', '.join(near)}." if near else f"{len(ids)} environments are registered here.",
        install_extra(pattern)
        or "See all of them: qfleet env list --all; a package of environments is installed first.",
    )
