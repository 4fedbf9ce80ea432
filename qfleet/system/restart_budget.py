"""How often a thing that fails may be tried again, and when. A state machine: `now` is passed in."""

from collections import deque


class RestartBudget:
    """At most `limit` faults within `window_seconds`; with each fault in a row the next attempt waits longer."""

    def __init__(
        self, limit: int, window_seconds: float = 600.0, *, first_delay: float = 0.1, largest_delay: float = 10.0
    ) -> None:
        self.limit = limit
        self.window_seconds = window_seconds
        self.first_delay = first_delay
        self.largest_delay = largest_delay
        self.ready_at = float("-inf")  # when it may be tried again
        self.spent = False  # for good
        self.faults: deque[float] = deque()  # when, within the window
        self._streak = 0

    def charge(self, now: float) -> bool:
        """Count a fault; may it be tried once more? Once the answer was no, it stays no."""
        self.faults.append(now)
        while self.faults[0] <= now - self.window_seconds:
            self.faults.popleft()
        self.spent = self.spent or len(self.faults) > self.limit
        self._streak += 1
        # No more doublings than a float can take.
        self.ready_at = now + min(self.largest_delay, self.first_delay * 2.0 ** min(self._streak - 1, 60))
        return not self.spent

    def settle(self) -> None:
        """It works again: the next fault is not one of the same row."""
        self._streak = 0
