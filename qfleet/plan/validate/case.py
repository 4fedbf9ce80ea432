"""The argument of every rule in `rules.py` and `placement.py`: a plan with the origins of its values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from qfleet.plan import paths
from qfleet.plan.draft import DEFAULT
from qfleet.plan.schema import BufferReplay, Plan
from qfleet.plan.setting_text import format_value

COMMAND_LINE = "command line"
PYTHON = "Python"
SCHEDULE = "learners.schedule"  # the origin of settings that a plan switches to

Problems: TypeAlias = Iterator[tuple[str, str]]  # what is wrong, and its fix


@dataclass(frozen=True, slots=True)
class Case:
    """A plan being checked, and the origins of its values."""

    plan: Plan
    origins: Mapping[str, str]

    def named(self, path: str) -> str:
        """The setting with its value and origin, for messages."""
        return f"{path}={format_value(paths.flatten(self.plan).get(path))} ({self.origins.get(path, DEFAULT)})"

    @property
    def buffer(self) -> BufferReplay | None:
        """The replay buffer, or None if the plan learns from fresh experience only."""
        return self.plan.replay if isinstance(self.plan.replay, BufferReplay) else None

    def set_by_user(self, path: str) -> bool:
        """Did the user set it for this run, rather than a file, preset or default?"""
        return self.origins.get(path) in (COMMAND_LINE, PYTHON, SCHEDULE)


Rule: TypeAlias = Callable[[Case], Problems]
