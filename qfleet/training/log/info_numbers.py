"""Numbers that environments give in the `info` of an episode's last step (`log.info`): means, and what is wrong."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from qfleet.data import State

FIELD = "info."  # how their names begin in rows
RECENT = 100  # values that a mean in a progress row averages over
NEVER_EPISODES = 20  # after so many episodes without it a name is taken for a mistake


def info_means(names: Sequence[str], values: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """For each name the mean over those episodes that have a number of it; None if none has."""
    columns = zip(*values, strict=True) if values else [()] * len(names)
    found = [[value for value in column if math.isfinite(value)] for column in columns]
    return {f"{FIELD}{name}": mean_of(column) for name, column in zip(names, found, strict=True)}


def mean_of(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None


class InfoNumbers:
    """The newest values of each name in training episodes."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.recent: dict[str, list[float]] = {name: [] for name in names}
        self.episodes = 0  # seen by this process
        self.not_numbers: set[str] = set()

    def __eq__(self, other: object) -> bool:
        """Do both hold the same values?"""
        return isinstance(other, InfoNumbers) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def add(self, values: Sequence[float]) -> None:
        """Add the values of one episode: NaN where it has none, infinity where it has no number."""
        self.episodes += 1
        for (name, recent), value in zip(self.recent.items(), values, strict=False):
            if math.isfinite(value):
                recent.append(value)
                del recent[:-RECENT]
            elif not math.isnan(value):
                self.not_numbers.add(name)

    def means(self) -> dict[str, float | None]:
        """The fields of a progress row."""
        return {f"{FIELD}{name}": mean_of(values) for name, values in self.recent.items()}

    def problems(self, enough_episodes: int = NEVER_EPISODES) -> list[str]:
        """What the user should know: names whose values are no numbers, or that never appear."""
        found = [
            f"log.info: {info_text(name)} is not a finite number and is left out; "
            "it must be a bool, an int, a float or an array of one"
            for name in sorted(self.not_numbers)
        ]
        if self.episodes >= enough_episodes:
            missing = [name for name, values in self.recent.items() if not values and name not in self.not_numbers]
            found += [f"log.info: no episode so far had {info_text(name)} in its last step's info" for name in missing]
        return found

    def state_dict(self) -> State:
        """The newest values."""
        return {name: list(values) for name, values in self.recent.items()}

    def load_state_dict(self, state: Any) -> None:
        """Restore the values of names that are still asked for; others may have been added since."""
        saved = state if isinstance(state, dict) else {}
        for name in self.recent:
            self.recent[name] = [float(value) for value in saved.get(name, [])][-RECENT:]


def info_text(name: str) -> str:
    """How a user would write it."""
    return "info" + "".join(f'["{key}"]' for key in name.split("."))
