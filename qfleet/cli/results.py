"""`qfleet record`, `plot` and `verify`: film, plot and check a run."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qfleet.cli.arguments import parse_count
from qfleet.cli.entry import without_collection
from qfleet.cli.output import echo, echo_table, echo_warnings
from qfleet.cli.policies.arguments import Episodes, Which, parse_which, weights_text
from qfleet.cli.training import GroupName, Out, RunName, TrustEnv
from qfleet.errors import NoCheckpointError, QfleetError, StorageError, UsageError


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
    weights = parse_which(which)
    num = parse_count("--episodes", episodes) or 1
    with without_collection():
        from qfleet.api import load
    from qfleet.watch import find_run

    path = find_run(run, out)
    with echo_warnings():
        loaded = load(path, which=weights, trust_env=trust_env)
        name = weights if loaded.weights is None else loaded.weights.which
        film = loaded.record(Path(file) if file is not None else path / "videos" / f"{name}.mp4", episodes=num)
    echo(weights_text(loaded), to_stderr=True)
    echo(str(film))
    return 0


def plot(
    *runs: Annotated[str, Parameter(name="RUN", help="One or more runs or groups, drawn over each other.")],
    file: Annotated[
        str | None, Parameter(help="Picture file; plot.png in the run, the group or OUT otherwise.", metavar="FILE")
    ] = None,
    out: Out = "runs",
) -> int:
    """Draw return with its interval, loss and speed as a PNG."""
    if not runs:
        raise UsageError("qfleet plot needs RUN", "The argument RUN is missing.", "Try: qfleet plot latest")
    from qfleet.watch.plot import plot_runs
    from qfleet.watch.run_directory import find_run_or_group

    entries = [find_run_or_group(run, out) for run in runs]
    target = Path(file) if file is not None else (entries[0] if len(entries) == 1 else Path(out)) / "plot.png"
    echo(str(plot_runs([path for entry in entries for path in _runs_with_rows(entry)], target)))
    return 0


def _runs_with_rows(entry: Path) -> list[Path]:
    """The run itself, or those members of a group that have written a row."""
    from qfleet.watch import read_rows
    from qfleet.watch.run_directory import is_group, runs_in

    if not is_group(entry):
        return [entry]
    found = [path for path in runs_in(entry) if read_rows(path / "metrics.jsonl")]
    if not found:
        raise UsageError(
            f"the group {entry} has nothing to plot yet",
            "None of its runs has written a row.",
            f"Let it train: qfleet resume {entry}",
        )
    return found


def verify(run: GroupName, /, *, out: Out = "runs") -> int:
    """Check every file of every checkpoint against its recorded size and hash; changes nothing."""
    from qfleet.watch.run_directory import find_run_or_group, runs_in

    entry = find_run_or_group(run, out)
    paths = runs_in(entry)
    if not paths:
        raise NoCheckpointError(f"{entry} has no checkpoint", "None of its runs has begun.", f"qfleet resume {entry}")
    errors = [error for path in paths if (error := _verify_run(path, alone=paths == [entry])) is not None]
    if errors:
        raise _worst(errors, len(paths))
    return 0


def _verify_run(path: Path, *, alone: bool) -> QfleetError | None:
    """Check and print the checkpoints of one run; returns the error, if any."""
    from qfleet.save import verify_run

    found = [(name, "ok" if ok else "damaged", detail) for name, ok, detail in verify_run(path)]
    if not alone:
        echo(f"{path}")
    if not found:
        return NoCheckpointError(f"{path} has no checkpoint", "None was written yet.", "Let it train for longer.")
    echo_table(found, ("checkpoint", "state", "detail"))
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
    """A single error as it is; several merged into one, with the highest exit code."""
    if num == 1 or len(errors) == 1:
        return errors[0]
    worst = max(errors, key=lambda error: error.exit_code)
    return type(worst)(f"{len(errors)} of {num} runs fail", "\n".join(error.what for error in errors), worst.fix)
