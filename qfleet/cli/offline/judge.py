"""`qfleet data judge`: what recorded episodes say about a policy."""

from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import Parameter

from qfleet.cli.arguments import parse_count
from qfleet.cli.output import echo, echo_json, echo_table
from qfleet.errors import UsageError

LABELS = {
    "td_error": "one-step TD error",
    "td_loss": "its Huber loss",
    "accuracy": "greedy action as recorded",
    "precision": "macro precision",
    "recall": "macro recall",
    "recorded_return": "discounted return, recorded",
    "fitted_q": "discounted return by fitted Q",
    "weighted_importance": "discounted return by weighted IS",
}


def evaluate_policy_on_data(
    source: Annotated[str, Parameter(name="RUN|POLICY", help="A run, or the folder of a saved policy.")],
    url: Annotated[str, Parameter(name="URL", help="Folder of the data set.")],
    /,
    *,
    split: Annotated[str, Parameter(help="train, validation, test or all.")] = "test",
    epsilon: Annotated[float, Parameter(help="Estimates are of the policy with this share of random actions.")] = 0.1,
    seed: Annotated[str, Parameter(help="Decides everything random.", metavar="N")] = "0",
    episodes: Annotated[str, Parameter(help="Read at most this number of episodes.", metavar="N")] = "1000",
    updates: Annotated[str, Parameter(help="Of each fitted Q evaluation.", metavar="N")] = "4000",
    out: Annotated[str, Parameter(help="Folder in which a run is looked for by its name.")] = "runs",
    json: Annotated[bool, Parameter(help="As JSON.", show_default=False)] = False,
) -> int:
    """Errors, agreement, calibration and off-policy estimates of a policy on recorded episodes."""
    from qfleet.datasets.format import Split, open_dataset
    from qfleet.training.evaluation.on_data import OnDataSettings, evaluate_on_data, load_for_data
    from qfleet.watch import find_run

    require_option("--split", split, split in get_args(Split), "Use train, validation, test or all.")
    require_option("--epsilon", epsilon, 0.0 <= epsilon <= 1.0, "Use a share from 0 to 1.")
    number = parse_count("--seed", seed, least=0) or 0
    most = parse_count("--episodes", episodes) or 1
    fit_updates = parse_count("--updates", updates) or 1
    folder = find_run(source, out)
    settings = OnDataSettings(split, epsilon, number, most, fit_updates)  # type: ignore[arg-type]
    dataset = open_dataset(url)
    plan, policy = load_for_data(folder, dataset)
    found = evaluate_on_data(plan, policy, dataset, settings, lambda text: echo(text, to_stderr=True))
    if json:
        echo_json(found)
    else:
        show(folder, found)
    return 0


def require_option(name: str, value: object, good: bool, fix: str) -> None:
    """Refuse an option's value."""
    if not good:
        raise UsageError(f"{name} {value} is not valid", "It is none of the values that this option takes.", fix)


def show(folder: Path, found: dict[str, Any]) -> None:
    """The numbers for people."""
    echo(f"{folder.name} on {found['episodes']:,} episodes of split {found['split']}, {found['steps']:,} steps")
    echo(f"discount {found['discount']:g}; estimates with epsilon {found['epsilon']:g}; version {found['version']}")
    if found["memory_full"]:
        echo("note: no more episodes were read: these fill the memory that episodes may have", to_stderr=True)
    echo_table([number_row(name, each) for name, each in found["numbers"].items()], ("number", "value", "95 %", "note"))
    groups = [
        (f"{row['steps']:,}", f"{row['value']:.4g}", f"{row['return']:.4g}") for row in found["calibration"]["groups"]
    ]
    if groups:
        echo("", "values and the discounted returns that followed, in groups of steps ordered by value")
        echo_table(groups, ("steps", "mean value", "mean return"))


def number_row(name: str, each: dict[str, Any]) -> tuple[str, str, str, str]:
    """A row of the table: a refused number says why."""
    label = LABELS.get(name, name)
    if each["value"] is None:
        return (label, "refused", "", each["refused"])
    span = "" if each["low"] is None else f"[{each['low']:.4g}, {each['high']:.4g}]"
    return (
        label,
        f"{each['value']:.4g}",
        span,
        ", ".join(f"{key}={number:.3g}" for key, number in each["support"].items()),
    )
