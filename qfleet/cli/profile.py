"""`--profile`: what a run tells of its time when it has ended."""

from typing import TYPE_CHECKING

from qfleet.cli.say import say
from qfleet.errors import UsageError

if TYPE_CHECKING:
    from qfleet.api import Run
    from qfleet.plan import Plan
    from qfleet.watch.trace import Trace


def refuse_profile(asked: bool, why: str) -> None:
    """One run has a profile, a group has none."""
    if asked:
        raise UsageError("--profile looks at one run", why, "Leave --profile out, or train one run with it.")


def make_traces(asked: bool, plan: "Plan") -> "list[Trace]":
    """The callback that looks at functions, if somebody wants to see them; on Ray this process only watches."""
    from qfleet.watch.trace import Trace

    return [Trace()] if asked and plan.runtime.__struct_config__.tag != "ray" else []


def keep_profile(run: "Run", traces: "list[Trace]", *, json: bool, quiet: bool) -> None:
    """The table to the screen, and all of it into the run's folder; functions too, if they were looked at."""
    from qfleet.watch import write_file, write_json
    from qfleet.watch.bottleneck import profile_lines

    profile = run.status["profile"]
    functions = run.path / "profile.txt"
    write_json(run.path / "profile.json", profile)
    lines = profile_lines(profile)
    for trace in traces:
        write_file(functions, trace.text().encode())
        lines.append(f"functions  {functions}")
    for line in [] if quiet else lines:
        say(line, to_stderr=json)
