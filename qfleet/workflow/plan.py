"""The plan of a workflow: a TOML file with a table for each stage."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from qfleet.errors import UsageError
from qfleet.plan.toml import read_toml


class CollectStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose episodes are recorded, and how many."""

    policy: str = "random"
    episodes: Annotated[int, Meta(ge=1)] | None = None
    steps: Annotated[int, Meta(ge=1)] | None = None
    seed: Annotated[int, Meta(ge=0)] = 0


class PrepareStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the episodes are split."""

    split: str = "80/10/10"
    salt: str = "qfleet"


class JudgingStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the policy is evaluated on recorded test episodes."""

    epsilon: Annotated[float, Meta(ge=0, le=1)] = 0.1
    seed: Annotated[int, Meta(ge=0)] = 0
    episodes: Annotated[int, Meta(ge=1)] = 1_000
    updates: Annotated[int, Meta(ge=1)] = 2_000  # of each fitted Q evaluation


class WorkflowPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"judging": "judge"}):
    """All stages. Either `data` names a data set that is there, or `collect` says how to make one."""

    env: Annotated[str, Meta(min_length=1)]
    data: str | None = None
    collect: CollectStage | None = None
    prepare: PrepareStage = PrepareStage()
    judging: JudgingStage = JudgingStage()
    learn: dict[str, Any] = {}  # tables of a plan, as for `qfleet train --plan`


def read_workflow(file: str | Path) -> WorkflowPlan:
    """The workflow in a TOML file; every failure is a UsageError."""
    tables = read_toml(file, "workflow")
    try:
        plan = msgspec.convert(tables, WorkflowPlan)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{file} is no workflow: {error}",
            "It has `env`, the tables [collect], [prepare], [learn] and [judge], or `data` in place of [collect].",
            "See examples/workflow_cartpole.toml and docs/workflow.md.",
        ) from error
    if (plan.data is None) == (plan.collect is None):
        raise UsageError(
            f"{file} has {'neither `data` nor' if plan.data is None else 'both `data` and'} a table [collect]",
            "A workflow begins with one data set: one that is there, or one that it collects.",
            'Write data = "path", or a table [collect].',
        )
    return plan
