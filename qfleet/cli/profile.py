"""`--profile`: where a run's time went, printed and saved when it has ended."""

from typing import TYPE_CHECKING

from qfleet.cli.output import echo
from qfleet.errors import UsageError

if TYPE_CHECKING:
    from qfleet.api import Run
    from qfleet.plan import Plan
    from qfleet.watch.trace import Trace


def refuse_profile(profile: bool, why: str) -> None:
    """Raise if a profile of several runs is requested."""
    if profile:
        raise UsageError("--profile needs a single run", why, "Leave --profile out, or train one run with it.")


def make_traces(profile: bool, plan: "Plan") -> "list[Trace]":
    """The callback that profiles functions, if requested; none on Ray, where another process trains."""
    from qfleet.watch.trace import Trace

    return [Trace()] if profile and plan.runtime.__struct_config__.tag != "ray" else []


def save_profile(run: "Run", traces: "list[Trace]", *, json: bool, quiet: bool) -> None:
    """Print the profile, and write it and the profiled functions into the run's folder."""
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
        echo(line, to_stderr=json)
