"""Carriers in shared memory: a ring for parcels, a belt for rollouts, gauges for counters. None of them ever blocks.

Why this is right on every CPU, though Python has no atomic operations. Stores of one process may reach another in any
order and in pieces; what is certain is that each byte changes from old to new once, and that a store which depends on
what was loaded does not overtake the load.

- Ring, reader: a slot counts as filled only when a copy of it carries the number that is due and a checksum over
  number, length and content that is right. Whatever mixture of old and new was seen before that is refused: "not there
  yet". The slot was filled with another number before, so old content can never pass for new.
- Ring, writer: a slot is used again only when the reader's counter says that it was read. The reader writes its counter
  only if the checksum of its copy was right, so every load of the slot is done by then (it depends on all of them), and
  the writer's stores depend on the counter it loaded. The counter is stored twice, once inverted: halves that do not
  belong together are no counter, and an old one only makes the writer wait longer.
- A writer killed at any moment leaves a last slot that is never accepted; every slot before it is whole. Its successor
  gets a ring of its own.
- Gauges: single aligned 64-bit words, each with one writer; a reader sees an old or a new value.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from qfleet.data import Rollout, Spec
from qfleet.data.array_messages import SentBytes, as_rollout, rollout_bytes, rollout_parts
from qfleet.data.wire_format import NUMBER_WORD, Arrays, Facts, MessageNotWhole, MessageTooLarge, Parts, pack, unpack
from qfleet.system.shared_memory import LINE, SharedMemory, lines

INVERT = 2**64 - 1


class Counter:
    """A number that only rises: one process writes it, another reads it."""

    def __init__(self, memory: memoryview) -> None:
        self.words = memory[:16].cast("Q")
        self.known = 0

    def read(self) -> int:
        """The newest value, or an older one while it changes."""
        value, inverted = self.words
        if value == inverted ^ INVERT and value > self.known:
            self.known = value
        return self.known

    def write(self, value: int) -> None:
        """Replace what the reader sees."""
        self.known = value
        self.words[0] = value
        self.words[1] = value ^ INVERT


class Ring:
    """Parcels from one process to another, in order; `slots` of them may wait.

    `slot_bytes` is the most that a parcel may have, before any compression.
    """

    def __init__(
        self, slots: int, slot_bytes: int, *, compress: Collection[str] = (), region: SharedMemory | None = None
    ) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.compress = compress
        self.freight = SentBytes()
        size = lines(slot_bytes)
        self.region = region or SharedMemory(2 * LINE + slots * size)
        view = self.region.view
        self.written = Counter(view)
        self.taken = Counter(view[LINE:])
        starts = [2 * LINE + slot * size for slot in range(slots)]
        self.memory = [view[start : start + slot_bytes] for start in starts]
        self.numbers = [view[start : start + 8 * (NUMBER_WORD + 1)].cast("Q") for start in starts]
        self.written.read(), self.taken.read()

    def put(self, meta: Facts, arrays: Arrays) -> bool:
        """Hand a parcel over; False when there is no room."""
        done = self.written.known
        if done - self.taken.read() >= self.slots:
            return False
        if self.compress and sum(array.nbytes for array in arrays.values()) > self.slot_bytes:
            raise MessageTooLarge(f"the arrays have more than {self.slot_bytes} bytes")
        begun = time.perf_counter_ns()
        length = pack(meta, arrays, self.memory[done % self.slots], compress=self.compress, number=done + 1)
        if self.compress:
            self.freight.add(arrays, length, begun)
        self.written.write(done + 1)
        return True

    def get(self) -> Parts | None:
        """The oldest parcel waiting, if any; one whose content makes no sense is a ValueError, once."""
        done = self.taken.known
        slot = done % self.slots
        if self.numbers[slot][NUMBER_WORD] != done + 1:
            return None
        try:
            parts = unpack(self.memory[slot], limit_bytes=self.slot_bytes, number=done + 1)
        except MessageNotWhole:
            return None
        except ValueError:
            self.taken.write(done + 1)
            raise
        self.taken.write(done + 1)
        return parts

    def __len__(self) -> int:
        return max(0, self.written.read() - self.taken.read())

    def __reduce__(self) -> tuple[Any, ...]:
        return _ring, (self.slots, self.slot_bytes, tuple(self.compress), self.region)

    def close(self) -> None:
        """Let go of the memory."""
        self.memory = []
        self.numbers = []
        self.written.words.release()
        self.taken.words.release()
        self.region.close()


def _ring(slots: int, slot_bytes: int, compress: tuple[str, ...], region: SharedMemory) -> Ring:
    return Ring(slots, slot_bytes, compress=compress, region=region)


class RolloutRing:
    """A Channel between two processes: rollouts of at most `rows` rows through a ring of its own."""

    def __init__(self, spec: Spec, lanes: int, rows: int, slots: int, *, compress: Collection[str] = ()) -> None:
        self.spec = spec
        self.lanes = lanes
        self.ring = Ring(slots, rollout_bytes(spec, lanes, rows), compress=compress)

    def put(self, rollout: Rollout) -> bool:
        """Hand one over; False when there is no room."""
        return self.ring.put(*rollout_parts(rollout))

    def get(self) -> Rollout | None:
        """The oldest one waiting, if any."""
        parts = self.ring.get()
        return None if parts is None else as_rollout(parts, self.spec, self.lanes)

    @property
    def freight(self) -> SentBytes:
        """What compressing has saved and cost this end so far."""
        return self.ring.freight

    def __len__(self) -> int:
        return len(self.ring)

    def close(self) -> None:
        """Let go of the memory."""
        self.ring.close()


class SharedCounters:
    """Counters of every worker, which the driver looks at; each is written by its worker alone."""

    def __init__(self, names: Sequence[str], workers: int, *, region: SharedMemory | None = None) -> None:
        self.names = tuple(names)
        self.workers = workers
        width = lines(8 * len(self.names))
        self.region = region or SharedMemory(workers * width)
        self.table = np.frombuffer(self.region.view, np.int64).reshape(workers, width // 8)
        self.places = {name: place for place, name in enumerate(self.names)}

    def set(self, worker: int, **values: int) -> None:
        """Replace some of a worker's counters."""
        for name, value in values.items():
            self.table[worker, self.places[name]] = value

    def add(self, worker: int, **values: int) -> None:
        """Raise some of a worker's counters."""
        for name, value in values.items():
            self.table[worker, self.places[name]] += value

    def read(self, worker: int) -> dict[str, int]:
        """A worker's counters."""
        return dict(zip(self.names, self.table[worker].tolist(), strict=False))  # a row is rounded up

    def column(self, name: str) -> list[int]:
        """One counter of every worker."""
        values: list[int] = self.table[:, self.places[name]].tolist()
        return values

    def clear(self, worker: int) -> None:
        """All zeros again, for a worker's successor."""
        self.table[worker] = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _gauges, (self.names, self.workers, self.region)

    def close(self) -> None:
        """Let go of the memory."""
        self.table = np.zeros_like(self.table)
        self.region.close()


def _gauges(names: tuple[str, ...], workers: int, region: SharedMemory) -> SharedCounters:
    return SharedCounters(names, workers, region=region)
