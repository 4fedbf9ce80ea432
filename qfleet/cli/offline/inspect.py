"""`qfleet data inspect` and `validate`: what is in a data set, and whether it keeps every rule of the format."""

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from qfleet.cli.output import echo, echo_json, echo_table
from qfleet.errors import StorageError

if TYPE_CHECKING:
    from qfleet.datasets.format import Dataset
    from qfleet.datasets.inspect import Problem

Url = Annotated[str, Parameter(name="URL", help="Folder of the data set.")]
Json = Annotated[bool, Parameter(help="As JSON.", show_default=False)]


def inspect(
    url: Url,
    /,
    *,
    coverage: Annotated[
        bool, Parameter(help="Count different pairs of observation and action; reads all files.", show_default=False)
    ] = False,
    plot: Annotated[
        str | None,
        Parameter(help="Draw returns, lengths, actions and observations: png, svg or pdf.", metavar="FILE"),
    ] = None,
    json: Json = False,
) -> int:
    """Show what is in a data set, from its index and statistics."""
    from qfleet.datasets.format import open_dataset
    from qfleet.datasets.inspect import coverage_summary, plot_dataset, summarize_dataset

    dataset = open_dataset(url)
    found = summarize_dataset(dataset)
    if coverage:
        found["coverage"] = coverage_summary(dataset)
    if plot is not None:
        found["plot"] = str(plot_dataset(dataset, plot))
    if json:
        echo_json(found)
    else:
        _echo_summary(found)
    return 0


def _echo_summary(found: dict[str, Any]) -> None:
    echo(f"data set {found['url']}", f"version {found['version']}")
    echo(
        f"{found['environment']} · {found['episodes']:,} episodes · {found['steps']:,} steps · {found['bytes']:,} bytes"
    )
    echo(f"made with {', '.join(f'{name}={value}' for name, value in found['settings'].items())}")
    header = ("split", "episodes", "steps", "return", "deviation", "quartiles", "length", "quartiles", "actions")
    echo_table([_split_row(name, each) for name, each in found["splits"].items()], header)
    if "coverage" in found:
        echo(f"{found['coverage']['pairs']:,} different pairs of observation and action")
    if "plot" in found:
        echo(f"plot {found['plot']}")


def _split_row(name: str, split: dict[str, Any]) -> tuple[object, ...]:
    shares = split["action_shares"]
    shown = " ".join(f"{share:.1%}" for share in shares[:8]) + (" ..." if len(shares) > 8 else "")
    returns = split["return"]
    length = split["length"]
    of_return = (f"{returns['mean']:.4g}", f"{returns['deviation']:.4g}", _quartiles(returns))
    of_length = (f"{length['mean']:.4g}", _quartiles(length))
    return (name, f"{split['episodes']:,}", f"{split['steps']:,}", *of_return, *of_length, shown)


def _quartiles(numbers: dict[str, Any]) -> str:
    if numbers["quartiles"] is None:
        return "unknown"
    return " ".join(f"{each:.4g}" for each in numbers["quartiles"])


def validate(url: Url, /, *, json: Json = False) -> int:
    """Check every hash and every rule of a data set."""
    from qfleet.datasets.format import open_dataset
    from qfleet.datasets.inspect import Problem, validate_dataset

    try:
        dataset = open_dataset(url)
    except StorageError as error:
        if json:
            echo_json(_verdict(url, None, [Problem("manifest.json", f"{error.what}. {error.why}")]))
        raise
    problems = validate_dataset(dataset)
    if json:
        echo_json(_verdict(dataset.place.url, dataset, problems))
    elif problems:
        echo_table([(each.place, each.text) for each in problems])
    if problems:
        raise StorageError(
            f"{dataset.place.url} breaks {len(problems):,} rules of the format",
            f"The first: {problems[0].place}: {problems[0].text}.",
            "Copy the data set again from its origin, or make it again.",
        )
    if not json:
        manifest = dataset.manifest
        echo(f"ok: {manifest.num_episodes:,} episodes in {len(manifest.files):,} files, version {dataset.version}")
    return 0


def _verdict(url: str, dataset: "Dataset | None", problems: "list[Problem]") -> dict[str, Any]:
    """What is known of a data set, and each problem with its place."""
    found: dict[str, Any] = {"url": url, "ok": not problems, "version": None}
    if dataset is not None:
        manifest = dataset.manifest
        counts = {"episodes": manifest.num_episodes, "steps": manifest.num_steps, "files": len(manifest.files)}
        found |= {"version": dataset.version, **counts}
    places = ("file", "row_group", "episode", "row")
    listed = [{name: getattr(each, name) for name in places} | {"problem": each.text} for each in problems]
    return found | {"problems": listed}
