"""`qfleet data`: collect, import, inspect, validate, prepare and export data sets."""

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from qfleet.cli.arguments import COMMANDS, PREPARE, parse_count
from qfleet.cli.offline.collecting import collect
from qfleet.cli.offline.convert import export, import_
from qfleet.cli.offline.judge import evaluate_policy_on_data
from qfleet.cli.output import echo, echo_json, echo_table
from qfleet.errors import StorageError

if TYPE_CHECKING:
    from qfleet.datasets.format import Dataset

app = App(
    name="data",
    help="Make and look at data sets.",
    group=PREPARE,
    group_commands=COMMANDS,
    help_epilogue=(
        "Example:\n"
        "  qfleet data collect CartPole-v1 data/random --episodes 200\n"
        "  qfleet data prepare data/random data/prepared"
    ),
)
Url = Annotated[str, Parameter(name="URL", help="Folder of the data set.")]
Json = Annotated[bool, Parameter(help="As JSON.", show_default=False)]


def inspect(
    url: Url,
    /,
    *,
    coverage: Annotated[
        bool, Parameter(help="Count different pairs of observation and action; reads all files.", show_default=False)
    ] = False,
    json: Json = False,
) -> int:
    """Show what is in a data set, from its index and statistics."""
    from qfleet.datasets.inspect import coverage_summary, summarize_dataset

    dataset = _open(url)
    found = summarize_dataset(dataset)
    if coverage:
        found["coverage"] = coverage_summary(dataset)
    if json:
        echo_json(found)
        return 0
    echo(f"data set {found['url']}", f"version {found['version']}")
    echo(
        f"{found['environment']} · {found['episodes']:,} episodes · {found['steps']:,} steps · {found['bytes']:,} bytes"
    )
    echo(f"made with {', '.join(f'{name}={value}' for name, value in found['settings'].items())}")
    header = ("split", "episodes", "steps", "return", "deviation", "length", "actions")
    echo_table([_split_row(name, each) for name, each in found["splits"].items()], header)
    if coverage:
        echo(f"{found['coverage']['pairs']:,} different pairs of observation and action")
    return 0


def _split_row(name: str, split: dict[str, Any]) -> tuple[object, ...]:
    shares = split["action_shares"]
    shown = " ".join(f"{share:.1%}" for share in shares[:8]) + (" ..." if len(shares) > 8 else "")
    returns = split["return"]
    numbers = (f"{returns['mean']:.4g}", f"{returns['deviation']:.4g}", f"{split['length']['mean']:.4g}")
    return (name, f"{split['episodes']:,}", f"{split['steps']:,}", *numbers, shown)


def validate(url: Url, /, *, json: Json = False) -> int:
    """Check every hash and every rule of a data set."""
    from qfleet.datasets.inspect import validate_dataset

    dataset = _open(url)
    problems = validate_dataset(dataset)
    if json:
        echo_json([{"place": each.place, "problem": each.text} for each in problems])
    elif problems:
        echo_table([(each.place, each.text) for each in problems])
    if problems:
        raise StorageError(
            f"{dataset.place.url} breaks {len(problems)} rules of the format",
            f"The first: {problems[0].place}: {problems[0].text}.",
            "Copy the data set again from its origin, or make it again.",
        )
    if not json:
        manifest = dataset.manifest
        echo(f"ok: {manifest.num_episodes:,} episodes in {len(manifest.files):,} files, version {dataset.version}")
    return 0


def prepare(
    url: Url,
    target: Annotated[str, Parameter(name="URL2", help="Folder of the prepared data set.")],
    /,
    *,
    split: Annotated[str, Parameter(help="Percentages of train, validation and test.")] = "80/10/10",
    salt: Annotated[str, Parameter(help="Another salt makes another split.")] = "qfleet",
    group: Annotated[str, Parameter(help="Keep episodes of one seed, world or behaviour in one split.")] = "",
    unique: Annotated[bool, Parameter(help="Leave out episodes with equal content.", show_default=False)] = False,
    shards: Annotated[str | None, Parameter(help="Divide the training split into N shards.", metavar="N")] = None,
    capacity: Annotated[str | None, Parameter(help="Speeds of their nodes: 1,1,0.5.", metavar="LIST")] = None,
    json: Json = False,
) -> int:
    """Split a data set by its episodes, and compute the statistics of every split."""
    from qfleet.datasets.prepare import PreparePlan, parse_capacities, parse_split, prepare_dataset, require_group

    capacities = parse_capacities(parse_count("--shards", shards), capacity)
    plan = PreparePlan(parse_split(split, salt), group=require_group(group), unique=unique, capacities=capacities)
    prepare_dataset(_open(url), target, plan)
    return inspect(target, json=json)


def _open(url: str) -> "Dataset":
    from qfleet.datasets.format import open_dataset

    return open_dataset(url)


app.command(
    collect,
    usage="Usage: qfleet data collect ENV|RUN URL [OPTIONS] [env.PATH=value ...]",
    help_epilogue=(
        "Examples:\n"
        "  qfleet data collect CartPole-v1 data/random --episodes 200\n"
        "  qfleet data collect latest data/noisy --policy epsilon=0.1 --steps 50_000\n"
        "  qfleet data collect CartPole-v1 data/mix --policy random:1 --policy latest,epsilon=0.1:3 --episodes 200"
    ),
)
app.command(inspect, help_epilogue="Example:\n  qfleet data inspect data/random")
app.command(validate, help_epilogue="Example:\n  qfleet data validate data/random")
app.command(prepare, help_epilogue="Example:\n  qfleet data prepare data/random data/prepared --split 80/10/10")
app.command(
    import_,
    name="import",
    help_epilogue=(
        "Examples:\n"
        "  qfleet data import ~/.minari/datasets/cartpole/random-v0 data/random\n"
        "  qfleet data import logs.csv data/logs --column reward=r --column obs=x,y --env Logs-v0"
    ),
)
app.command(export, help_epilogue="Example:\n  qfleet data export data/random exported --format minari")
app.command(
    evaluate_policy_on_data,
    name="judge",
    usage="Usage: qfleet data judge RUN|POLICY URL [OPTIONS]",
    help_epilogue="Example:\n  qfleet data judge latest data/prepared --split test",
)
