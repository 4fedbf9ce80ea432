"""`qfleet train` and `qfleet resume`."""

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from qfleet.cli.arguments import PlanArguments, PlanFile, Preset, compose_arguments, parse_count, refuse_json_with_quiet
from qfleet.cli.entry import needs_restarts, run_env_code, trains_in_fork, without_collection
from qfleet.cli.output import echo, invocation
from qfleet.cli.plan import print_dry_run, summary
from qfleet.errors import UsageError
from qfleet.plan import Composed, read_plan
from qfleet.plan.local_paths import local_path
from qfleet.plan.naming import algorithm_name
from qfleet.plan.schema import Plan

if TYPE_CHECKING:
    from qfleet.cli.profile import FunctionProfiler
    from qfleet.run_object import Run
    from qfleet.sweep.sweep import Group


Out = Annotated[str, Parameter(help="Folder that holds the run folders.", validator=lambda _, value: local_path(value))]
Json = Annotated[bool, Parameter(help="Print every row as a JSON line.", show_default=False)]
Quiet = Annotated[bool, Parameter(help="Print only how it ended.", show_default=False)]
Profile = Annotated[
    bool, Parameter(help="Print where the time went, and save it as profile.json and profile.txt.", show_default=False)
]
TrustEnv = Annotated[
    bool, Parameter(help="Run the environment code this run names, though another user made it.", show_default=False)
]
TrustRun = Annotated[
    bool,
    Parameter(
        help="Connect to the address in this run, and run the code it names, though another user made it.",
        show_default=False,
    ),
]
Jobs = Annotated[
    str | None, Parameter(help="Members of a group to run at once; as many as fit otherwise.", metavar="N")
]
RunName = Annotated[str, Parameter(name="RUN", help="Run folder, name, unique beginning of a name, or latest.")]
GroupName = Annotated[
    str, Parameter(name="RUN", help="Run or group: its folder, name, unique beginning of a name, or latest.")
]


def train(
    *arguments: PlanArguments,
    preset: Preset = None,
    steps: Annotated[str | None, Parameter(help="Environment steps to train for (until.steps).", metavar="N")] = None,
    seed: Annotated[str | None, Parameter(help="Decides everything random (seed).", metavar="N")] = None,
    seeds: Annotated[
        str | None, Parameter(help="Train this many seeds in parallel, counted from --seed: a group.", metavar="N")
    ] = None,
    jobs: Jobs = None,
    plan: PlanFile = None,
    out: Out = "runs",
    name: Annotated[
        str | None, Parameter(help="Name of the run folder, NAME-# for the next free number; chosen for you otherwise.")
    ] = None,
    from_: Annotated[str | None, Parameter(name="--from", help="Start from the weights of this run.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    profile: Profile = False,
    dry_run: Annotated[
        bool, Parameter(help="Print the plan and its memory needs, and run nothing.", show_default=False)
    ] = False,
) -> int:
    """Train an agent. Ctrl-C saves and leaves; `qfleet resume latest` goes on."""
    refuse_json_with_quiet(json, quiet)
    num, at_once = _group_size(seeds, jobs)
    composed = compose_arguments(arguments, preset, plan, {"until.steps": steps, "seed": seed})
    if dry_run:
        return run_env_code(lambda: print_dry_run(composed, json, num, at_once, out=out, name=name, weights_from=from_))
    if num is not None:
        _refuse_profile(profile, f"--seeds {num} trains several.")
    elif needs_restarts(composed.plan):
        return _run_with_restarts(out, out, {"json": json, "quiet": quiet, "profile": profile})
    _print_summary(composed, json, quiet)
    if num is not None:
        return run_env_code(lambda: _train_group(composed, num, at_once, out, name, from_, json=json, quiet=quiet))
    run = partial(_train_run, composed, out, name, from_, json=json, quiet=quiet, profile=profile)
    return run_env_code(run) if trains_in_fork(composed.plan) else run()


def _run_with_restarts(folder: str, out: str, flags: dict[str, bool]) -> int:
    """Run this command in a child; a run in `folder` whose process is killed is resumed with the same flags."""
    from qfleet.cli.guard import run_with_restarts

    options = ["--out", out, *(f"--{name.replace('_', '-')}" for name, on in flags.items() if on)]
    return run_with_restarts(
        invocation.get(), folder, lambda run: ["resume", str(run), *options], to_stderr=flags["json"]
    )


def _train_run(
    composed: Composed, out: str, name: str | None, from_: str | None, *, json: bool, quiet: bool, profile: bool
) -> int:
    with without_collection():
        from qfleet.api import train as start
        from qfleet.replay.numba_library import load_numba_library
        from qfleet.watch import auto_mode, find_run, make_watcher

        load_numba_library()

    profilers = _profilers(composed.plan, profile)
    run = start(
        composed.plan,
        out=out,
        name=_name(composed, name),
        watcher=make_watcher(auto_mode(sys.stdout, json, quiet), sys.stdout),
        weights_from=None if from_ is None else find_run(from_, out),
        command=["qfleet", *invocation.get()],
        callbacks=profilers or (),
    )
    return _print_next_commands(run, json, quiet, profilers)


def _profilers(plan: Plan, profile: bool) -> "list[FunctionProfiler] | None":
    """The callbacks of `--profile`; None without it."""
    if not profile:
        return None
    from qfleet.cli.profile import make_profilers

    return make_profilers(plan)


def _name(composed: Composed, name: str | None) -> str:
    """The given name, or one made of the environment and the algorithm."""
    from qfleet.watch.new_run_dir import next_name

    plan = composed.plan
    return name if name is not None else next_name(plan.env.id, algorithm_name(plan, composed.preset))


def resume(
    run: GroupName,
    /,
    *,
    steps: Annotated[
        str | None, Parameter(help="Train on until this many environment steps in all.", metavar="N")
    ] = None,
    out: Out = "runs",
    strict: Annotated[
        bool, Parameter(help="Refuse a damaged newest checkpoint instead of using an older one.", show_default=False)
    ] = False,
    trust_env: TrustEnv = False,
    trust_run: TrustRun = False,
    jobs: Jobs = None,
    json: Json = False,
    quiet: Quiet = False,
    profile: Profile = False,
) -> int:
    """Go on with a run exactly where its last checkpoint stands, or with the members of a group that have not ended."""
    refuse_json_with_quiet(json, quiet)
    until = parse_count("--steps", steps)
    at_once = parse_count("--jobs", jobs, example=2)
    from qfleet.watch.run_directory import find_run_or_group, is_group

    path = find_run_or_group(run, out)
    flags = {"json": json, "quiet": quiet, "strict": strict, "trust_env": trust_env, "trust_run": trust_run}
    if is_group(path):
        _refuse_profile(profile, f"{path} is a group of several.")
        return run_env_code(partial(_resume_group, path, until, at_once, **flags))
    _refuse_jobs(at_once, f"{path} is one run.")
    flags["profile"] = profile
    plan = read_plan(path / "run.toml")
    if needs_restarts(plan):
        return _run_with_restarts(str(path.parent), out, flags)
    work = partial(_resume_run, path, plan, until, **flags)
    return run_env_code(work) if trains_in_fork(plan) else work()


def _resume_run(
    path: Path, plan: Plan, until: int | None, *, json: bool, quiet: bool, profile: bool, **checks: Any
) -> int:
    with without_collection():
        from qfleet.api import resume as start
        from qfleet.replay.numba_library import load_numba_library
        from qfleet.watch import auto_mode, make_watcher

        load_numba_library()

    watcher = make_watcher(auto_mode(sys.stdout, json, quiet), sys.stdout)
    profilers = _profilers(plan, profile)
    run = start(path, steps=until, watcher=watcher, callbacks=profilers or (), **checks)
    return _print_next_commands(run, json, quiet, profilers)


# --- groups ---


def _group_size(seeds: str | None, jobs: str | None) -> tuple[int | None, int | None]:
    """How many members to train, and how many at once."""
    num = parse_count("--seeds", seeds, example=5)
    at_once = parse_count("--jobs", jobs, example=2)
    if num is None:
        _refuse_jobs(at_once, "Without --seeds there is one run.")
    return num, at_once


def _refuse_jobs(jobs: int | None, why: str) -> None:
    if jobs is not None:
        raise UsageError(f"--jobs {jobs} has no effect", why, "Leave --jobs out, or train a group: --seeds 5")


def _refuse_profile(profile: bool, why: str) -> None:
    if profile:
        raise UsageError("--profile needs a single run", why, "Leave --profile out, or train one run with it.")


def _train_group(
    composed: Composed,
    num: int,
    jobs: int | None,
    out: str,
    name: str | None,
    from_: str | None,
    *,
    json: bool,
    quiet: bool,
) -> int:
    from qfleet.sweep.sweep import train_group
    from qfleet.watch import auto_mode
    from qfleet.watch.sweep_console import make_group_watcher

    group = train_group(
        composed.plan,
        num,
        jobs=jobs,
        out=out,
        name=_name(composed, name),
        weights_from=from_,
        watcher=make_group_watcher(auto_mode(sys.stdout, json, quiet), sys.stdout),
        command=["qfleet", *invocation.get()],
    )
    return _report_group(group, json, quiet)


def _resume_group(path: Path, steps: int | None, jobs: int | None, *, json: bool, quiet: bool, **checks: Any) -> int:
    from qfleet.sweep.sweep import resume_group
    from qfleet.watch import auto_mode
    from qfleet.watch.sweep_console import make_group_watcher

    watcher = make_group_watcher(auto_mode(sys.stdout, json, quiet), sys.stdout)
    group = resume_group(path, steps=steps, jobs=jobs, watcher=watcher, **checks)
    return _report_group(group, json, quiet)


def _report_group(group: "Group", json: bool, quiet: bool) -> int:
    """Print the table of a group that has ended, its state, and the next command; returns its exit code."""
    from qfleet.cli.compare import report
    from qfleet.watch import program

    report(group.path, json=json, quiet=quiet)
    if not quiet:
        status = group.status
        where = shlex.quote(str(group.path))
        echo(f"group  {group.path}: {status['reason']}", to_stderr=json)
        next_ = status["resume"] if group.exit_code else f"{program()} compare {where} OTHER"
        echo(f"next   {next_}", to_stderr=json)
    return group.exit_code


def _print_summary(composed: Composed, json: bool, quiet: bool) -> None:
    if quiet or _is_later_mpi_rank(composed):
        return
    echo(summary(composed), to_stderr=json)
    for note in composed.notes:
        echo(f"note: {note}", to_stderr=json)


def _is_later_mpi_rank(composed: Composed) -> bool:
    """Is this an MPI process other than rank 0, which alone prints?"""
    if composed.plan.learners.backend != "mpi":
        return False
    from qfleet.distributed.mpi import is_driver_rank

    return not is_driver_rank(composed.plan)


def _print_next_commands(run: "Run", json: bool, quiet: bool, profilers: "list[FunctionProfiler] | None") -> int:
    if profilers is not None:
        from qfleet.cli.profile import save_profile

        save_profile(run, profilers, json=json, quiet=quiet)
    if not quiet:
        from qfleet.watch import program

        where = shlex.quote(str(run.path))
        echo(f"run    {Path(run.path)}", to_stderr=json)
        echo(f"next   {program()} plot {where}", to_stderr=json)
        if run.exit_code == 0:
            echo(f"       {program()} eval {where}", to_stderr=json)
    return int(run.exit_code)
