"""Counts of the items that were drawn, for a row of metrics. Shapes: N items."""

from dataclasses import asdict, dataclass

from qfleet.data import Array, State
from qfleet.data.state_reader import saved_count


@dataclass
class DrawnItems:
    """Items drawn since the last metrics: their number, sum of serial numbers, and sum of the steps made by then."""

    items: int = 0
    serials: int = 0
    steps: int = 0
    recorded: int = 0  # items of a data set, which have no age

    def count(self, ids: Array, steps: int, first_own: int = 0) -> None:
        """Add one batch, of which the items before `first_own` are recorded."""
        own = ids[ids >= first_own]
        self.items += len(own)
        self.serials += int(own.sum()) - len(own) * first_own
        self.steps += len(own) * steps
        self.recorded += len(ids) - len(own)

    def recorded_share(self) -> float | None:
        """The share of recorded items; None if none were drawn."""
        return self.recorded / (self.items + self.recorded) if self.items + self.recorded else None

    def age(self, steps: int, head: int) -> float | None:
        """The mean age in steps of the items drawn, if `steps` steps have made `head` items so far."""
        if not self.items or not head:  # a replay that was not saved starts empty
            return None
        return max(0.0, (self.steps - self.serials * steps / head) / self.items)

    @classmethod
    def from_state(cls, state: State) -> "DrawnItems":
        """The counts that were saved; older versions had no recorded items."""
        return cls(
            **{name: saved_count(state, name, 2**62) for name in asdict(cls()) if name in state or name != "recorded"}
        )
