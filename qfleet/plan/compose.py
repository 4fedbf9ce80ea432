"""Compose a plan from layers: defaults, environment defaults, preset, TOML file, `path=value`; the last one wins."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfleet.errors import UsageError
from qfleet.plan.changes import sync_switches
from qfleet.plan.draft import Assignment, Draft, entries_of
from qfleet.plan.presets.environments import defaults_for
from qfleet.plan.schema import Plan
from qfleet.plan.setting_text import format_value
from qfleet.plan.toml import read_toml
from qfleet.plan.trusted import TRUSTED, names_code
from qfleet.plan.validate.case import COMMAND_LINE, PYTHON
from qfleet.plan.validate.check import check


@dataclass(frozen=True, slots=True)
class Composed:
    """A plan, the origin of each of its values, and notes about it."""

    plan: Plan
    origins: dict[str, str]
    defaults: str  # name of the environment defaults underneath
    preset: str | None = None
    file: str | None = None
    notes: list[str] = field(default_factory=list)


def compose(
    env_id: str | None = None,
    preset: str | None = None,
    file: str | Path | None = None,
    overrides: Iterable[tuple[str, Any, str]] = (),
    *,
    origin: str = COMMAND_LINE,
    tables: Mapping[str, Any] | None = None,
) -> Composed:
    """Merge defaults, preset, file and overrides (path, value, origin), in this order; text is parsed by type.

    `tables` stand in for those of the file, if they are a part of it.
    """
    if tables is None:
        tables = read_toml(file) if file is not None else {}
    explicit = [Assignment(path, value, where, text=True, explicit=True) for path, value, where in overrides]
    chosen = _env_id(env_id, tables, explicit)
    draft = Draft()
    name = _apply_presets(draft, chosen, preset)
    draft.apply_layer(entries_of(tables, str(file)))
    if env_id is not None:
        draft.apply_layer([Assignment("env.id", env_id, origin, explicit=True)])
    draft.apply_layer(explicit)
    _refuse_code_from_file(draft, str(file))
    _refuse_trusted_from_file(draft, str(file))
    plan = draft.plan()
    notes = check(plan, draft.origins)
    if plan.learners.schedule:
        sync_switches(plan)  # refuses what is invalid in it
    return Composed(plan, draft.origins, name, preset, None if file is None else str(file), notes)


def make_plan(env_id: str, preset: str | None = None, overrides: Mapping[str, Any] | None = None) -> Plan:
    """A plan from Python: `make_plan("CartPole-v1", overrides={"algo.n_step": 3})`.

    Args:
        env_id: the id of an environment, or "file.py:Class".
        preset: the name of a preset; `qfleet presets` lists them.
        overrides: settings by their paths, such as {"algo.n_step": 3, "net.dueling": True}.

    Returns:
        The plan, checked.
    """
    settings = [(path, value, PYTHON) for path, value in (overrides or {}).items()]
    return compose(env_id, preset, overrides=settings, origin=PYTHON).plan


def _settings(settings: Mapping[str, Any], origin: str) -> list[Assignment]:
    return [Assignment(path, value, origin) for path, value in settings.items()]


def _apply_presets(draft: Draft, env_id: str, preset: str | None) -> str:
    """Apply the environment's defaults and the named preset; returns the name of the defaults."""
    name, settings = defaults_for(env_id)
    origin = f"defaults for {env_id}"
    if preset:
        from qfleet.plan.presets.catalog import environment_presets, settings_of

        chosen = settings_of(preset, env_id)
        if preset not in environment_presets():
            draft.apply_layer(_settings(settings, origin))
        else:
            name = preset  # an environment preset replaces the defaults
        settings = chosen
        origin = f"preset {preset}"
    draft.apply_layer(_settings(settings, origin))
    return name


def _env_id(env_id: str | None, tree: Mapping[str, Any], explicit: list[Assignment]) -> str:
    table = tree.get("env")
    given = [entry.value for entry in explicit if entry.path == "env.id"]
    given += [env_id, table.get("id") if isinstance(table, dict) else None]
    found = next((each for each in given if isinstance(each, str) and each), None)
    if found is None:
        raise UsageError(
            "no environment is given",
            "A run needs an environment, named on the command line or as env.id in the plan file.",
            "Name one: qfleet train CartPole-v1",
        )
    return found


def _refuse_code_from_file(draft: Draft, file: str) -> None:
    env_id = draft.values["env.id"]
    if names_code(env_id) and draft.origins["env.id"] == file:
        raise UsageError(
            f"env.id={format_value(env_id)} names code to run ({file})",
            "A plan file may come from anywhere, so it may not choose which code is imported.",
            f"If you trust it, name it yourself: qfleet train {format_value(env_id)} --plan {file}",
        )
    wrappers = draft.values["env.wrappers"]
    if wrappers and draft.origins["env.wrappers"] == file:
        raise UsageError(
            f"env.wrappers={format_value(wrappers)} names code to run ({file})",
            "A plan file may come from anywhere, so it may not choose which code is imported.",
            f"If you trust it, name it yourself: qfleet train --plan {file} 'env.wrappers={format_value(wrappers)}'",
        )


def _refuse_trusted_from_file(draft: Draft, file: str) -> None:
    named = {path: draft.values.get(path) for path in TRUSTED if draft.origins.get(path) == file}
    settings_text = " ".join(f"{path}={format_value(value)}" for path, value in named.items() if value)
    if settings_text:
        raise UsageError(
            f"{settings_text} ({file}) chooses where to connect, or whom to trust",
            "A plan file may come from anywhere, and the host at that address can run code here.",
            f"If you trust it, name it yourself: qfleet train --plan {file} {settings_text}",
        )
