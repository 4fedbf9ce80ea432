"""`qfleet plan show|check|schema` and `qfleet presets`."""

from typing import Annotated, Any

from cyclopts import App, Parameter

from qfleet.cli.arguments import COMMANDS, PREPARE, PlanArguments, PlanFile, Preset, compose_arguments
from qfleet.cli.output import echo, echo_json, echo_table, size
from qfleet.plan import Composed, flatten, json_schema, plan_hash, to_toml, total_updates, updates_per_step
from qfleet.plan.naming import algorithm_description
from qfleet.plan.secrets import redacted_settings
from qfleet.plan.setting_text import format_value
from qfleet.plan.validate.case import COMMAND_LINE

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


def summary(composed: Composed) -> str:
    """One line: the environment, the algorithm, and the layers the plan is made of."""
    plan = composed.plan
    own = [path for path, origin in composed.origins.items() if origin == COMMAND_LINE]
    parts = [f"preset {composed.preset}"] if composed.preset else []
    parts += [composed.file] if composed.file else []
    values = redacted_settings(flatten(plan))
    parts += [f"{path}={format_value(values[path])}" for path in own if path != "env.id"]
    tuned = f"general defaults (none tuned for {plan.env.id})" if composed.defaults == "general" else ""
    layers = ", ".join([tuned or f"{composed.defaults} defaults", *parts])
    return f"{plan.env.id}: {algorithm_description(plan)}; {layers}"


def print_dry_run(
    composed: Composed,
    json: bool,
    members: int | None,
    jobs: int | None,
    *,
    out: str,
    name: str | None,
    weights_from: str | None,
) -> int:
    """Print the plan of a run, or of `members` runs, and what it needs; nothing is run."""
    from qfleet.api import rehearse
    from qfleet.sweep.capacity import find_capacity

    needs = rehearse(composed.plan, out=out, name=name, weights_from=weights_from)
    if members is not None:
        needs |= {"members": members, "at_once": find_capacity(composed.plan, members, jobs).jobs}
    if json:
        rows = [{"path": path, "value": value, "origin": origin} for path, value, origin in origin_rows(composed)]
        echo_json({"plan": rows, "notes": composed.notes, "needs": needs})
        return 0
    echo(summary(composed), "")
    echo_table((path, format_value(value), origin) for path, value, origin in origin_rows(composed))
    echo()
    ratio = float(updates_per_step(composed.plan))
    pace = f"{ratio:g} per step" if ratio >= 1 else f"one per {1 / ratio:g} steps"
    echo_table(
        [("updates", f"at most {total_updates(composed.plan)}, {pace}")]
        + [(key.removesuffix("_bytes"), size(value)) for key, value in needs.items() if key.endswith("_bytes")]
        + ([("members", f"{members}, {needs['at_once']} at once; each needs the above")] if members else [])
    )
    for note in composed.notes:
        echo(f"note: {note}")
    echo("", "Nothing was run: --dry-run.")
    return 0


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
    echo_json(json_schema())
    return 0


def presets(
    name: Annotated[str | None, Parameter(name="NAME", help="Show the settings of this preset.")] = None,
    /,
    *,
    json: Annotated[bool, Parameter(help="As JSON.", show_default=False)] = False,
) -> int:
    """List presets: named algorithms, and the defaults that environments get."""
    from qfleet.plan.presets.catalog import algorithm_presets, describe, environment_presets

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
