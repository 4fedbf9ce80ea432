"""`qfleet data`: collect, import, inspect, validate, prepare and export data sets."""

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from qfleet.cli.arguments import COMMANDS, PREPARE, parse_count
from qfleet.cli.offline.collecting import collect
from qfleet.cli.offline.convert import export, import_
from qfleet.cli.offline.inspect import inspect, validate
from qfleet.cli.offline.judge import evaluate_policy_on_data

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


def prepare(
    url: Url,
    target: Annotated[str, Parameter(name="URL2", help="Folder of the prepared data set.")],
    /,
    *,
    split: Annotated[str, Parameter(help="Percentages of train, validation and test.")] = "80/10/10",
    salt: Annotated[str, Parameter(help="Another salt makes another split.")] = "qfleet",
    group: Annotated[
        str, Parameter(help="Keep episodes of one seed, world, behaviour or key (of --keys) in one split.")
    ] = "",
    strata: Annotated[
        str,
        Parameter(help="Each split gets its share of every kind: return:4 (quantiles), world, behaviour, seed, key."),
    ] = "",
    keys: Annotated[str | None, Parameter(help="CSV file of id,key.", metavar="FILE")] = None,
    unique: Annotated[bool, Parameter(help="Leave out episodes with equal content.", show_default=False)] = False,
    shards: Annotated[str | None, Parameter(help="Divide the training split into N shards.", metavar="N")] = None,
    capacity: Annotated[
        str | None, Parameter(help="Speeds of their nodes: 1,1,0.5, or measured.", metavar="LIST")
    ] = None,
    engine: Annotated[str, Parameter(help="local, ray or spark: the result is the same.")] = "local",
    jobs: Annotated[str | None, Parameter(help="Processes (one per core).", metavar="N")] = None,
    address: Annotated[str | None, Parameter(help="Of a Ray cluster.", metavar="HOST:PORT")] = None,
    file_bytes: Annotated[
        str | None, Parameter(help="Size of files before compression (67108864).", metavar="N")
    ] = None,
    json: Json = False,
) -> int:
    """Split a data set by its episodes, and compute the statistics of every split."""
    from qfleet.cli.offline.preparing import prepare_by_options
    from qfleet.distributed.preparing.options import PrepareOptions

    options = PrepareOptions(
        split=split,
        salt=salt,
        group=group,
        strata=strata,
        keys=keys,
        unique=unique,
        shards=parse_count("--shards", shards),
        capacity=capacity,
        engine=engine,
        jobs=parse_count("--jobs", jobs),
        address=address,
        file_bytes=parse_count("--file-bytes", file_bytes, example=16_000_000),
    )
    prepare_by_options(_open(url), target, options)
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
app.command(
    inspect,
    help_epilogue="Examples:\n  qfleet data inspect data/random\n  qfleet data inspect data/prepared --plot data.png",
)
app.command(validate, help_epilogue="Example:\n  qfleet data validate data/random")
app.command(
    prepare,
    help_epilogue=(
        "Examples:\n"
        "  qfleet data prepare data/random data/prepared --split 80/10/10\n"
        "  qfleet data prepare data/random data/shards --shards 4 --capacity 1,1,1,0.5 --strata return:4"
    ),
)
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
