"""`--profile`: where a run's time went, printed and saved when it has ended."""

import cProfile
import io
import pstats
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qfleet.cli.output import echo
from qfleet.plan import Plan
from qfleet.plan.schema import RayRuntime
from qfleet.watch import write_file, write_json
from qfleet.watch.text import compression_lines, number

if TYPE_CHECKING:
    from qfleet.run_object import Run

TOP = 15


def make_profilers(plan: Plan) -> "list[FunctionProfiler]":
    """The callback that profiles functions; none on Ray, where another process trains."""
    return [] if isinstance(plan.runtime, RayRuntime) else [FunctionProfiler()]


def save_profile(run: "Run", profilers: "list[FunctionProfiler]", *, json: bool, quiet: bool) -> None:
    """Print the profile, and write it and the profiled functions into the run's folder."""
    profile = run.status["profile"]
    functions = run.path / "profile.txt"
    write_json(run.path / "profile.json", profile)
    lines = profile_lines(profile)
    for profiler in profilers:
        write_file(functions, profiler.text().encode())
        lines.append(f"functions  {functions}")
    for line in [] if quiet else lines:
        echo(line, to_stderr=json)


def profile_lines(profile: Mapping[str, Any]) -> list[str]:
    """The table of stages as lines: seconds, share of the time, cost per step and per update."""
    steps = profile["env_steps"]
    updates = profile["updates"]
    lines = [f"{'stage':<8}{'seconds':>10}{'share':>8}{'per step':>12}{'per update':>12}"]
    for stage, seconds in [*profile["seconds"].items(), ("wall", profile["wall_seconds"])]:
        share = seconds / max(profile["wall_seconds"], 1e-9)
        lines.append(f"{stage:<8}{seconds:>10.2f}{share:>8.1%}{_each(seconds, steps):>12}{_each(seconds, updates):>12}")
    if "actors" in profile:
        parts = ", ".join(f"{stage} {share:.0%}" for stage, share in profile["actor_shares"].items())
        lines += [f"actors: {parts}", parallel_line(profile)]
    lines += [f"compressed {text}" for text in compression_lines(profile)]
    return [*lines, energy_line(profile), f"{profile['bottleneck']}-bound: {profile['advice']}"]


def parallel_line(profile: Mapping[str, Any]) -> str:
    """The speed-up from running learner and actors in parallel."""
    work = profile["work_seconds"]
    wall = profile["wall_seconds"]
    return (
        f"speed-up {profile['speed_up']:.2f}x: {work:.2f} s of sequential work in {wall:.2f} s; "
        f"parallel efficiency {profile['parallel_efficiency']:.0%}, with {profile['processes']} processes"
    )


def energy_line(profile: Mapping[str, Any]) -> str:
    """Energy of the processors, all programs of the machine included."""
    if "joules" not in profile:
        return "no energy counters"
    per_million = number(profile["joules_per_million_steps"])
    return f"energy {number(profile['joules'])} J, {per_million} J per million steps, the whole machine's"


def _each(seconds: float, count: int) -> str:
    if not count:
        return "-"
    micro = seconds / count * 1e6
    return f"{micro:.1f} us" if micro < 1000 else f"{micro / 1000:.2f} ms"


@dataclass(eq=False)
class FunctionProfiler:
    """A row callback: profiles from the first row with updates to the first row that is `window` updates later."""

    window: int = 300  # updates
    first: int = 0
    last: int = 0
    profiler: cProfile.Profile | None = None
    running: bool = False
    refused: bool = False

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
