"""`qfleet env check`: check an environment's contract and measure its speed."""

from typing import Annotated

from cyclopts import App, Parameter

from qfleet.cli.arguments import COMMANDS, PREPARE, compose_arguments
from qfleet.cli.output import echo_json, echo_table
from qfleet.errors import EnvError

app = App(
    name="env",
    help="Look at environments.",
    group=PREPARE,
    group_commands=COMMANDS,
    help_epilogue="Example:\n  qfleet env check CartPole-v1",
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
