"""How often a failing component may be restarted, and when. A state machine: `now` is passed in."""

from collections import deque


class RestartBudget:
    """At most `limit` faults within `window_seconds`; the delay doubles with each consecutive fault."""

    def __init__(
        self, limit: int, window_seconds: float = 600.0, *, first_delay: float = 0.1, largest_delay: float = 10.0
    ) -> None:
        self.limit = limit
        self.window_seconds = window_seconds
        self.first_delay = first_delay
        self.largest_delay = largest_delay
        self.retry_at = float("-inf")
        self.exhausted = False  # permanently
        self.faults: deque[float] = deque()  # times of the faults within the window
        self._consecutive_faults = 0

    def charge(self, now: float) -> bool:
        """Count a fault; False if another restart would exceed the limit, now and from then on."""
        self.faults.append(now)
        while self.faults[0] <= now - self.window_seconds:
            self.faults.popleft()
        self.exhausted = self.exhausted or len(self.faults) > self.limit
        self._consecutive_faults += 1
        doublings = min(self._consecutive_faults - 1, 60)  # more would overflow a float
        self.retry_at = now + min(self.largest_delay, self.first_delay * 2.0**doublings)
        return not self.exhausted

    def reset_backoff(self) -> None:
        """Restore the first delay, because the component works again."""
        self._consecutive_faults = 0
