"""`--profile`: what a run tells of its time when it has ended."""

from typing import TYPE_CHECKING

from qfleet.cli.say import say
from qfleet.errors import UsageError

if TYPE_CHECKING:
    from qfleet.plan import Plan
    from qfleet.run import Run
    from qfleet.watch.trace import Trace


def refuse_profile(asked: bool, why: str) -> None:
    """One run has a profile, a group has none."""
    if asked:
        raise UsageError("--profile looks at one run", why, "Leave --profile out, or train one run with it.")


def refuse_far_profile(asked: bool, plan: "Plan") -> None:
    """Functions are looked at in this process, which on Ray only watches."""
    if asked and plan.runtime.__struct_config__.tag == "ray":
        raise UsageError(
            "--profile does not see runtime.type=ray",
            "It looks at the functions of this process, and the run is in others.",
            "Leave it out (the summary says where the time goes), or profile with runtime.type=processes.",
        )


def make_traces(asked: bool) -> "list[Trace]":
    """The callback that looks at functions, if somebody wants to see them."""
    from qfleet.watch.trace import Trace

    return [Trace()] if asked else []


def keep_profile(run: "Run", trace: "Trace", *, json: bool, quiet: bool) -> None:
    """The table to the screen, and all of it into the run's folder."""
    from qfleet.watch import write_file, write_json
    from qfleet.watch.profile import profile_lines

    profile = run.status["profile"]
    write_json(run.path / "profile.json", profile)
    write_file(run.path / "profile.txt", trace.text().encode())
    if not quiet:
        for line in profile_lines(profile):
            say(line, to_stderr=json)
        say(f"functions  {run.path / 'profile.txt'}", to_stderr=json)
