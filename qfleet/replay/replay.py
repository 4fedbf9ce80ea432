"""Replay: a store, a queue of complete items, and a sampler. Shapes: N items, L lanes, A actions.

Every step is stored once. When a row arrives, the items whose windows it completes join the queue and get a serial
number; only queued items can be drawn, so no draw can be invalid. The remover is FIFO: an item is removed, with all
that were queued before it, when the queue holds `capacity` or when a row that it needs is overwritten. Serial numbers
never repeat: a late priority finds its item or nothing.

The lanes of one actor form a group, which is written, sealed and saved independently of the others.
"""

from collections import deque
from dataclasses import KW_ONLY, InitVar, dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from qfleet.data import Array, Batch, Rollout, Sequences, Spec, State
from qfleet.data.state_reader import restore_generator, saved_count, saved_numbers, saved_value
from qfleet.replay.cuts import Cut, NStepReturn, cut_indices
from qfleet.replay.duplicates import DuplicateFilter
from qfleet.replay.intake import gather_items, queue_completed, record_serials, seal
from qfleet.replay.samplers import Sampler, SamplerTotals
from qfleet.replay.store import ALL, Store, ring_rows

ROWS_PER_WRITE = 64  # of a rollout; longer ones are written in parts
Span: TypeAlias = tuple[slice, int, int]  # a group of lanes, and rows [begin, end) of them


def queue_length(capacity: int, lanes: int, window: int) -> int:
    """Length of the queue: room for the new items of one write before the oldest are removed."""
    return capacity + lanes * (window + ROWS_PER_WRITE)


@dataclass(eq=False)
class Replay:
    """Stores rollouts and samples batches from them."""

    spec: Spec
    lanes: int
    capacity: int  # given in steps, kept in items
    sampler: Sampler
    rng: np.random.Generator
    _: KW_ONLY
    cut: Cut
    n_step: NStepReturn
    values: InitVar[bool] = False
    actor_priority: bool = False
    filter: DuplicateFilter | None = None
    gains: InitVar[bool] = False
    compress: InitVar[bool] = False

    def __post_init__(self, values: bool, gains: bool, compress: bool) -> None:
        lanes = self.lanes
        window = self.cut.window
        rows = ring_rows(self.capacity, self.spec, lanes, window)
        self.capacity = self.cut.items_in(self.capacity)
        self.store = Store(self.spec, lanes, rows, values=values or self.actor_priority, gains=gains, pack=compress)
        # Rows of complete items must not be overwritten before these are queued.
        self.max_write_rows = 1 if self.filter is not None else min(ROWS_PER_WRITE, rows - window - self.spec.stack)
        self.items = np.zeros(queue_length(self.capacity, lanes, window), np.int64)
        self.serials = np.full((rows, lanes), -1, np.int64)  # of the item that begins in each row
        self.first = np.zeros(lanes, np.int64)  # row where each lane's next item begins
        self.group_bounds = {0, lanes}  # first lanes of all groups, and the number of lanes
        self.tail = self.head = 0
        self.recent: deque[Any] = deque()  # the last two batches sampled, whose memory is reused
        self.mirrored = False  # batches hold frame indices of a `Mirror` instead of observations
        self.items_added = 0  # since the replay was last empty, rejected copies included

    def __len__(self) -> int:
        """The number of live items, which can be drawn."""
        return self.head - self.tail

    def add(self, rollout: Rollout, gain: Array | None = None, lanes: slice = ALL) -> int:
        """Write rows to these lanes and queue the items they complete; returns the number of steps (not `last` rows).

        `gain` [T, B] is the environment's reward where the rollout's includes a bonus.
        """
        begin, end = self.add_group(lanes)
        num, width = rollout.last.shape
        if width != end - begin:
            raise ValueError(f"a rollout of {width} lanes does not fit lanes {begin} to {end}")
        steps = time = 0
        while time < num:
            until = min(time + min(self.max_write_rows, self.store.max_write_rows(begin, end)), num)
            steps += self.store.write(rollout, time, until, begin, gain)
            self.queue_items(begin, end, until - time)
            time = until
        return steps

    def add_group(self, lanes: slice) -> tuple[int, int]:
        """Make these lanes a group; returns its first lane and its end."""
        begin, end, _ = lanes.indices(self.lanes)
        self.group_bounds |= {begin, end}
        return begin, end

    def queue_items(self, begin: int, end: int, num: int) -> None:
        """Queue the items that the newest `num` rows of lanes [begin, end) completed."""
        store = self.store
        cut = self.cut
        before = self.head
        rule = (cut.window, cut.stride, cut.ends)
        queue = (self.first, self.items, self.serials)
        written = (store.last, store.heads, begin, end, num)
        self.head, overwritten = queue_completed(*written, rule, queue, self.spec.stack, before)
        self.admit_items(before, overwritten)

    def admit_items(self, before: int, overwritten: int) -> None:
        """Register the items queued from serial number `before` on; remove old ones, and all up to `overwritten`."""
        self.items_added += self.head - before
        if self.filter is not None and self.head > before:
            self.head = self.filter.reject_copies(self.store, self.n_step, self.items, before, self.head)
        record_serials(self.items, self.serials, before, self.head)
        self.remove_before(max(self.tail, self.head - self.capacity, overwritten + 1))
        if self.actor_priority:
            new = np.arange(max(before, self.tail), self.head)
            self.sampler.update(new, self.cut.priority(self.store, self.items_at(new), self.n_step))

    def seal(self, lanes: slice = ALL) -> int:
        """End the episodes of these lanes, whose actor is lost: their newest rows become final, no item spans the gap.

        Returns the number of counted steps that became final rows, because their outcome is not known.
        """
        begin, end = self.add_group(lanes)
        store = self.store
        before = self.head
        queue = (self.first, self.items)
        self.head, marked = seal(store.last, store.heads, begin, end, self.cut.ends, *queue, before)
        self.admit_items(before, -1)
        return int(marked)

    def remove_before(self, tail: int) -> None:
        """Remove the items before serial number `tail`."""
        if self.filter is not None:
            self.filter.remove_oldest(tail - self.tail)
        self.tail = tail
        self.sampler.set_live(self.tail, self.head)

    def items_at(self, serials: Array) -> Array:
        """The items with these serial numbers."""
        found = np.empty(len(serials), np.int64)
        gather_items(self.items, serials, found)
        return found

    def sample(self, size: int) -> Batch | Sequences | None:
        """A batch of `size` items with replacement, or None if no item is live.

        It reuses the memory of the batch before the last: one may be learned from while the next is sampled.
        """
        if not len(self):
            return None
        serials, weight = self.sampler.draw(size, self.rng)
        if len(self.recent) > 1 and len(self.recent[0].ids) != size:
            self.recent.clear()
        if self.mirrored:
            return cut_indices(self.store, self.items_at(serials), self.n_step, weight, serials)
        out = self.recent.popleft() if len(self.recent) > 1 else None
        batch = self.cut.cut(self.store, self.items_at(serials), self.n_step, weight, serials, out)
        self.recent.append(batch)
        return batch

    def read_batch(self, serials: Array, weight: Array) -> Batch | Sequences:
        """The items with these serial numbers as a batch in memory of its own."""
        return self.cut.cut(self.store, self.items_at(serials), self.n_step, weight, serials)

    def update(self, ids: Array, priority: Array) -> None:
        """Set priorities; those of items that were removed are ignored."""
        self.sampler.update(ids, priority)

    def totals(self) -> SamplerTotals:
        """The population of the last sample, before any change."""
        return self.sampler.totals()

    def reseed(self, rng: np.random.Generator) -> None:
        """Sample with another generator from here on."""
        self.rng = rng

    def close(self) -> None:
        """Nothing to release."""

    def clear(self) -> None:
        """Remove everything; serial numbers continue, so late priorities still find nothing."""
        self.remove_before(self.head)
        self.items_added = 0
        self.store.heads[:] = 0
        self.first[:] = 0
        self.store.num_restores += 1
        self.serials[:] = -1

    def items_in_row(self, serial: int) -> int:
        """The number of items from this one on that began in the same row of one group of lanes."""
        lane = int(self.items[serial % len(self.items)]) % self.lanes
        return min(bound for bound in self.group_bounds if bound > lane) - lane

    def spans(self) -> list[Span]:
        """For each group of lanes the rows [begin, end) that a live or future item needs, and always the newest one.

        Whether the newest row is final decides what sealing the lane means.
        """
        heads = self.store.heads
        oldest = np.minimum(self.first, np.maximum(heads - 1, 0))
        live = self.items_at(np.arange(self.tail, self.head))
        np.minimum.at(oldest, live % self.lanes, live // self.lanes)
        oldest = np.maximum(oldest - self.spec.stack + 1, 0)
        groups = [slice(*pair) for pair in pairwise(sorted(self.group_bounds))]
        return [(lanes, int(oldest[lanes].min()), int(heads[lanes].max())) for lanes in groups]

    def state_dict(self) -> State:
        """Everything but the rows, which `store.read` returns in segments."""
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
        """Restore everything but the rows, which `store.restore` restores."""
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
        record_serials(self.items, self.serials, tail, head)
        self.sampler.set_live(tail, head)
        self.sampler.load_state_dict(saved_value(state, "sampler"))
        self.items_added = len(self)
        if self.filter is not None:
            self.filter.load_state_dict(saved_value(state, "filter"), len(self))
        restore_generator(self.rng, saved_value(state, "rng"))

    def load_lanes(self, state: State) -> None:
        """Restore the heads of all lanes, and their groups."""
        heads = self.store.heads
        spans = saved_spans(state, self.lanes, self.store.rows)
        first = saved_numbers(state, "first", (self.lanes,), 0, 2**53)
        for lanes, _, end in spans:
            heads[lanes] = end
        written = heads > 0
        require_rows(np.minimum(first, heads - 1)[written], heads[written], self.store.rows)
        self.first[:] = first
        self.group_bounds = {0, *(lanes.stop for lanes, _, _ in spans)}


def saved_spans(state: State, lanes: int, rows: int) -> list[Span]:
    """All groups of lanes with their saved rows [begin, end), at most as many as the ring has."""
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
