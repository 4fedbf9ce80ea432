"""`qfleet data collect`: record the episodes of policies in an environment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qfleet.cli.arguments import compose_arguments, parse_count, refuse_json_with_quiet
from qfleet.cli.output import echo
from qfleet.errors import UsageError
from qfleet.plan import read_plan

if TYPE_CHECKING:
    from qfleet.plan.schema import Plan

Show = Callable[[int, int], object]
Out = Annotated[str, Parameter(help="Folder in which a run is looked for by its name.")]


def collect(
    source: Annotated[str, Parameter(name="ENV|RUN", help="Environment id, or a run: then its policy plays.")],
    url: Annotated[str, Parameter(name="URL", help="Folder of the data set.")],
    /,
    *settings: Annotated[str, Parameter(name="PATH=VALUE", help="Settings of the environment: env.num=16.")],
    policy: Annotated[
        tuple[str, ...],
        Parameter(
            help="random, greedy, epsilon=0.1, RUN or RUN,epsilon=0.1; several with shares: random:0.5.",
            metavar="POLICY",
            negative=(),
        ),
    ] = (),
    episodes: Annotated[str | None, Parameter(help="Whole episodes to record.", metavar="N")] = None,
    steps: Annotated[str | None, Parameter(help="Record whole episodes until they have N steps.", metavar="N")] = None,
    cut: Annotated[
        bool, Parameter(help="End at exactly N steps: the last episodes are cut off.", show_default=False)
    ] = False,
    seed: Annotated[str | None, Parameter(help="Decides everything random (seed).", metavar="N")] = None,
    out: Out = "runs",
    trust_env: Annotated[
        bool, Parameter(help="Run the environment code a run names, though another user made it.", show_default=False)
    ] = False,
    quiet: Annotated[bool, Parameter(help="Show nothing but warnings and errors.", show_default=False)] = False,
    json: Annotated[bool, Parameter(help="As JSON.", show_default=False)] = False,
) -> int:
    """Record the episodes of a policy in an environment, or of a mixture of policies."""
    refuse_json_with_quiet(json, quiet)
    num_episodes = parse_count("--episodes", episodes)
    num_steps = parse_count("--steps", steps, example=10_000)
    run = _find_run(source, out)
    from qfleet.workflow.collecting import collect as start
    from qfleet.workflow.collecting import parse_mixture

    plan = _collecting_plan(source, run, settings, seed)
    behaviours = parse_mixture(policy, run, lambda text: _require_run(text, out))
    with _shown(url, num_episodes, num_steps, quiet) as show:
        amount: dict[str, int | None] = {"episodes": num_episodes, "steps": num_steps}
        start(plan, url, behaviours, **amount, cut=cut, trust_env=trust_env, show=show, warn=_warn)
    if quiet:
        return 0
    from qfleet.cli.offline.inspect import inspect

    return inspect(url, json=json)


@contextmanager
def _shown(url: str, num_episodes: int | None, num_steps: int | None, quiet: bool) -> Iterator[Show]:
    """Shows how far the collection is; says what is left of one that was stopped."""
    from qfleet.cli.offline.progress import CountProgress

    progress = CountProgress("collect", "steps" if num_episodes is None else "episodes")

    def show(episodes: int, steps: int) -> None:
        if num_episodes is not None:
            progress.show(min(episodes, num_episodes), num_episodes)
        elif num_steps is not None:
            progress.show(min(steps, num_steps), num_steps)

    try:
        yield (lambda episodes, steps: None) if quiet else show
    except KeyboardInterrupt:
        progress.end()
        echo(f"stopped: there is no data set at {url}; the next collection writes over what is there", to_stderr=True)
        raise
    finally:
        progress.end()


def _warn(text: str) -> None:
    echo(f"warning: {text}", to_stderr=True)


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

    from qfleet.plan.schema import Actors, InlineRuntime, RayRuntime

    plan = read_plan(run / "run.toml")
    if isinstance(plan.runtime, RayRuntime):  # a run from a cluster is played here
        plan = msgspec.structs.replace(plan, runtime=InlineRuntime(), actors=Actors())
    number = parse_count("--seed", seed, least=0)
    return plan if number is None else msgspec.structs.replace(plan, seed=number)
