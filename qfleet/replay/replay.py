"""Replay: a store, a queue of ready items, and a sampler. Shapes: N items, L lanes, A actions.

Every step is stored once. When a row arrives, the items whose windows it completes join the queue and get a serial
number; only queued items can be drawn, so no draw can be invalid. An item leaves, with all that were queued before it,
when the queue holds `capacity` or when a row that it needs is overwritten. Serial numbers never repeat: a late priority
finds its item or nothing.

Lanes move by themselves: the lanes of one actor form a group, which is written, sealed and saved on its own.
"""

from collections import deque
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from qfleet.data import Array, Batch, Rollout, Sequences, Spec, State
from qfleet.data.state_reader import restore_generator, saved_count, saved_numbers, saved_value
from qfleet.replay.cuts import Cut, Fold, cut_places
from qfleet.replay.duplicates import Duplicates
from qfleet.replay.intake import admit, look_up, number, seal
from qfleet.replay.samplers import Sampler, SamplerTotals
from qfleet.replay.store import ALL, Store, ring_rows

ROWS_AT_ONCE = 64  # of a rollout; longer ones come in in parts
Span: TypeAlias = tuple[slice, int, int]  # a group of lanes, and rows [begin, end) of them


def queue_items(capacity: int, lanes: int, window: int) -> int:
    """Places of the queue: room for one part's newcomers before the oldest leave."""
    return capacity + lanes * (window + ROWS_AT_ONCE)


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
        values: bool = False,
        actor_priority: bool = False,
        filter: Duplicates | None = None,
        gains: bool = False,
        compress: bool = False,
    ) -> None:
        self.spec = spec
        self.lanes = lanes
        self.capacity = cut.items_in(capacity)
        self.sampler = sampler
        self.rng = rng
        self.cut = cut
        self.fold = fold
        rows = ring_rows(capacity, spec, lanes, cut.window)
        self.store = Store(spec, lanes, rows, values=values or actor_priority, gains=gains, pack=compress)
        # Rows of items that are ready must not be overwritten before they were queued.
        self.at_once = 1 if filter is not None else min(ROWS_AT_ONCE, rows - cut.window - spec.stack)
        self.items = np.zeros(queue_items(self.capacity, lanes, cut.window), np.int64)
        self.serials = np.full((rows, lanes), -1, np.int64)  # of the item that begins at each place
        self.first = np.zeros(lanes, np.int64)  # where each lane's next item begins
        self.seams = {0, lanes}  # where groups of lanes begin and end
        self.tail = self.head = 0
        self.used: deque[Any] = deque()  # the last two batches drawn
        self.mirrored = False  # batches drawn have the places of observations, which a mirror knows
        self.filter = filter
        self.actor_priority = actor_priority
        self.ready = 0  # items since the replay was last empty, those kept out too

    def __len__(self) -> int:
        """How many items can be drawn."""
        return self.head - self.tail

    def add(self, rollout: Rollout, gain: Array | None = None, lanes: slice = ALL) -> int:
        """Store every row in these lanes and queue what became ready; returns how many steps (not `last` rows) came in.

        `gain` [T, B] is what the world gave, where the rollout's reward holds a bonus.
        """
        begin, end = self.group(lanes)
        num, width = rollout.last.shape
        if width != end - begin:
            raise ValueError(f"a rollout of {width} lanes does not fit lanes {begin} to {end}")
        steps = time = 0
        while time < num:
            until = min(time + min(self.at_once, self.store.room(begin, end)), num)
            steps += self.store.write(rollout, time, until, begin, gain)
            self.queue(begin, end, until - time)
            time = until
        return steps

    def group(self, lanes: slice) -> tuple[int, int]:
        """The first lane and the end of a group that from now on moves by itself."""
        begin, end, _ = lanes.indices(self.lanes)
        self.seams |= {begin, end}
        return begin, end

    def queue(self, begin: int, end: int, num: int) -> None:
        """The items that the newest rows of these lanes completed."""
        store = self.store
        cut = self.cut
        before = self.head
        rules = (cut.window, cut.stride, cut.ends, self.spec.stack)
        places = (self.first, self.items, self.serials)
        self.head, gone = admit(store.last, store.heads, begin, end, num, *rules, *places, before)
        self.settle(before, gone)

    def settle(self, before: int, gone: int) -> None:
        """Take the newcomers from serial number `before` on in; all up to `gone` have lost a row."""
        self.ready += self.head - before
        if self.filter is not None and self.head > before:
            self.head = self.filter.keep(self.store, self.fold, self.items, before, self.head)
        number(self.items, self.serials, before, self.head)
        self.move_to(max(self.tail, self.head - self.capacity, gone + 1))
        if self.actor_priority:
            fresh = np.arange(max(before, self.tail), self.head)
            self.sampler.update(fresh, self.cut.priority(self.store, self.at(fresh), self.fold))

    def seal(self, lanes: slice = ALL) -> int:
        """The actor of these lanes is gone: their newest rows become final, and nothing spans what comes next.

        Returns how many steps that had been counted have become final rows, because their outcome is not known.
        """
        begin, end = self.group(lanes)
        store = self.store
        before = self.head
        places = (self.first, self.items)
        self.head, turned = seal(store.last, store.heads, begin, end, self.cut.ends, *places, before)
        self.settle(before, -1)
        return int(turned)

    def move_to(self, tail: int) -> None:
        """Let go of the items before `tail`."""
        if self.filter is not None:
            self.filter.leave(tail - self.tail)
        self.tail = tail
        self.sampler.move(self.tail, self.head)

    def at(self, serials: Array) -> Array:
        """The items with these serial numbers."""
        found = np.empty(len(serials), np.int64)
        look_up(self.items, serials, found)
        return found

    def sample(self, size: int) -> Batch | Sequences | None:
        """A batch of `size` items with replacement, or None while nothing is ready.

        It is written over the one before the last: one may be learned from while the next is drawn.
        """
        if not len(self):
            return None
        serials, weight = self.sampler.draw(size, self.rng)
        if len(self.used) > 1 and len(self.used[0].ids) != size:
            self.used.clear()
        if self.mirrored:
            return cut_places(self.store, self.at(serials), self.fold, weight, serials)
        over = self.used.popleft() if len(self.used) > 1 else None
        batch = self.cut.cut(self.store, self.at(serials), self.fold, weight, serials, over)
        self.used.append(batch)
        return batch

    def take(self, serials: Array, weight: Array) -> Batch | Sequences:
        """The items with these serial numbers, as a batch of its own."""
        return self.cut.cut(self.store, self.at(serials), self.fold, weight, serials)

    def update(self, ids: Array, priority: Array) -> None:
        """New priorities; those of items that have left are dropped."""
        self.sampler.update(ids, priority)

    def stock(self) -> SamplerTotals:
        """What there is to draw from, right after a batch was drawn."""
        return self.sampler.stock()

    def reseed(self, rng: np.random.Generator) -> None:
        """Draw by other random numbers from here on."""
        self.rng = rng

    def close(self) -> None:
        """There is nothing to let go of."""

    def clear(self) -> None:
        """Forget everything; serial numbers go on, so late priorities still find nothing."""
        self.move_to(self.head)
        self.ready = 0
        self.store.heads[:] = self.first[:] = 0
        self.store.restored += 1
        self.serials[:] = -1

    def width_at(self, serial: int) -> int:
        """How many items from this one on began in the same row of one group of lanes."""
        lane = int(self.items[serial % len(self.items)]) % self.lanes
        return min(seam for seam in self.seams if seam > lane) - lane

    def groups(self) -> list[slice]:
        """The lanes that move together."""
        return [slice(*pair) for pair in pairwise(sorted(self.seams))]

    def spans(self) -> list[Span]:
        """For each group of lanes the rows [begin, end) that a live or coming item needs, and always the newest one.

        Whether that is final decides what sealing the lane means.
        """
        heads = self.store.heads
        oldest = np.minimum(self.first, np.maximum(heads - 1, 0))
        live = self.at(np.arange(self.tail, self.head))
        np.minimum.at(oldest, live % self.lanes, live // self.lanes)
        oldest = np.maximum(oldest - self.spec.stack + 1, 0)
        return [(lanes, int(oldest[lanes].min()), int(heads[lanes].max())) for lanes in self.groups()]

    def state_dict(self) -> State:
        """All but the rows themselves, which `store.read` gives in segments."""
        live = np.arange(self.tail, self.head) % len(self.items)
        copies = {} if self.filter is None else {"filter": self.filter.state_dict()}
        return {
            "tail": self.tail,
            "head": self.head,
            "row": int(self.store.heads.max()),
            "spans": [[lanes.start, lanes.stop, begin, end] for lanes, begin, end in self.spans()],
            "first": self.first.copy(),
            "items": self.items[live],
            "sampler": self.sampler.state_dict(),
            "rng": self.rng.bit_generator.state,
            **copies,
        }

    def load_state_dict(self, state: State) -> None:
        """Come back to that moment; the rows are restored by `store.restore`."""
        head = saved_count(state, "head")
        tail = saved_count(state, "tail", head)
        if head - tail > self.capacity:
            raise ValueError(f"items: {head - tail} are more than replay.capacity={self.capacity}")
        self.load_lanes(state)
        items = saved_numbers(state, "items", (head - tail,), 0, 2**62)
        require_rows(items // self.lanes, self.store.heads[items % self.lanes], self.store.rows)
        self.tail = tail
        self.head = head
        self.items[np.arange(tail, head) % len(self.items)] = items
        self.serials[:] = -1
        number(self.items, self.serials, tail, head)
        self.sampler.move(tail, head)
        self.sampler.load_state_dict(saved_value(state, "sampler"))
        self.ready = len(self)
        if self.filter is not None:
            self.filter.load_state_dict(saved_value(state, "filter"), len(self))
        restore_generator(self.rng, saved_value(state, "rng"))

    def load_lanes(self, state: State) -> None:
        """How far each lane is, and which ones move together."""
        heads = self.store.heads
        spans = saved_spans(state, self.lanes, self.store.rows)
        first = saved_numbers(state, "first", (self.lanes,), 0, 2**53)
        for lanes, _, end in spans:
            heads[lanes] = end
        begun = heads > 0
        require_rows(np.minimum(first, heads - 1)[begun], heads[begun], self.store.rows)
        self.first[:] = first
        self.seams = {0, *(lanes.stop for lanes, _, _ in spans)}


def saved_spans(state: State, lanes: int, rows: int) -> list[Span]:
    """The groups of all lanes, and the rows [begin, end) that were saved of each, at most as many as the ring has."""
    found: list[Span] = []
    for lane, stop, begin, end in np.array(saved_value(state, "spans"), np.int64).reshape(-1, 4).tolist():
        if lane != (found[-1][0].stop if found else 0) or not lane < stop <= lanes:
            raise ValueError(f"spans: lanes {lane} to {stop} do not follow")
        if not 0 <= begin <= end <= begin + rows:
            raise ValueError(f"spans: rows {begin} to {end} do not fit {rows} rows")
        found.append((slice(lane, stop), begin, end))
    if not found or found[-1][0].stop != lanes:
        raise ValueError(f"spans: expected {lanes} lanes")
    return found


def require_rows(rows: Array, heads: Array, num: int) -> None:
    """Refuse rows that a ring of `num` rows cannot hold when it has been written up to `heads`."""
    if len(rows) and not ((rows >= heads - num) & (rows < heads)).all():
        raise ValueError("items or first: a row is not in the ring")
