"""The plan of a workflow: a TOML file with a table for each stage; settings of the command line win over it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from qfleet.errors import UsageError
from qfleet.plan.toml import read_toml
from qfleet.plan.trusted import TRUSTED, names_code

Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Episodes = Annotated[int, Meta(ge=1, le=4_000_000)]  # as many as a data set may have
Steps = Annotated[int, Meta(ge=1, le=10**12)]
Text = Annotated[str, Meta(max_length=4_096)]
LEARN = "learn."
NAMES_CODE = ("env.wrappers", *TRUSTED)


class CollectStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose episodes are recorded, and how many."""

    policy: Text | Annotated[list[Text], Meta(min_length=1, max_length=1_000)] = "random"
    episodes: Episodes | None = None
    steps: Steps | None = None
    cut: bool = False
    seed: Seed = 0
    env: dict[str, Any] = {}  # settings as of `qfleet data collect`: env.num=16
    runtime: dict[str, Any] = {}  # type=processes
    actors: dict[str, Any] = {}

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """Its sections of a plan."""
        return {"env": self.env, "runtime": self.runtime, "actors": self.actors}

    @property
    def policies(self) -> list[str]:
        """The policy, or those of a mixture with their shares."""
        return [self.policy] if isinstance(self.policy, str) else self.policy


class ImportStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which files in another format are read, and what their columns mean."""

    source: Annotated[str, Meta(min_length=1, max_length=4_096)]
    format: Literal["minari", "rllib", "transitions"] | None = None
    columns: dict[str, Text] = {}
    actions: Annotated[list[Annotated[int, Meta(ge=1, lt=10**6)]], Meta(max_length=100)] = []


class PrepareStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the episodes are split, for how many nodes, and who does the work."""

    split: Text = "80/10/10"
    salt: Text = "qfleet"
    group: Text = ""
    strata: Text = ""
    keys: Text | None = None
    unique: bool = False
    shards: Annotated[int, Meta(ge=1, le=1_000)] | None = None
    capacity: Text | None = None
    engine: Literal["local", "ray", "spark"] = "local"
    jobs: Annotated[int, Meta(ge=1, le=1_000)] | None = None
    file_bytes: Annotated[int, Meta(ge=1, le=2**40)] | None = None


class JudgingStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the policy is evaluated on recorded test episodes."""

    epsilon: Annotated[float, Meta(ge=0, le=1)] = 0.1
    seed: Seed = 0
    episodes: Annotated[int, Meta(ge=1, le=1_000_000)] = 1_000
    updates: Annotated[int, Meta(ge=1, le=10**7)] = 2_000  # of each fitted Q evaluation


class WorkflowPlan(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"judging": "judge", "importing": "import"}
):
    """All stages. The data set is one that is there (`data`), collected or imported."""

    env: Annotated[str, Meta(min_length=1, max_length=4_096)]
    data: Text | None = None
    collect: CollectStage | None = None
    importing: ImportStage | None = None
    prepare: PrepareStage | None = None
    judging: JudgingStage = JudgingStage()
    learn: dict[str, Any] = {}  # tables of a plan, as for `qfleet train --plan`, and `preset`


class GivenWorkflow(msgspec.Struct, frozen=True):
    """A workflow, the file that it comes from, and what the command line says about it."""

    plan: WorkflowPlan
    file: str
    learn_settings: tuple[tuple[str, str], ...] = ()  # paths and values, without `learn.`
    own_env: bool = False  # did the command line name the environment?


def read_workflow(file: str | Path, settings: Sequence[tuple[str, str]] = ()) -> GivenWorkflow:
    """The workflow in a TOML file, with settings (path, value) of the command line; every failure is a UsageError."""
    tables = read_toml(file, "workflow")
    own = [(path, text) for path, text in settings if not path.startswith(LEARN)]
    learn = tuple((path.removeprefix(LEARN), text) for path, text in settings if path.startswith(LEARN))
    for path, text in own:
        set_value(tables, path, text)
    where = f"{file}, with {' '.join(f'{path}={text}' for path, text in own)}" if own else str(file)
    try:
        plan = msgspec.convert(tables, WorkflowPlan)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{where} is no workflow: {error}",
            "It has `env`, one of `data`, [collect] and [import], and the tables [prepare], [learn] and [judge].",
            "See examples/workflow_cartpole.toml and docs/workflow.md.",
        ) from error
    found = GivenWorkflow(plan, str(file), learn, own_env="env" in dict(own))
    require_one_source(found)
    refuse_code(found)
    return found


def set_value(tables: dict[str, Any], path: str, text: str) -> None:
    """Set `stage.field` to a value of the command line; its type is that of TOML, or else it is text."""
    *parents, name = path.split(".")
    for parent in parents:
        table = tables.setdefault(parent, {})
        if not isinstance(table, dict):
            raise UsageError(
                f"{path}={text} is not valid",
                f"`{parent}` is a value, and no table of a stage.",
                "Example: collect.episodes=500",
            )
        tables = table
    tables[name] = toml_value(path, name, text)


def toml_value(path: str, name: str, text: str) -> Any:
    """A number, true or false if the text is one and the field is not a text."""
    from qfleet.plan.paths import parse_scalar

    return text if path in TEXT_FIELDS or name in TEXT_FIELDS else parse_scalar(text)


TEXT_FIELDS = frozenset(
    [
        "env",
        "data",
        "collect.policy",
        "source",
        "split",
        "salt",
        "group",
        "strata",
        "keys",
        "capacity",
        "format",
        "import.columns",
    ]
)


def require_one_source(given: GivenWorkflow) -> None:
    """Refuse a workflow with no data set to begin with, or with several."""
    plan = given.plan
    there = {"`data`": plan.data, "a table [collect]": plan.collect, "a table [import]": plan.importing}
    found = [name for name, value in there.items() if value is not None]
    if len(found) != 1:
        raise UsageError(
            f"{given.file} has {' and '.join(found) if found else 'neither `data` nor [collect] nor [import]'}",
            "A workflow begins with one data set: one that is there, one that it collects, or one that it imports.",
            'Write data = "path", or a table [collect] or [import].',
        )


def refuse_code(given: GivenWorkflow) -> None:
    """Refuse code that the file names, and places to connect to: it may come from anywhere."""
    plan = given.plan
    named = {"env": plan.env} if names_code(plan.env) and not given.own_env else {}
    for stage, table in (("learn", plan.learn), ("collect", {} if plan.collect is None else plan.collect.tables)):
        flat = flat_paths(table)
        named |= {f"{stage}.{path}": flat[path] for path in NAMES_CODE if flat.get(path)}
    if named:
        settings = " ".join(f"{path}={value}" for path, value in named.items())
        raise UsageError(
            f"{given.file} names code to run, or a place to connect to: {settings}",
            "A workflow file may come from anywhere, so it may not choose which code runs here, or whom to trust.",
            f"If you trust it, take it out of the file and name it yourself: qfleet workflow {given.file} '{settings}'",
        )


def flat_paths(tables: dict[str, Any], before: str = "") -> dict[str, Any]:
    """The values of nested tables by their paths."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        path = f"{before}{name}"
        found |= flat_paths(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return found
