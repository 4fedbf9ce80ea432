"""`qfleet plan show|check|schema` and `qfleet presets`."""

from typing import Annotated, Any

from cyclopts import App, Parameter

from qfleet.cli.arguments import COMMANDS, PREPARE, PlanArguments, PlanFile, Preset, compose_arguments
from qfleet.cli.output import echo, echo_json, echo_table
from qfleet.plan import Composed, algorithm_presets, describe, environment_presets, flatten, plan_hash, schema, to_toml
from qfleet.plan.draft import format_value
from qfleet.plan.secrets import redacted_settings

app = App(
    name="plan",
    help="Look at a plan without running it.",
    group=PREPARE,
    group_commands=COMMANDS,
    help_epilogue="Example:\n  qfleet plan show CartPole-v1 --origin",
)


def origin_rows(composed: Composed) -> list[tuple[str, Any, str]]:
    """Every setting: path, value, and where the value came from."""
    values = redacted_settings(flatten(composed.plan))
    return [(path, value, composed.origins[path]) for path, value in values.items()]


def show(
    *arguments: PlanArguments,
    preset: Preset = None,
    plan: PlanFile = None,
    origin: Annotated[bool, Parameter(help="Say where each value came from.", show_default=False)] = False,
    json: Annotated[bool, Parameter(help="As JSON, with origins.", show_default=False)] = False,
) -> int:
    """Print the whole plan as TOML, which `--plan` reads back."""
    composed = compose_arguments(arguments, preset, plan)
    rows = origin_rows(composed)
    if json:
        echo_json([{"path": path, "value": value, "origin": where} for path, value, where in rows])
    elif origin:
        echo_table(((path, format_value(value), where) for path, value, where in rows), ("setting", "value", "origin"))
    else:
        echo(*to_toml(composed.plan).split("\n"))
    return 0


def check(*arguments: PlanArguments, preset: Preset = None, plan: PlanFile = None) -> int:
    """Check whether a plan is valid; exit code 2 and the reason if it is not."""
    composed = compose_arguments(arguments, preset, plan)
    for note in composed.notes:
        echo(f"note: {note}")
    echo(f"The plan is sound: {composed.plan.env.id}, hash {plan_hash(composed.plan)[:12]}.")
    return 0


def print_schema() -> int:
    """Print the JSON Schema of plan files, for editors."""
    echo_json(schema())
    return 0


def presets(
    name: Annotated[str | None, Parameter(name="NAME", help="Show the settings of this preset.")] = None,
    /,
    *,
    json: Annotated[bool, Parameter(help="As JSON.", show_default=False)] = False,
) -> int:
    """List presets: named algorithms, and the defaults that environments get."""
    names = [name] if name else [*algorithm_presets(), *environment_presets()]
    found = [describe(each) for each in names]
    if json:
        echo_json([{field: getattr(each, field) for field in each.__slots__} for each in found])
    elif name is None:
        echo_table(((each.name, each.kind, each.title) for each in found), ("preset", "kind", "what it is"))
        echo("", "More about one: qfleet presets NAME")
    else:
        echo(found[0].title, f"Source: {found[0].source}", f"Advice: {found[0].advice}", "")
        echo_table((path, format_value(value)) for path, value in found[0].settings.items())
    return 0


app.command(
    show, help_epilogue="Examples:\n  qfleet plan show CartPole-v1 > my.toml\n  qfleet plan show my.toml --origin"
)
app.command(check, help_epilogue="Example:\n  qfleet plan check my.toml algo.n_step=5")
app.command(print_schema, name="schema", help_epilogue="Example:\n  qfleet plan schema > plan.schema.json")
