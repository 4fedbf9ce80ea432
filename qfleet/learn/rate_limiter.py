"""The rate limiter keeps the ratio of updates to environment steps, as one global count."""

from fractions import Fraction

from qfleet.data import State
from qfleet.data.state_reader import saved_count


class RateLimiter:
    """Allows an update while fewer than floor(ratio x steps past the start) were made."""

    def __init__(self, ratio: Fraction, start_steps: int) -> None:
        self.ratio = ratio  # exact: a float would be off by one update after many steps
        self.start_steps = start_steps
        self.updates = 0
        # Updates that were allowed but will never be made. Negative in an actor-learner that started late: the updates
        # that others had made by then.
        self.forgiven = 0

    def allowed_updates(self, steps: int) -> int:
        """The total number of updates allowed after this number of steps."""
        return self.ratio.numerator * max(0, steps - self.start_steps) // self.ratio.denominator

    def can_update(self, steps: int) -> bool:
        """Whether one more update is allowed."""
        return self.updates + self.forgiven < self.allowed_updates(steps)

    def forgive(self, steps: int) -> None:
        """Drop the updates that are outstanding: the experience they were meant for is lost."""
        self.forgiven = max(0, self.allowed_updates(steps) - self.updates)

    def count_update(self) -> None:
        """Count one update."""
        self.updates += 1

    def state_dict(self) -> State:
        """The counts."""
        return {"updates": self.updates, "forgiven": self.forgiven}

    def load_state_dict(self, state: State) -> None:
        """Restore the counts."""
        self.updates = saved_count(state, "updates")
        self.forgiven = saved_count(state, "forgiven", low=-self.updates)
