"""Arguments of verbs that let a run's policy act: whose weights, how many episodes, in which world."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from qfleet.cli.arguments import split_arguments
from qfleet.errors import UsageError

if TYPE_CHECKING:
    from qfleet.run_object import Run
    from qfleet.training.evaluation.variants import Variant

Which = Annotated[
    str, Parameter(name="--which", help="Whose weights: best, latest, or any that can be read.", metavar="WHICH")
]
Episodes = Annotated[str | None, Parameter(help="How many whole episodes.", metavar="N")]
EnvSettings = Annotated[
    str, Parameter(name="env.PATH=value", help="Other settings of the environment, such as env.options.gravity=-12.")
]
OtherEnv = Annotated[
    str | None, Parameter(name="--env", help="Another environment with the same spaces.", metavar="ID")
]


def parse_which(which: str) -> Literal["best", "latest", "any"]:
    """The value of --which."""
    known: dict[str, Literal["best", "latest", "any"]] = {"best": "best", "latest": "latest", "any": "any"}
    if which in known:
        return known[which]
    raise UsageError(
        f"--which {which} is not valid",
        "--which must be one of best, latest, any.",
        "Write --which best, --which latest or --which any",
    )


def parse_variant(env: str | None, arguments: Sequence[str]) -> "Variant":
    """The world that --env and settings of `env` describe; code that they name was typed by the user."""
    named, settings = split_arguments(arguments)
    if named is not None:
        raise UsageError(
            f"unexpected argument {named!r}",
            "After the run come settings of its environment, written env.PATH=value.",
            f"Another environment is given with --env {named}",
        )
    from qfleet.plan.draft import Assignment
    from qfleet.training.evaluation.variants import Variant

    typed = [Assignment(path, value, origin, text=True, explicit=True) for path, value, origin in settings]
    return Variant("", env, tuple(typed))


def weights_text(run: "Run") -> str:
    """Which checkpoint's weights were used."""
    if run.weights is None:
        return "weights of the run itself"
    return f"{run.weights.text(run.plan)}, checkpoint {run.weights.checkpoint.path.name}"
