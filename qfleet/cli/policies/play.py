"""`qfleet play`: watch a run's policy."""

import sys
from typing import Annotated

from cyclopts import Parameter

from qfleet.cli.arguments import parse_count
from qfleet.cli.entry import without_collection
from qfleet.cli.output import echo, echo_warnings
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

MOST_FRAMES = 120


def play(
    run: RunName,
    /,
    *arguments: EnvSettings,
    env: OtherEnv = None,
    episodes: Episodes = "3",
    fps: Annotated[
        str | None, Parameter(help="Steps per second, at most 120; as the environment says otherwise.", metavar="N")
    ] = None,
    terminal: Annotated[
        bool, Parameter(help="In the terminal, though there is a display.", show_default=False)
    ] = False,
    which: Which = "best",
    out: Out = "runs",
    seed: Annotated[str | None, Parameter(help="Other episodes than those of the run's report.", metavar="N")] = None,
    trust_env: TrustEnv = False,
) -> int:
    """Watch the greedy policy: in a window, or as pictures in the terminal. Ctrl-C ends it."""
    weights = parse_which(which)
    num = parse_count("--episodes", episodes) or 3
    rate = parse_rate(fps)
    other_seed = parse_count("--seed", seed, 0)
    variant = parse_variant(env, arguments)
    from rich.console import Console

    with without_collection():
        from qfleet.api import load
    from qfleet.training.evaluation.play import Player
    from qfleet.watch import find_run

    path = find_run(run, out)
    with echo_warnings():
        loaded = load(path, which=weights, trust_env=trust_env)
        echo(weights_text(loaded), to_stderr=True)
        player = Player(
            Console(file=sys.stdout, highlight=False, emoji=False, markup=False), num, rate, window=not terminal
        )
        ended = player.play(loaded.policy, loaded.trained().world(variant, other_seed))
    if len(ended) > 1:
        echo(f"mean return {sum(moment.total for moment in ended) / len(ended):g} of {len(ended)} episodes")
    return 0


def parse_rate(fps: str | None) -> int | None:
    """The value of --fps."""
    rate = parse_count("--fps", fps, example=30)
    if rate is not None and rate > MOST_FRAMES:
        raise UsageError(
            f"--fps {fps} is not valid",
            f"--fps must be an integer from 1 to {MOST_FRAMES}: no eye sees more.",
            "Write for example --fps 30",
        )
    return rate
