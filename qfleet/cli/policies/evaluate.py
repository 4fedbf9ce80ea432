"""`qfleet eval`: a run's policy on test episodes, in its own world or in others."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from qfleet.cli.arguments import parse_count
from qfleet.cli.entry import without_collection
from qfleet.cli.output import echo, echo_json, echo_warnings
from qfleet.cli.policies.arguments import (
    EnvSettings,
    Episodes,
    OtherEnv,
    Which,
    parse_variant,
    parse_which,
    weights_text,
)
from qfleet.cli.training import Out, RunName, TrustEnv
from qfleet.errors import UsageError
from qfleet.plan.setting_text import format_value

if TYPE_CHECKING:
    from qfleet.run_object import Run


def evaluate(
    run: RunName,
    /,
    *arguments: EnvSettings,
    env: OtherEnv = None,
    variants: Annotated[
        str | None, Parameter(help="TOML file with a table per variant; evaluates all of them.", metavar="FILE")
    ] = None,
    episodes: Episodes = "100",
    which: Which = "best",
    out: Out = "runs",
    seed: Annotated[
        str | None, Parameter(help="Other test episodes than those of the run's own report.", metavar="N")
    ] = None,
    trust_env: TrustEnv = False,
    trust_variants: Annotated[
        bool, Parameter(help="Run the code that the file of variants names.", show_default=False)
    ] = False,
    json: Annotated[bool, Parameter(help="Print the result as JSON.", show_default=False)] = False,
) -> int:
    """Evaluate the greedy policy on fresh test episodes: mean with its 95 % interval, median, IQM."""
    weights = parse_which(which)
    num = parse_count("--episodes", episodes) or 100
    other = parse_count("--seed", seed, 0)
    variant = parse_variant(env, arguments)
    _refuse_idle_trust(trust_variants, variants)
    with without_collection():
        from qfleet.api import load
    from qfleet.watch import find_run

    opened = partial(load, find_run(run, out), which=weights, trust_env=trust_env)
    if variants is not None:
        from qfleet.cli.policies.variants import evaluate_file

        return evaluate_file(opened, variants, variant, num, other, trusted=trust_variants, json=json)
    with echo_warnings():
        loaded = opened()
        row = loaded.trained().evaluate(variant, num, other)
    if json:
        echo_json(row)
    else:
        _print_row(row, loaded)
    return 0


def _refuse_idle_trust(trust_variants: bool, variants: str | None) -> None:
    if trust_variants and variants is None:
        raise UsageError(
            "--trust-variants has no effect", "It is about a file of variants, and none is given.", "Leave it out."
        )


def _print_row(row: dict[str, Any], run: "Run") -> None:
    echo(f"mean {row['mean']:.2f}, 95 % interval {row['low']:.2f} to {row['high']:.2f}")
    echo(f"median {row['median']:.2f}, IQM {row['iqm']:.2f}, {row['episodes']} episodes, greedy")
    if row["cut_episodes"]:
        echo(f"cut: {row['cut_episodes']} episodes had not ended after eval.max_steps={run.plan.eval.max_steps} steps")
    if "env" in row:
        echo(f"in {where_text(row)}; trained in {run.plan.env.id}")
    echo(f"{weights_text(run)}, seed {row['seed']}")


def where_text(row: dict[str, Any]) -> str:
    """The environment of a row, with its options and wrappers."""
    options = [f"{name}={format_value(value)}" for name, value in row["options"].items()]
    wrappers = [f"wrappers {format_value(row['wrappers'])}"] if row.get("wrappers") else []
    return ", ".join([row["env"], *options, *wrappers])
