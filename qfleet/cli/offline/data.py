"""`qfleet data`: collect, import, inspect, validate, prepare and export data sets."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from qfleet.cli.arguments import COMMANDS, PREPARE, compose_arguments, parse_count
from qfleet.cli.offline.convert import export, import_
from qfleet.cli.offline.inspect import inspect, validate
from qfleet.cli.offline.judge import evaluate_policy_on_data
from qfleet.errors import UsageError
from qfleet.plan import read_plan

if TYPE_CHECKING:
    from qfleet.datasets.format import Dataset
    from qfleet.plan.schema import Plan

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
Out = Annotated[str, Parameter(help="Folder in which a run is looked for by its name.")]


def collect(
    source: Annotated[str, Parameter(name="ENV|RUN", help="Environment id, or a run: then its policy plays.")],
    url: Url,
    /,
    *settings: Annotated[str, Parameter(name="PATH=VALUE", help="Settings of the environment: env.num=16.")],
    policy: Annotated[
        str | None, Parameter(help="random, greedy, epsilon=0.1, or another run.", metavar="POLICY")
    ] = None,
    episodes: Annotated[str | None, Parameter(help="Whole episodes to record.", metavar="N")] = None,
    steps: Annotated[str | None, Parameter(help="Record whole episodes until they have N steps.", metavar="N")] = None,
    seed: Annotated[str | None, Parameter(help="Decides everything random (seed).", metavar="N")] = None,
    out: Out = "runs",
    trust_env: Annotated[
        bool, Parameter(help="Run the environment code a run names, though another user made it.", show_default=False)
    ] = False,
    json: Json = False,
) -> int:
    """Record the episodes of a policy in an environment."""
    num_episodes = parse_count("--episodes", episodes)
    num_steps = parse_count("--steps", steps, example=10_000)
    run = _find_run(source, out)
    from qfleet.workflow.collecting import collect as start
    from qfleet.workflow.collecting import parse_behaviour

    plan = _collecting_plan(source, run, settings, seed)
    behaviour = parse_behaviour(policy, run, lambda text: _require_run(text, out))
    start(plan, url, behaviour, episodes=num_episodes, steps=num_steps, trust_env=trust_env)
    return inspect(url, json=json)


def _find_run(text: str, out: str) -> Path | None:
    """The run of this name; None if it is no run, and so an environment."""
    from qfleet.watch.run_directory import is_run

    if text == "latest":
        return _require_run(text, out)
    plain = "/" not in text or Path(text).exists()
    return next((path for path in (Path(out, text), Path(text)) if plain and is_run(path)), None)


def _require_run(text: str, out: str) -> Path:
    from qfleet.watch import find_run

    return find_run(text, out)


def _collecting_plan(source: str, run: Path | None, settings: tuple[str, ...], seed: str | None) -> "Plan":
    """The plan that is played by: of an environment, or a run's own with another seed."""
    if run is None:
        return compose_arguments([source, *settings], None, None, {"seed": seed}).plan
    if settings:
        raise UsageError(
            f"{settings[0]} does not go with the run {run.name}",
            "A run plays in the environment that it was trained in.",
            "Leave settings out, or name the environment and --policy RUN.",
        )
    import msgspec

    plan = read_plan(run / "run.toml")
    number = parse_count("--seed", seed, least=0)
    return plan if number is None else msgspec.structs.replace(plan, seed=number)


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
        "  qfleet data collect latest data/noisy --policy epsilon=0.1 --steps 50_000"
    ),
)
app.command(
    inspect,
    help_epilogue="Examples:\n  qfleet data inspect data/random\n  qfleet data inspect data/prepared --plot data.png",
)
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
