"""`qfleet eval`, `record`, `plot` and `verify`: looking at what a run has learned and kept."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from qfleet.cli.arguments import whole
from qfleet.cli.say import say, say_columns, say_json, say_warnings
from qfleet.cli.training import GroupName, Out, RunName, TrustEnv
from qfleet.errors import NoCheckpointError, QfleetError, StorageError, UsageError

if TYPE_CHECKING:
    from qfleet.api import Run

Which = Annotated[
    str, Parameter(name="--which", help="Whose weights: best, latest, or any that can be read.", metavar="WHICH")
]
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
    weights = _weights(which)
    num = whole("--episodes", episodes) or 100
    other = whole("--seed", seed, 0)
    from qfleet.api import load
    from qfleet.watch import find_run

    with say_warnings():
        loaded = load(find_run(run, out), which=weights, trust_env=trust_env)
        row = loaded.evaluate(episodes=num, seed=other)
    if json:
        say_json(row)
        return 0
    say(f"mean {row['mean']:.2f}, 95 % interval {row['low']:.2f} to {row['high']:.2f}")
    say(f"median {row['median']:.2f}, IQM {row['iqm']:.2f}, {row['episodes']} episodes, greedy")
    if row["cut_episodes"]:
        say(
            f"cut: {row['cut_episodes']} episodes had not ended after eval.max_steps={loaded.plan.eval.max_steps} steps"
        )
    say(f"{_whose(loaded)}, seed {row['seed']}")
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
    weights = _weights(which)
    num = whole("--episodes", episodes) or 1
    from qfleet.api import load
    from qfleet.watch import find_run

    path = find_run(run, out)
    with say_warnings():
        loaded = load(path, which=weights, trust_env=trust_env)
        name = weights if loaded.weights is None else loaded.weights.which
        film = loaded.record(Path(file) if file is not None else path / "videos" / f"{name}.mp4", episodes=num)
    say(_whose(loaded), to_stderr=True)
    say(str(film))
    return 0


def _whose(run: "Run") -> str:
    """Which checkpoint's weights were looked at."""
    if run.weights is None:
        return "weights of the run itself"
    return f"{run.weights.text(run.plan)}, checkpoint {run.weights.checkpoint.path.name}"


def plot(
    *runs: Annotated[str, Parameter(name="RUN", help="One or more runs or groups, drawn over each other.")],
    file: Annotated[
        str | None, Parameter(help="Picture file; plot.png in the run, the group or OUT otherwise.", metavar="FILE")
    ] = None,
    out: Out = "runs",
) -> int:
    """Draw return with its interval, loss and speed as a PNG."""
    if not runs:
        raise UsageError(
            "qfleet plot needs RUN", "RUN says what to draw, and it is missing.", "Try: qfleet plot latest"
        )
    from qfleet.watch import plot_runs
    from qfleet.watch.run_directory import find_entry

    entries = [find_entry(run, out) for run in runs]
    target = Path(file) if file is not None else (entries[0] if len(entries) == 1 else Path(out)) / "plot.png"
    say(str(plot_runs([path for entry in entries for path in _drawn(entry)], target)))
    return 0


def _drawn(entry: Path) -> list[Path]:
    """What to draw of a run or a group, of whose members some may have no row yet."""
    from qfleet.watch import read_rows
    from qfleet.watch.run_directory import is_group, runs_of

    if not is_group(entry):
        return [entry]
    found = [path for path in runs_of(entry) if read_rows(path / "metrics.jsonl")]
    if not found:
        raise UsageError(
            f"the group {entry} has nothing to plot yet",
            "None of its runs has written a row.",
            f"Let it train: qfleet resume {entry}",
        )
    return found


def verify(run: GroupName, /, *, out: Out = "runs") -> int:
    """Check every file of every checkpoint against its recorded size and hash; changes nothing."""
    from qfleet.watch.run_directory import find_entry, runs_of

    entry = find_entry(run, out)
    paths = runs_of(entry)
    if not paths:
        raise NoCheckpointError(f"{entry} has no checkpoint", "None of its runs has begun.", f"qfleet resume {entry}")
    errors = [error for path in paths if (error := _verified(path, alone=paths == [entry])) is not None]
    if errors:
        raise _worst(errors, len(paths))
    return 0


def _verified(path: Path, *, alone: bool) -> QfleetError | None:
    """Look at the checkpoints of one run, say how they are, and answer with what is wrong."""
    from qfleet.save import verify_run

    found = [(name, "ok" if ok else "damaged", detail) for name, ok, detail in verify_run(path)]
    if not alone:
        say(f"{path}")
    if not found:
        return NoCheckpointError(f"{path} has no checkpoint", "None was written yet.", "Let it train for longer.")
    say_columns(found, ("checkpoint", "state", "detail"))
    damaged = [name for name, state, _ in found if state != "ok"]
    if len(damaged) == len(found):
        return NoCheckpointError(
            f"no checkpoint of {path} is whole",
            f"Damaged: {', '.join(damaged)}.",
            "Restore the run folder from a copy; it cannot be resumed as it is.",
        )
    if damaged:
        return StorageError(
            f"{len(damaged)} of {len(found)} checkpoints of {path} are damaged",
            f"Damaged: {', '.join(damaged)}.",
            "Resuming uses the newest whole one; check the disk.",
        )
    return None


def _worst(errors: list[QfleetError], num: int) -> QfleetError:
    """One run's error as it is; those of several as one, with the exit code of the worst."""
    if num == 1 or len(errors) == 1:
        return errors[0]
    worst = max(errors, key=lambda error: error.exit_code)
    return type(worst)(f"{len(errors)} of {num} runs fail", "\n".join(error.what for error in errors), worst.fix)


def _weights(which: str) -> Literal["best", "latest", "any"]:
    known: dict[str, Literal["best", "latest", "any"]] = {"best": "best", "latest": "latest", "any": "any"}
    if which in known:
        return known[which]
    raise UsageError(
        f"--which {which} is not valid",
        "--which must be one of best, latest, any.",
        "Write --which best, --which latest or --which any",
    )
