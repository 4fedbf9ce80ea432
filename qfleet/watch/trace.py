"""Profile Python functions during a few hundred updates after learning began."""

import cProfile
import io
import pstats
from collections.abc import Mapping
from typing import Any

WINDOW_UPDATES = 300
TOP = 15


class Trace:
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
