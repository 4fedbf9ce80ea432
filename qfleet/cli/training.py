"""`qfleet train` and `qfleet resume`."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qfleet.cli.plans import origin_rows
from qfleet.cli.say import invocation, say, say_columns, say_json, size
from qfleet.cli.words import compose_words, refuse_both, whole
from qfleet.plan import Composed, flatten, total_updates, updates_per_step
from qfleet.plan.check import COMMAND_LINE
from qfleet.plan.draft import show

if TYPE_CHECKING:
    from qfleet.run import Run

Words = Annotated[
    str, Parameter(name="ENV", help="Environment id, then any settings path=value (see: qfleet plan show ENV).")
]
Preset = Annotated[str | None, Parameter(help="Named preset over the environment's defaults (see: qfleet presets).")]
PlanFile = Annotated[str | None, Parameter(help="Plan file (TOML); the command line wins over it.")]
Out = Annotated[str, Parameter(help="Folder that holds the run folders.")]
Json = Annotated[bool, Parameter(help="Print every row as a JSON line.", show_default=False)]
Quiet = Annotated[bool, Parameter(help="Print only how it ended.", show_default=False)]
TrustEnv = Annotated[
    bool, Parameter(help="Run the environment code this run names, though another user made it.", show_default=False)
]
RunName = Annotated[str, Parameter(name="RUN", help="Run folder, name, unique beginning of a name, or latest.")]


def train(
    *words: Words,
    preset: Preset = None,
    steps: Annotated[str | None, Parameter(help="Environment steps to train for (until.steps).")] = None,
    seed: Annotated[str | None, Parameter(help="Decides everything random (seed).")] = None,
    plan: PlanFile = None,
    out: Out = "runs",
    name: Annotated[str | None, Parameter(help="Name of the run folder; chosen for you otherwise.")] = None,
    from_: Annotated[str | None, Parameter(name="--from", help="Start from the weights of this run.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    dry_run: Annotated[
        bool, Parameter(help="Print the plan and what it needs, and run nothing.", show_default=False)
    ] = False,
) -> int:
    """Train an agent. Ctrl-C saves and leaves; `qfleet resume latest` goes on."""
    refuse_both(json, quiet)
    composed = compose_words(words, preset, plan, {"until.steps": steps, "seed": seed})
    if dry_run:
        return _show_only(composed, json)
    _introduce(composed, json, quiet)
    from qfleet.run import train as start
    from qfleet.watch import auto_mode, find_run, make_watcher

    run = start(
        composed.plan,
        out=out,
        name=name,
        watcher=make_watcher(auto_mode(sys.stdout, json, quiet), sys.stdout),
        weights_from=None if from_ is None else find_run(from_, out),
        command=["qfleet", *invocation.get()],
    )
    return _farewell(run, json, quiet)


def resume(
    run: RunName,
    /,
    *,
    steps: Annotated[str | None, Parameter(help="Train on until this many environment steps in all.")] = None,
    out: Out = "runs",
    strict: Annotated[
        bool, Parameter(help="Refuse a damaged newest checkpoint instead of using an older one.", show_default=False)
    ] = False,
    trust_env: TrustEnv = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Go on with a run exactly where its last checkpoint stands."""
    refuse_both(json, quiet)
    until = whole("--steps", steps)
    from qfleet.run import resume as start
    from qfleet.watch import auto_mode, find_run, make_watcher

    path = find_run(run, out)
    watcher = make_watcher(auto_mode(sys.stdout, json, quiet), sys.stdout)
    return _farewell(start(path, steps=until, watcher=watcher, trust_env=trust_env, strict=strict), json, quiet)


def summary(composed: Composed) -> str:
    """One line that says which layers the plan is made of."""
    plan, own = composed.plan, [path for path, origin in composed.origins.items() if origin == COMMAND_LINE]
    parts = [f"preset {composed.preset}"] if composed.preset else []
    parts += [composed.file] if composed.file else []
    parts += [f"{path}={show(flatten(plan)[path])}" for path in own if path != "env.id"]
    tuned = f"general defaults (none tuned for {plan.env.id})" if composed.defaults == "general" else ""
    return f"{plan.env.id}: " + ", ".join([tuned or f"{composed.defaults} defaults", *parts])


def _introduce(composed: Composed, json: bool, quiet: bool) -> None:
    if quiet:
        return
    say(summary(composed), to_stderr=json)
    for note in composed.notes:
        say(f"note: {note}", to_stderr=json)


def _farewell(run: "Run", json: bool, quiet: bool) -> int:
    if not quiet:
        from qfleet.watch import program

        where = shlex.quote(str(run.path))
        say(f"run    {Path(run.path)}", to_stderr=json)
        say(f"next   {program()} plot {where}", to_stderr=json)
        if run.exit_code == 0:
            say(f"       {program()} eval {where}", to_stderr=json)
    return int(run.exit_code)


def _show_only(composed: Composed, json: bool) -> int:
    from qfleet.run import estimate

    needs = estimate(composed.plan)
    if needs["replay_bytes"] > needs["available_bytes"]:
        say("note: the replay does not fit into this machine's memory", to_stderr=True)
    if json:
        rows = [{"path": path, "value": value, "origin": origin} for path, value, origin in origin_rows(composed)]
        say_json({"plan": rows, "notes": composed.notes, "needs": needs})
        return 0
    say(summary(composed) + "\n")
    say_columns((path, show(value), origin) for path, value, origin in origin_rows(composed))
    say()
    ratio = updates_per_step(composed.plan)
    pace = f"{ratio:g} per step" if ratio >= 1 else f"one per {1 / ratio:g} steps"
    say_columns(
        [("updates", f"at most {total_updates(composed.plan)}, {pace}")]
        + [(key.removesuffix("_bytes"), size(value)) for key, value in needs.items() if key.endswith("_bytes")]
    )
    for note in composed.notes:
        say(f"note: {note}")
    say("\nNothing was run: --dry-run.")
    return 0
