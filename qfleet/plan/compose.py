"""A plan from layers: defaults, the environment's defaults, a preset, a TOML file, then `path=value`; the last wins."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfleet.errors import UsageError
from qfleet.plan.changes import switches
from qfleet.plan.draft import Assignment, Draft, entries_of, show
from qfleet.plan.presets import environments
from qfleet.plan.presets.pieces import Settings
from qfleet.plan.schema import Plan
from qfleet.plan.toml import read_toml
from qfleet.plan.trusted import TRUSTED
from qfleet.plan.validate.case import COMMAND_LINE, PYTHON
from qfleet.plan.validate.check import check


@dataclass(frozen=True, slots=True)
class Composed:
    """A plan, where each of its values came from, and what is worth saying about it."""

    plan: Plan
    origins: dict[str, str]
    defaults: str  # name of the environment defaults underneath
    preset: str | None = None
    file: str | None = None
    notes: list[str] = field(default_factory=list)


def names_code(env_id: str) -> bool:
    """Whether an id names code to import (`module:Id`, `file.py:Class`); only the command line may do so."""
    return ":" in env_id


def compose(
    env_id: str | None = None,
    preset: str | None = None,
    file: str | Path | None = None,
    overrides: Iterable[tuple[str, Any, str]] = (),
    *,
    origin: str = COMMAND_LINE,
) -> Composed:
    """Lay defaults, preset, file and overrides (path, value, origin) over each other; texts are parsed by type."""
    tree = read_toml(file) if file is not None else {}
    asked = [Assignment(path, value, where, text=True, asked=True) for path, value, where in overrides]
    chosen = _env_id(env_id, tree, asked)
    name, below = _defaults(chosen, preset)
    draft = Draft()
    draft.lay(_settings(below, f"defaults for {chosen}" if name != preset else f"preset {name}"))
    if preset and preset != name:
        draft.lay(_settings(environments.settings_of(preset, chosen), f"preset {preset}"))
    draft.lay(entries_of(tree, str(file)))
    if env_id is not None:
        draft.lay([Assignment("env.id", env_id, origin, asked=True)])
    draft.lay(asked)
    _refuse_code(draft, str(file))
    _refuse_places(draft, str(file))
    plan = draft.plan()
    notes = check(plan, draft.origins)
    switches(plan)
    return Composed(plan, draft.origins, name, preset, None if file is None else str(file), notes)


def make_plan(env_id: str, preset: str | None = None, overrides: Mapping[str, Any] | None = None) -> Plan:
    """A plan from Python: `make_plan("CartPole-v1", overrides={"algo.n_step": 3})`."""
    settings = [(path, value, PYTHON) for path, value in (overrides or {}).items()]
    return compose(env_id, preset, overrides=settings, origin=PYTHON).plan


def _settings(settings: Mapping[str, Any], origin: str) -> list[Assignment]:
    return [Assignment(path, value, origin) for path, value in settings.items()]


def _defaults(env_id: str, preset: str | None) -> tuple[str, Settings]:
    # A preset named after an environment stands in for the defaults of the environment at hand.
    if preset is not None and preset in environments.environment_presets():
        return preset, environments.settings_of(preset, env_id)
    return environments.defaults_for(env_id)


def _env_id(env_id: str | None, tree: Mapping[str, Any], asked: list[Assignment]) -> str:
    table = tree.get("env")
    given = [entry.value for entry in asked if entry.path == "env.id"]
    given += [env_id, table.get("id") if isinstance(table, dict) else None]
    found = next((each for each in given if isinstance(each, str) and each), None)
    if found is None:
        raise UsageError(
            "no environment is given",
            "A run needs a world to act in, named on the command line or as env.id in the plan file.",
            "Name one: qfleet train CartPole-v1",
        )
    return found


def _refuse_code(draft: Draft, file: str) -> None:
    env_id = draft.values["env.id"]
    if names_code(env_id) and draft.origins["env.id"] == file:
        raise UsageError(
            f"env.id={show(env_id)} names code to run ({file})",
            "A plan file may come from anywhere, so it may not choose which code is imported.",
            f"If you trust it, name it yourself: qfleet train {show(env_id)} --plan {file}",
        )


def _refuse_places(draft: Draft, file: str) -> None:
    named = {path: draft.values.get(path) for path in TRUSTED if draft.origins.get(path) == file}
    words = " ".join(f"{path}={show(value)}" for path, value in named.items() if value)
    if words:
        raise UsageError(
            f"{words} ({file}) says where to connect, or whom to trust",
            "A plan file may come from anywhere, and whoever answers at that place can run code here.",
            f"If you trust it, say so yourself: qfleet train --plan {file} {words}",
        )
