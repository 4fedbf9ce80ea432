"""A number with its interval, or the reason why there is none."""

from dataclasses import asdict, dataclass, field
from typing import Any

MIN_EPISODES = 20  # with fewer an interval over episodes says little


@dataclass(frozen=True, slots=True)
class DataEstimate:
    """A number, the 95 % interval over episodes, and what it rests on. A refused one has a reason and no number."""

    value: float | None
    low: float | None = None
    high: float | None = None
    refused: str = ""
    support: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def refuse(reason: str, support: dict[str, float] | None = None) -> DataEstimate:
    """No number, and why."""
    return DataEstimate(None, refused=reason, support=support or {})


def too_few(num: int, what: str = "episodes", least: int = MIN_EPISODES) -> str:
    """Why a number from so few is refused; empty if they are enough."""
    return f"it needs {least} {what}, and there are {num}" if num < least else ""
