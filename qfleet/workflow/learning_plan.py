"""The plan of the run that a workflow makes, and of the environment that it collects in."""

from collections.abc import Sequence
from typing import Any

from qfleet.errors import UsageError
from qfleet.plan.compose import compose
from qfleet.plan.schema import Plan
from qfleet.plan.validate.case import COMMAND_LINE
from qfleet.workflow.plan import GivenWorkflow, flat_paths

OWN = ("env.id", "replay.type", "replay.path", "replay.version")  # what the workflow sets
Settings = Sequence[tuple[str, str]]


def learning_plan(given: GivenWorkflow, url: str) -> Plan:
    """The plan of the run that learns from the data set at `url`."""
    tables = dict(given.plan.learn)
    settings = dict(given.learn_settings)
    preset = settings.pop("preset", tables.pop("preset", None))
    if preset is not None and not isinstance(preset, str):
        raise UsageError(
            f"learn.preset={preset} is no preset",
            "It is the name of one.",
            'Example: preset = "cql"; `qfleet presets` lists them.',
        )
    require_free_settings(given, tables, settings)
    tables["replay"] = {**table_of(tables, "replay"), "type": "dataset", "path": url}
    return composed(given, tables, list(settings.items()), preset)


def collecting_plan(given: GivenWorkflow) -> Plan:
    """The plan of the environment that is collected in: with the settings of the run's, and its own."""
    stage = given.plan.collect
    if stage is None:
        raise TypeError("this workflow collects nothing")
    env = {**table_of(given.plan.learn, "env"), **stage.env}
    tables = {**{name: table for name, table in stage.tables.items() if table}, "env": env, "seed": stage.seed}
    own = [(path, text) for path, text in given.learn_settings if path.startswith("env.")]
    return composed(given, tables, own, None)


def composed(given: GivenWorkflow, tables: dict[str, Any], settings: Settings, preset: str | None) -> Plan:
    """The plan of these tables; what the command line says counts as the user's own."""
    overrides = [(path, text, COMMAND_LINE) for path, text in settings]
    if given.own_env:
        overrides.append(("env.id", given.plan.env, COMMAND_LINE))
    else:
        tables = {**tables, "env": {**table_of(tables, "env"), "id": given.plan.env}}
    return compose(preset=preset, file=given.file, overrides=overrides, tables=tables).plan


def table_of(tables: dict[str, Any], name: str) -> dict[str, Any]:
    """A table, empty if there is none."""
    found = tables.get(name, {})
    if not isinstance(found, dict):
        raise UsageError(
            f"learn.{name}={found} is not valid", f"`{name}` is a section of a plan.", f"Write a table: [learn.{name}]"
        )
    return found


def require_free_settings(given: GivenWorkflow, tables: dict[str, Any], settings: dict[str, str]) -> None:
    """Refuse settings of the run that the workflow sets itself."""
    taken = [path for path in OWN if path in {*flat_paths(tables), *settings}]
    if taken:
        raise UsageError(
            f"{given.file} sets learn.{taken[0]}",
            "A workflow learns in its own environment, and from the data set that its stages made.",
            "Leave it out; `env` names the environment, and `data` a data set that is there.",
        )
