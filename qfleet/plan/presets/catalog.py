"""Presets by name: `algorithms.py` and `small.py` have the algorithms, `environments.py` has the environments."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getdoc
from typing import TypeAlias

from qfleet.errors import UsageError
from qfleet.plan.presets import environments
from qfleet.plan.presets.algorithms import ALGORITHMS, COMBINATIONS, OFFLINE
from qfleet.plan.presets.pieces import Settings
from qfleet.plan.presets.small import SMALL
from qfleet.plan.setting_text import nearest

Algorithm: TypeAlias = Callable[[str], Settings]


@dataclass(frozen=True, slots=True)
class PresetInfo:
    """A preset as `qfleet presets` shows it."""

    name: str
    kind: str  # "algorithm" or "environment"
    title: str
    source: str
    advice: str
    settings: Settings


def environment_presets() -> dict[str, environments.Defaults]:
    """Environment defaults by name; a named one applies to any environment."""
    found = [*(preset for _, preset in environments.ENVIRONMENTS), *environments.RECIPES]
    return {preset.__name__: preset for preset in found}


def algorithm_presets() -> dict[str, Algorithm]:
    """Algorithms by name, applied over the environment's defaults; the small variants come last."""
    return {preset.__name__.replace("_", "-"): preset for preset in (*ALGORITHMS, *COMBINATIONS, *OFFLINE, *SMALL)}


def settings_of(name: str, env_id: str) -> Settings:
    """The settings of the preset of this name for an environment."""
    algorithms = algorithm_presets()
    defaults = environment_presets()
    if name in algorithms:
        return algorithms[name](env_id)
    if name in defaults:
        return defaults[name]()
    near = nearest(name, [*algorithms, *defaults])
    raise UsageError(
        f"unknown preset {name}",
        f"The presets are {', '.join([*algorithms, *defaults])}.",
        f"Did you mean {near}?" if near else "See what each does with: qfleet presets",
    )


def describe(name: str) -> PresetInfo:
    """A preset's title, source, advice and settings; those of algorithms are for Atari."""
    settings = settings_of(name, "ALE/Pong-v5")
    kind = "algorithm" if name in algorithm_presets() else "environment"
    preset = algorithm_presets().get(name) or environment_presets()[name]
    lines = [line for line in (getdoc(preset) or "").splitlines() if line]
    parts = {key: text for key, _, text in (line.partition(": ") for line in lines[1:])}
    return PresetInfo(name, kind, lines[0], parts["Source"], parts["Advice"], settings)
