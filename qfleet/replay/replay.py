"""Replay: a store, a queue of ready items, and a sampler. Shapes: N items, L lanes, A actions.

Every step is stored once. When a row arrives, the items whose windows it completes join the queue and get a serial
number; only queued items can be drawn, so no draw can be invalid. An item leaves when the queue holds `capacity`, or
when its first row is about to be overwritten. Serial numbers never repeat: a late priority finds its item or nothing.
"""

import numpy as np

from qfleet.data import Array, Batch, Rollout, Spec, State
from qfleet.data.saved import restore_generator, saved_count, saved_numbers, saved_value
from qfleet.replay.kernels import admit, cut
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
        n_step: int = 1,
        discount: float = 0.99,
        clip_reward: bool = False,
    ) -> None:
        self.spec, self.lanes, self.capacity = spec, lanes, capacity
        self.sampler, self.rng = sampler, rng
        self.n_step, self.discount, self.clip_reward = n_step, discount, clip_reward
        self.store = Store(spec, lanes, ring_rows(capacity, spec, lanes, n_step))
        # Room for one row's worth of newcomers before the oldest leave.
        self.items = np.zeros(capacity + lanes * (n_step + 1), np.int64)
        self.first = np.zeros(lanes, np.int64)
        self.tail = self.head = 0

    def __len__(self) -> int:
        """How many items can be drawn."""
        return self.head - self.tail

    def add(self, rollout: Rollout) -> int:
        """Store every row and queue what became ready; returns how many steps (not `last` rows) came in."""
        for time in range(len(rollout.last)):
            row = self.store.write(rollout, time)
            self.head = admit(self.store.last, row, self.n_step, self.first, self.items, self.head)
            self.tail = self.oldest_kept()
            self.sampler.move(self.tail, self.head)
        return int(rollout.last.size - np.count_nonzero(rollout.last))

    def oldest_kept(self) -> int:
        """The first serial that stays: within capacity, and with every row of its window still in the ring."""
        tail = max(self.tail, self.head - self.capacity)
        # Items queued later may begin up to n rows earlier, hence the margin.
        safe = self.store.head - self.store.rows + self.spec.stack + self.n_step
        while tail < self.head and self.items[tail % len(self.items)] // self.lanes < safe:
            tail += 1
        return tail

    def sample(self, size: int) -> Batch | None:
        """A batch of `size` items with replacement, or None while nothing is ready."""
        if not len(self):
            return None
        serials, weight = self.sampler.draw(size, self.rng)
        return self.cut(serials, weight)

    def cut(self, serials: Array, weight: Array) -> Batch:
        """The items with these serial numbers, as a batch."""
        num, store, spec = len(serials), self.store, self.spec
        flat = store.obs.reshape(store.rows, self.lanes, -1)
        obs, next_obs = (np.empty((num, spec.stack, flat.shape[2]), spec.dtype) for _ in range(2))
        action, next_rows = np.empty(num, np.int64), np.empty(num, np.int64)
        reward, discount = np.empty(num, np.float32), np.empty(num, np.float32)
        items = self.items[serials % len(self.items)]
        cut(
            flat,
            store.action,
            store.reward,
            store.discount,
            store.last,
            items,
            self.n_step,
            self.discount,
            self.clip_reward,
            obs,
            action,
            reward,
            discount,
            next_obs,
            next_rows,
        )
        shape = (num, *spec.input_shape)
        mask = None if store.mask is None else store.mask[next_rows % store.rows, items % self.lanes]
        return Batch(obs.reshape(shape), action, reward, discount, next_obs.reshape(shape), weight, serials, mask)

    def update(self, ids: Array, priority: Array) -> None:
        """New priorities; those of items that have left are dropped."""
        live = ids >= self.tail
        self.sampler.update(ids[live], priority[live])

    def clear(self) -> None:
        """Forget everything; serial numbers go on, so late priorities still find nothing."""
        self.tail = self.head
        self.store.head = 0
        self.first[:] = 0
        self.sampler.move(self.tail, self.head)

    def first_row(self) -> int:
        """The oldest row that a live or coming item needs."""
        oldest = int(self.first.min())
        if len(self):
            # Items queued later may begin up to n rows before the oldest queued one.
            oldest = min(oldest, int(self.items[self.tail % len(self.items)]) // self.lanes - self.n_step)
        return max(0, oldest - self.spec.stack)

    def state_dict(self) -> State:
        """All but the rows themselves, which `store.read` gives in segments."""
        live = np.arange(self.tail, self.head) % len(self.items)
        return {
            "tail": self.tail,
            "head": self.head,
            "row": self.store.head,
            "first_row": self.first_row(),
            "first": self.first.copy(),
            "items": self.items[live],
            "sampler": self.sampler.state_dict(),
            "rng": self.rng.bit_generator.state,
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
        restore_generator(self.rng, saved_value(state, "rng"))
