"""A plan under judgement: what every rule of `check.py` and `places.py` is shown."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from qfleet.plan import paths
from qfleet.plan.draft import DEFAULT, show
from qfleet.plan.schema import BufferReplay, Plan

COMMAND_LINE = "command line"
PYTHON = "Python"
SCHEDULE = "learners.schedule"  # where settings come from that a plan switches to

Problem: TypeAlias = tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class Case:
    """A plan under judgement, and where its values came from."""

    plan: Plan
    origins: Mapping[str, str]

    def named(self, path: str) -> str:
        """The setting with its value and origin, for messages."""
        return f"{path}={show(paths.flatten(self.plan).get(path))} ({self.origins.get(path, DEFAULT)})"

    @property
    def buffer(self) -> BufferReplay | None:
        """The replay, unless the plan learns from fresh experience only."""
        return self.plan.replay if isinstance(self.plan.replay, BufferReplay) else None

    def asked_now(self, path: str) -> bool:
        """Whether this very command asked for it."""
        return self.origins.get(path) in (COMMAND_LINE, PYTHON, SCHEDULE)


Rule: TypeAlias = Callable[[Case], Problem]
