"""How often a failing component may be restarted, and when. A state machine: `now` is passed in."""

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np  # commands that need nothing else of it do not import it


class RestartBudget:
    """At most `limit` faults within `window_seconds`; the delay doubles with each consecutive fault among them."""

    def __init__(
        self,
        limit: int,
        window_seconds: float = 600.0,
        *,
        first_delay: float = 0.1,
        largest_delay: float = 10.0,
        rng: "np.random.Generator | None" = None,  # shortens delays by up to half: not all shall start at once
    ) -> None:
        self.limit = limit
        self.window_seconds = window_seconds
        self.first_delay = first_delay
        self.largest_delay = largest_delay
        self.rng = rng
        self.delay_seconds = 0.0  # from the last fault to the next restart
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
        self._consecutive_faults = min(self._consecutive_faults + 1, len(self.faults))
        doublings = min(self._consecutive_faults - 1, 60)  # more would overflow a float
        self.delay_seconds = min(self.largest_delay, self.first_delay * 2.0**doublings)
        if self.rng is not None and not self.exhausted:
            self.delay_seconds *= 0.5 + 0.5 * self.rng.random()
        self.retry_at = now + self.delay_seconds
        return not self.exhausted

    def reset_backoff(self) -> None:
        """Restore the first delay, because the component works again."""
        self._consecutive_faults = 0
