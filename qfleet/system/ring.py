"""Channels in shared memory: a ring for array messages, a ring for rollouts, a table of counters. None ever blocks.

Why this is correct on every CPU, though Python has no atomic operations: stores of one process may become visible to
another in any sequence and in pieces. Two facts are certain: each byte changes from old to new once, and a store that
depends on a loaded value does not overtake the load.

- Ring, reader: a slot counts as filled only when a copy of it carries the expected sequence number and a correct
  checksum over number, length and content. Any mixture of old and new bytes is rejected as "not there yet". The slot
  was filled with another number before, so old content can never pass for new.
- Ring, writer: a slot is reused only when the reader's counter shows that it was read. The reader writes its counter
  only after the checksum of its copy was correct, so every load of the slot is complete by then (the checksum depends
  on all of them), and the writer's stores depend on the counter it loaded. The counter is stored twice, once inverted:
  halves that do not match are ignored, and an old value only makes the writer wait longer.
- A writer killed at any moment leaves at most one unfinished slot, which is never accepted; every slot before it is
  whole. A restarted writer gets a new ring.
- Counters: aligned 64-bit integers, each with one writer; a reader sees an old or a new value.
"""

import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from qfleet.data import Rollout, Spec
from qfleet.data.array_messages import CompressionStats, RolloutHeader, as_rollout, rollout_bytes, rollout_parts
from qfleet.data.wire_format import NUMBER_INDEX, Arrays, Message, MessageNotWhole, MessageTooLarge, Parts, pack, unpack
from qfleet.system.shared_memory import CACHE_LINE_BYTES, SharedMemory, round_to_cache_lines

INVERT = 2**64 - 1


class Counter:
    """An increasing integer that one process writes and another reads."""

    def __init__(self, memory: memoryview) -> None:
        self.cells = memory[:16].cast("Q")
        self.last_value = 0

    def read(self) -> int:
        """The newest value, or an older one during a write."""
        value, inverted = self.cells
        if value == inverted ^ INVERT and value > self.last_value:
            self.last_value = value
        return self.last_value

    def write(self, value: int) -> None:
        """Publish a new value."""
        self.last_value = value
        self.cells[0] = value
        self.cells[1] = value ^ INVERT


class Ring:
    """A first-in first-out queue of at most `slots` messages, from one process to another.

    `kind` is the class of its messages, or a union of classes; `slot_bytes` is the largest size of a message, before
    compression.
    """

    def __init__(
        self,
        kind: Any,
        slots: int,
        slot_bytes: int,
        *,
        compress: Collection[str] = (),
        region: SharedMemory | None = None,
    ) -> None:
        self.kind = kind
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.compress = compress
        self.compression_stats = CompressionStats()
        size = round_to_cache_lines(slot_bytes)
        self.region = region or SharedMemory(2 * CACHE_LINE_BYTES + slots * size)
        view = self.region.view
        self.written = Counter(view)
        self.taken = Counter(view[CACHE_LINE_BYTES:])
        starts = [2 * CACHE_LINE_BYTES + slot * size for slot in range(slots)]
        self.memory = [view[start : start + slot_bytes] for start in starts]
        self.numbers = [view[start : start + 8 * (NUMBER_INDEX + 1)].cast("Q") for start in starts]
        self.written.read()
        self.taken.read()

    def put(self, message: Message, arrays: Arrays) -> bool:
        """Append a message; False if the ring is full."""
        written = self.written.last_value
        if written - self.taken.read() >= self.slots:
            return False
        if self.compress and sum(array.nbytes for array in arrays.values()) > self.slot_bytes:
            raise MessageTooLarge(f"the arrays have more than {self.slot_bytes} bytes")
        started_ns = time.perf_counter_ns()
        number = written + 1
        length = pack(message, arrays, self.memory[written % self.slots], compress=self.compress, number=number)
        if self.compress:
            self.compression_stats.add(arrays, length, started_ns)
        self.written.write(number)
        return True

    def get(self) -> Parts | None:
        """Remove and return the oldest message, None if there is none; a malformed one raises ValueError, once."""
        slot = self.taken.last_value % self.slots
        number = self.taken.last_value + 1
        if self.numbers[slot][NUMBER_INDEX] != number:
            return None
        try:
            parts = unpack(self.memory[slot], self.kind, limit_bytes=self.slot_bytes, number=number)
        except MessageNotWhole:
            return None
        except ValueError:
            self.taken.write(number)
            raise
        self.taken.write(number)
        return parts

    def __len__(self) -> int:
        return max(0, self.written.read() - self.taken.read())

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(Ring, compress=tuple(self.compress), region=self.region)
        return again, (self.kind, self.slots, self.slot_bytes)

    def close(self) -> None:
        """Release the memory."""
        self.memory = []
        self.numbers = []
        self.written.cells.release()
        self.taken.cells.release()
        self.region.close()


class RolloutRing:
    """A `Channel` between two processes, for rollouts of at most `rows` rows."""

    def __init__(
        self, spec: Spec, lanes: int, rows: int, slots: int, *, compress: Collection[str] = (), num_info: int = 0
    ) -> None:
        self.spec = spec
        self.lanes = lanes
        self.num_info = num_info  # numbers of `log.info` for each episode
        self.ring = Ring(RolloutHeader, slots, rollout_bytes(spec, lanes, rows, num_info), compress=compress)

    def put(self, rollout: Rollout) -> bool:
        """Append a rollout; False if the ring is full."""
        return self.ring.put(*rollout_parts(rollout))

    def get(self) -> Rollout | None:
        """Remove and return the oldest rollout, if any."""
        parts = self.ring.get()
        return None if parts is None else as_rollout(*parts, self.spec, self.lanes, self.num_info)

    @property
    def compression_stats(self) -> CompressionStats:
        """Bytes saved and time spent by compression in this process."""
        return self.ring.compression_stats

    def __len__(self) -> int:
        return len(self.ring)

    def close(self) -> None:
        """Release the memory."""
        self.ring.close()


class SharedCounters:
    """Counters of every worker for the driver to read; only the worker itself writes its counters."""

    def __init__(self, names: Sequence[str], workers: int, *, region: SharedMemory | None = None) -> None:
        self.names = tuple(names)
        self.workers = workers
        width = round_to_cache_lines(8 * len(self.names))
        self.region = region or SharedMemory(workers * width)
        self.table = np.frombuffer(self.region.view, np.int64).reshape(workers, width // 8)
        self.columns = {name: column for column, name in enumerate(self.names)}

    def set(self, worker: int, **values: int) -> None:
        """Set some of a worker's counters."""
        for name, value in values.items():
            self.table[worker, self.columns[name]] = value

    def add(self, worker: int, **values: int) -> None:
        """Increase some of a worker's counters."""
        for name, value in values.items():
            self.table[worker, self.columns[name]] += value

    def read(self, worker: int) -> dict[str, int]:
        """A worker's counters."""
        return dict(zip(self.names, self.table[worker].tolist(), strict=False))  # a row is padded to cache lines

    def column(self, name: str) -> list[int]:
        """One counter of every worker."""
        values: list[int] = self.table[:, self.columns[name]].tolist()
        return values

    def clear(self, worker: int) -> None:
        """Set all counters of a worker to zero, before it is restarted."""
        self.table[worker] = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SharedCounters, region=self.region), (self.names, self.workers)

    def close(self) -> None:
        """Release the memory."""
        self.table = np.zeros_like(self.table)
        self.region.close()
