"""The gate keeps the ratio of updates to environment steps, as one global count."""

from fractions import Fraction

from qfleet.data import State
from qfleet.data.state_reader import saved_count


class RateLimiter:
    """Open while fewer than floor(ratio x steps past the start) updates were made."""

    def __init__(self, ratio: Fraction, start_steps: int) -> None:
        self.ratio = ratio  # exact: a float would be off by one update after many steps
        self.start_steps = start_steps
        self.updates = 0
        self.forgiven = 0  # updates that will never be made up for

    def allowed(self, steps: int) -> int:
        """How many updates so many steps allow in all."""
        return self.ratio.numerator * max(0, steps - self.start_steps) // self.ratio.denominator

    def is_open(self, steps: int) -> bool:
        """May one more update be made?"""
        return self.updates + self.forgiven < self.allowed(steps)

    def forgive(self, steps: int) -> None:
        """Forget the updates owed up to here: what they would have learned from is gone."""
        self.forgiven = max(0, self.allowed(steps) - self.updates)

    def passed(self) -> None:
        """One update was made."""
        self.updates += 1

    def state_dict(self) -> State:
        """The counts."""
        return {"updates": self.updates, "forgiven": self.forgiven}

    def load_state_dict(self, state: State) -> None:
        """Take the counts back."""
        self.updates = saved_count(state, "updates")
        self.forgiven = saved_count(state, "forgiven")
