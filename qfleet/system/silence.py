"""How long something has been silent, as seen by an observer that may have been stopped itself."""

MAX_GAP_SECONDS = 2.0  # if more time passes between two looks, only this much of it counts


class SilenceTimer:
    """Seconds since the last sign of life. An observer that was stopped must not find all that it observes hung."""

    __slots__ = ("looked_at", "seconds")

    def __init__(self, now: float) -> None:
        self.reset(now)

    def reset(self, now: float) -> None:
        """Record a sign of life."""
        self.looked_at = now
        self.seconds = 0.0  # as of the last look

    def elapsed(self, now: float) -> float:
        """Look: seconds since the last sign of life."""
        self.seconds += min(now - self.looked_at, MAX_GAP_SECONDS)
        self.looked_at = now
        return self.seconds
