"""`qfleet env`: list environments; check an environment's contract and measure its speed."""

from typing import Annotated

from cyclopts import App, Parameter

from qfleet.cli.arguments import COMMANDS, PREPARE, compose_arguments
from qfleet.cli.output import echo, echo_json, echo_table, table_lines
from qfleet.errors import EnvError

app = App(
    name="env",
    help="Look at environments.",
    group=PREPARE,
    group_commands=COMMANDS,
    help_epilogue="Example:\n  qfleet env list\n  qfleet env check CartPole-v1",
)


def check(
    *arguments: Annotated[str, Parameter(name="ENV", help="Environment id, then any settings env.PATH=value.")],
    json: Annotated[bool, Parameter(help="As JSON.", show_default=False)] = False,
) -> int:
    """Check an environment: spaces, contract, determinism, exact re-driving, speed."""
    env = compose_arguments(arguments, None, None).plan.env
    from qfleet.envs import check_env

    found = check_env(env)
    if json:
        echo_json([{"check": name, "ok": ok, "detail": detail} for name, ok, detail in found])
    else:
        echo_table([(name, "ok" if ok else "FAILED", detail) for name, ok, detail in found])
    failed = [name for name, ok, _ in found if not ok]
    if failed:
        raise _failure(env.id, failed)
    return 0


def list_all(
    pattern: Annotated[
        str | None, Parameter(name="PATTERN", help="Part of an id, or a pattern with wildcards such as '*Lander*'.")
    ] = None,
    /,
    *,
    all_: Annotated[
        bool, Parameter(name="--all", help="Older versions and retired ids too.", show_default=False)
    ] = False,
    json: Annotated[bool, Parameter(help="As JSON.", show_default=False)] = False,
) -> int:
    """List the environments that are registered here, and what training on them needs."""
    from qfleet.envs.lookup.listing import list_envs

    found = list_envs(pattern, all_versions=all_)
    if json:
        echo_json([entry._asdict() for entry in found])
        return 0
    header = ("id", "observation", "action", "trains", "note")
    rows = [(entry.id, entry.observation, entry.action, entry.trains, entry.note) for entry in found]
    sources = [entry.source for entry in found]
    for number, line in enumerate(table_lines(rows, header)):
        if number and (number == 1 or sources[number - 1] != sources[number - 2]):
            echo("", f"{sources[number - 1]}:")
        echo(line)
    return 0


app.command(
    list_all,
    name="list",
    help_epilogue="Examples:\n  qfleet env list\n  qfleet env list lander\n  qfleet env list 'ALE/*' --json",
)


def _failure(env_id: str, failed: list[str]) -> EnvError:
    """Say whether training works in spite of what failed."""
    what = f"{env_id} fails {', '.join(failed)}"
    if set(failed) <= {"determinism", "re-drive"}:
        return EnvError(
            what,
            "Training on it works, but a run cannot be repeated, and a resumed run may be `not exact`.",
            "Let all its randomness and state begin anew with reset(seed=...); docs/worlds.md shows how for Box2D.",
        )
    return EnvError(
        what,
        "Training on it would be wrong or impossible.",
        "Fix the environment; the lines above show what was observed.",
    )


app.command(check, help_epilogue="Example:\n  qfleet env check CartPole-v1\n  qfleet env check my_env.py:MyEnv")
