"""Replay: a store, a queue of ready items, and a sampler. Shapes: N items, L lanes, A actions.

Every step is stored once. When a row arrives, the items whose windows it completes join the queue and get a serial
number; only queued items can be drawn, so no draw can be invalid. An item leaves when the queue holds `capacity`, or
when its first row is about to be overwritten. Serial numbers never repeat: a late priority finds its item or nothing.
"""

import numpy as np

from qfleet.data import Array, Batch, Rollout, Sequences, Spec, State
from qfleet.data.saved import restore_generator, saved_count, saved_numbers, saved_value
from qfleet.replay.cuts import Cut, Fold
from qfleet.replay.duplicates import Duplicates
from qfleet.replay.samplers import Sampler
from qfleet.replay.store import Store, ring_rows


class Replay:
    """Remembers rollouts and cuts batches out of them."""

    def __init__(
        self,
        spec: Spec,
        lanes: int,
        capacity: int,
        sampler: Sampler,
        rng: np.random.Generator,
        *,
        cut: Cut,
        fold: Fold,
        actor_priority: bool = False,
        filter: Duplicates | None = None,
        gains: bool = False,
    ) -> None:
        self.spec, self.lanes, self.capacity = spec, lanes, cut.items_in(capacity)
        self.sampler, self.rng, self.cut, self.fold = sampler, rng, cut, fold
        rows = ring_rows(capacity, spec, lanes, cut.window)
        self.store = Store(spec, lanes, rows, values=actor_priority, gains=gains)
        # Room for one row's worth of newcomers before the oldest leave.
        self.items = np.zeros(self.capacity + lanes * (cut.window + 1), np.int64)
        self.first = np.zeros(lanes, np.int64)
        self.tail = self.head = 0
        self.filter = filter
        self.ready = 0  # items since the replay was last empty, those kept out too

    def __len__(self) -> int:
        """How many items can be drawn."""
        return self.head - self.tail

    def add(self, rollout: Rollout, gain: Array | None = None) -> int:
        """Store every row and queue what became ready; returns how many steps (not `last` rows) came in.

        `gain` [T, B] is what the world gave, where the rollout's reward holds a bonus.
        """
        for time in range(len(rollout.last)):
            row, before = self.store.write(rollout, time, gain), self.head
            self.head = self.cut.admit(self.store, row, self.first, self.items, before)
            self.ready += self.head - before
            if self.filter is not None and self.head > before:
                self.head = self.filter.keep(self.store, self.fold, self.items, before, self.head)
            self.move_to(self.oldest_kept())
            if self.store.value is not None:
                fresh = np.arange(max(before, self.tail), self.head)
                self.sampler.update(fresh, self.cut.priority(self.store, self.at(fresh), self.fold))
        return int(rollout.last.size - np.count_nonzero(rollout.last))

    def move_to(self, tail: int) -> None:
        """Let go of the items before `tail`."""
        if self.filter is not None:
            self.filter.leave(tail - self.tail)
        self.tail = tail
        self.sampler.move(self.tail, self.head)

    def oldest_kept(self) -> int:
        """The first serial that stays: within capacity, and with every row of its window still in the ring."""
        tail = max(self.tail, self.head - self.capacity)
        # Items queued later may begin up to a window earlier, hence the margin.
        safe = self.store.head - self.store.rows + self.spec.stack + self.cut.window
        while tail < self.head and self.items[tail % len(self.items)] // self.lanes < safe:
            tail += 1
        return tail

    def at(self, serials: Array) -> Array:
        """The items with these serial numbers."""
        found: Array = self.items[serials % len(self.items)]
        return found

    def sample(self, size: int) -> Batch | Sequences | None:
        """A batch of `size` items with replacement, or None while nothing is ready."""
        if not len(self):
            return None
        return self.take(*self.sampler.draw(size, self.rng))

    def take(self, serials: Array, weight: Array) -> Batch | Sequences:
        """The items with these serial numbers, as a batch."""
        return self.cut.cut(self.store, self.at(serials), self.fold, weight, serials)

    def update(self, ids: Array, priority: Array) -> None:
        """New priorities; those of items that have left are dropped."""
        live = ids >= self.tail
        self.sampler.update(ids[live], priority[live])

    def clear(self) -> None:
        """Forget everything; serial numbers go on, so late priorities still find nothing."""
        self.move_to(self.head)
        self.store.head = self.ready = 0
        self.first[:] = 0

    def first_row(self) -> int:
        """The oldest row that a live or coming item needs."""
        oldest = int(self.first.min())
        if len(self):
            # Items queued later may begin up to a window before the oldest queued one.
            oldest = min(oldest, int(self.items[self.tail % len(self.items)]) // self.lanes - self.cut.window)
        return max(0, oldest - self.spec.stack)

    def state_dict(self) -> State:
        """All but the rows themselves, which `store.read` gives in segments."""
        live = np.arange(self.tail, self.head) % len(self.items)
        copies = {} if self.filter is None else {"filter": self.filter.state_dict()}
        return {
            "tail": self.tail,
            "head": self.head,
            "row": self.store.head,
            "first_row": self.first_row(),
            "first": self.first.copy(),
            "items": self.items[live],
            "sampler": self.sampler.state_dict(),
            "rng": self.rng.bit_generator.state,
            **copies,
        }

    def load_state_dict(self, state: State) -> None:
        """Come back to that moment; the rows are restored by `store.restore`."""
        row, head = saved_count(state, "row"), saved_count(state, "head")
        tail = saved_count(state, "tail", head)
        first = saved_numbers(state, "first", (self.lanes,), max(0, row - self.store.rows), row)
        oldest = max(0, row - self.store.rows) * self.lanes
        items = saved_numbers(state, "items", (head - tail,), oldest, row * self.lanes)
        if head - tail > self.capacity:
            raise ValueError(f"items: {head - tail} are more than replay.capacity={self.capacity}")
        self.tail, self.head, self.store.head = tail, head, row
        self.first[:] = first
        self.items[np.arange(tail, head) % len(self.items)] = items
        self.sampler.move(tail, head)
        self.sampler.load_state_dict(saved_value(state, "sampler"))
        self.ready = len(self)
        if self.filter is not None:
            self.filter.load_state_dict(saved_value(state, "filter"), len(self))
        restore_generator(self.rng, saved_value(state, "rng"))
