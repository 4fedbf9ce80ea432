"""`--profile`: where a run's time went, printed and saved when it has ended."""

import cProfile
import io
import pstats
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qfleet.cli.output import echo
from qfleet.errors import UsageError
from qfleet.plan import Plan
from qfleet.plan.schema import RayRuntime

if TYPE_CHECKING:
    from qfleet.api import Run

WINDOW_UPDATES = 300
TOP = 15


def refuse_profile(profile: bool, why: str) -> None:
    """Raise if a profile of several runs is requested."""
    if profile:
        raise UsageError("--profile needs a single run", why, "Leave --profile out, or train one run with it.")


def make_profilers(plan: Plan) -> "list[FunctionProfiler]":
    """The callback that profiles functions; none on Ray, where another process trains."""
    return [] if isinstance(plan.runtime, RayRuntime) else [FunctionProfiler()]


def save_profile(run: "Run", profilers: "list[FunctionProfiler]", *, json: bool, quiet: bool) -> None:
    """Print the profile, and write it and the profiled functions into the run's folder."""
    from qfleet.watch import write_file, write_json
    from qfleet.watch.bottleneck import profile_lines

    profile = run.status["profile"]
    functions = run.path / "profile.txt"
    write_json(run.path / "profile.json", profile)
    lines = profile_lines(profile)
    for profiler in profilers:
        write_file(functions, profiler.text().encode())
        lines.append(f"functions  {functions}")
    for line in [] if quiet else lines:
        echo(line, to_stderr=json)


class FunctionProfiler:
    """A row callback: profiles from the first row with updates to the first row that is `window` updates later."""

    def __init__(self, window: int = WINDOW_UPDATES) -> None:
        self.window = window
        self.first = 0
        self.last = 0
        self.profiler: cProfile.Profile | None = None
        self.running = False
        self.refused = False

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Start or stop profiling at this row."""
        updates = int(row.get("updates") or 0)
        if self.running:
            self.last = updates
            if updates - self.first >= self.window or row.get("kind") == "end":
                self.close()
        elif self.profiler is None and updates and row.get("kind") == "progress":
            self.begin(updates)

    def begin(self, updates: int) -> None:
        """Start profiling, unless another profiler is active."""
        self.profiler = cProfile.Profile()
        self.first = updates
        self.last = updates
        try:
            self.profiler.enable()
            self.running = True
        except ValueError:  # only one profiler can be active
            self.refused = True

    def close(self) -> None:
        """Stop profiling."""
        if self.running and self.profiler is not None:
            self.profiler.disable()
        self.running = False

    def text(self) -> str:
        """The functions that took the most time themselves."""
        if self.profiler is None or self.refused or self.last == self.first:
            why = "another profiler was active" if self.refused else "too few updates were made after the first row"
            return f"No functions were profiled: {why}.\n"
        out = io.StringIO()
        pstats.Stats(self.profiler, stream=out).strip_dirs().sort_stats("tottime").print_stats(TOP)
        head = f"The {TOP} functions that took the most time themselves, in updates {self.first} to {self.last}.\n"
        return f"{head}The profiler slows Python down, native code hardly.\n{out.getvalue()}"
