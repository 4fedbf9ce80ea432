"""`qfleet plan show|check|schema` and `qfleet presets`."""

from typing import Annotated, Any

from cyclopts import App, Parameter

from qfleet.cli.arguments import compose_words
from qfleet.cli.chapters import COMMANDS, PREPARE
from qfleet.cli.say import say, say_columns, say_json
from qfleet.plan import Composed, algorithm_presets, describe, environment_presets, flatten, plan_hash, schema, to_toml
from qfleet.plan.draft import show as shown
from qfleet.plan.secrets import hidden_settings

app = App(
    name="plan",
    help="Look at a plan without running it.",
    group=PREPARE,
    group_commands=COMMANDS,
    help_epilogue="Example:\n  qfleet plan show CartPole-v1 --origin",
)

Words = Annotated[str, Parameter(name="ENV", help="Environment id or plan file (.toml), then any settings path=value.")]
Preset = Annotated[str | None, Parameter(help="Named preset over the environment's defaults.")]
PlanFile = Annotated[str | None, Parameter(help="Plan file (TOML); the command line wins over it.")]


def origin_rows(composed: Composed) -> list[tuple[str, Any, str]]:
    """Every setting: path, value, and where the value came from."""
    values = hidden_settings(flatten(composed.plan))
    return [(path, value, composed.origins[path]) for path, value in values.items()]


def show(
    *words: Words,
    preset: Preset = None,
    plan: PlanFile = None,
    origin: Annotated[bool, Parameter(help="Say where each value came from.", show_default=False)] = False,
    json: Annotated[bool, Parameter(help="As JSON, with origins.", show_default=False)] = False,
) -> int:
    """Print the whole plan as TOML, which `--plan` reads back."""
    composed = compose_words(words, preset, plan)
    rows = origin_rows(composed)
    if json:
        say_json([{"path": path, "value": value, "origin": where} for path, value, where in rows])
    elif origin:
        say_columns(((path, shown(value), where) for path, value, where in rows), ("setting", "value", "origin"))
    else:
        say(*to_toml(composed.plan).split("\n"))
    return 0


def check(*words: Words, preset: Preset = None, plan: PlanFile = None) -> int:
    """Say whether a plan is sound; exit code 2 and the reason if it is not."""
    composed = compose_words(words, preset, plan)
    for note in composed.notes:
        say(f"note: {note}")
    say(f"The plan is sound: {composed.plan.env.id}, hash {plan_hash(composed.plan)[:12]}.")
    return 0


def print_schema() -> int:
    """Print the JSON Schema of plan files, for editors."""
    say_json(schema())
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
        say_json([{field: getattr(each, field) for field in each.__slots__} for each in found])
    elif name is None:
        say_columns(((each.name, each.kind, each.title) for each in found), ("preset", "kind", "what it is"))
        say("", "More about one: qfleet presets NAME")
    else:
        say(found[0].title, f"Source: {found[0].source}", f"Advice: {found[0].advice}", "")
        say_columns((path, shown(value)) for path, value in found[0].settings.items())
    return 0


app.command(
    show, help_epilogue="Examples:\n  qfleet plan show CartPole-v1 > my.toml\n  qfleet plan show my.toml --origin"
)
app.command(check, help_epilogue="Example:\n  qfleet plan check my.toml algo.n_step=5")
app.command(print_schema, name="schema", help_epilogue="Example:\n  qfleet plan schema > plan.schema.json")
