"""`qfleet eval`, `record`, `plot` and `verify`: looking at what a run has learned and kept."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from qfleet.cli.say import say, say_columns, say_json, say_warnings
from qfleet.cli.training import Out, RunName, TrustEnv
from qfleet.cli.words import whole
from qfleet.errors import NoCheckpointError, StorageError, UsageError

Which = Annotated[str, Parameter(name="--which", help="Whose weights: best or latest.", metavar="WHICH")]
Episodes = Annotated[str | None, Parameter(help="How many whole episodes.", metavar="N")]


def evaluate(
    run: RunName,
    /,
    *,
    episodes: Episodes = "100",
    which: Which = "best",
    out: Out = "runs",
    seed: Annotated[
        str | None, Parameter(help="Other test episodes than those of the run's own report.", metavar="N")
    ] = None,
    trust_env: TrustEnv = False,
    json: Annotated[bool, Parameter(help="Print the result as JSON.", show_default=False)] = False,
) -> int:
    """Judge the greedy policy on fresh test episodes: mean with its 95 % interval, median, IQM."""
    weights, num, other = _weights(which), whole("--episodes", episodes) or 100, whole("--seed", seed, 0)
    from qfleet.run import load
    from qfleet.watch import find_run

    with say_warnings():
        row = load(find_run(run, out), which=weights, trust_env=trust_env).evaluate(episodes=num, seed=other)
    if json:
        say_json(row)
        return 0
    say(f"mean {row['mean']:.2f}, 95 % interval {row['low']:.2f} to {row['high']:.2f}")
    say(f"median {row['median']:.2f}, IQM {row['iqm']:.2f}, {row['episodes']} episodes, {which} weights, greedy")
    return 0


def record(
    run: RunName,
    /,
    *,
    episodes: Episodes = "1",
    which: Which = "best",
    file: Annotated[
        str | None, Parameter(help="Video file; videos/WHICH.mp4 in the run otherwise.", metavar="FILE")
    ] = None,
    out: Out = "runs",
    trust_env: TrustEnv = False,
) -> int:
    """Film the greedy policy."""
    weights, num = _weights(which), whole("--episodes", episodes) or 1
    from qfleet.run import load
    from qfleet.watch import find_run

    path = find_run(run, out)
    target = Path(file) if file is not None else path / "videos" / f"{weights}.mp4"
    with say_warnings():
        film = load(path, which=weights, trust_env=trust_env).record(target, episodes=num)
    say(str(film))
    return 0


def plot(
    *runs: Annotated[str, Parameter(name="RUN", help="One or more runs, drawn over each other.")],
    file: Annotated[
        str | None, Parameter(help="Picture file; plot.png in the run or in OUT otherwise.", metavar="FILE")
    ] = None,
    out: Out = "runs",
) -> int:
    """Draw return with its interval, loss and speed as a PNG."""
    if not runs:
        raise UsageError(
            "qfleet plot needs RUN", "RUN says what to draw, and it is missing.", "Try: qfleet plot latest"
        )
    from qfleet.watch import find_run, plot_runs

    paths = [find_run(run, out) for run in runs]
    target = Path(file) if file is not None else (paths[0] if len(paths) == 1 else Path(out)) / "plot.png"
    say(str(plot_runs(paths, target)))
    return 0


def verify(run: RunName, /, *, out: Out = "runs") -> int:
    """Check every file of every checkpoint against its recorded size and hash; changes nothing."""
    from qfleet.save import verify_run
    from qfleet.watch import find_run

    path = find_run(run, out)
    found = [(name, "ok" if ok else "damaged", detail) for name, ok, detail in verify_run(path)]
    if not found:
        raise NoCheckpointError(f"{path} has no checkpoint", "None was written yet.", "Let it train for longer.")
    say_columns(found, ("checkpoint", "state", "detail"))
    damaged = [name for name, state, _ in found if state != "ok"]
    if len(damaged) == len(found):
        raise NoCheckpointError(
            f"no checkpoint of {path} is whole",
            f"Damaged: {', '.join(damaged)}.",
            "Restore the run folder from a copy; it cannot be resumed as it is.",
        )
    if damaged:
        raise StorageError(
            f"{len(damaged)} of {len(found)} checkpoints of {path} are damaged",
            f"Damaged: {', '.join(damaged)}.",
            "Resuming uses the newest whole one; check the disk.",
        )
    return 0


def _weights(which: str) -> Literal["best", "latest"]:
    known: dict[str, Literal["best", "latest"]] = {"best": "best", "latest": "latest"}
    if which in known:
        return known[which]
    raise UsageError(
        f"--which {which} is not valid", "--which must be one of best, latest.", "Write --which best or --which latest"
    )
