"""The shards that are open, in bounded memory, and the next ones, which a thread reads ahead of need."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from qfleet.data import Spec
from qfleet.datasets.format import DataFile, Dataset
from qfleet.datasets.storage import ArrayCache
from qfleet.learn.offline.read_ahead import ReadAhead
from qfleet.learn.offline.shards import DataShard, decoded_row_bytes, load_shard, map_shard


@dataclass(eq=False)
class ShardCache:
    """Keeps the shards used last, in at most `max_bytes` of memory or of mapped files; the one in use always stays."""

    dataset: Dataset
    files: list[DataFile]
    spec: Spec
    max_bytes: int
    disk: ArrayCache | None = None  # where decoded files are mapped from; None: they are in memory
    num_loads: int = 0
    num_decoded: int = 0
    shards: OrderedDict[int, DataShard] = field(default_factory=OrderedDict)
    _ahead: ReadAhead[DataShard] | None = None
    _reserved: int = 0  # bytes of those that are read ahead

    def shard(self, number: int) -> DataShard:
        """The shard with this number, loaded if it is not here."""
        if number in self.shards:
            self.shards.move_to_end(number)
            return self.shards[number]
        ready = None if self._ahead is None else self._ahead.take(number)
        shard = self.load(number) if ready is None else ready
        self.num_loads += 1
        self.num_decoded += shard.decoded
        self.shards[number] = shard
        while len(self.shards) > 1 and self.num_bytes() > self.max_bytes - self._reserved:
            self.shards.popitem(last=False)
        return shard

    def load(self, number: int) -> DataShard:
        """Decode or map a data file."""
        if self.disk is None:
            return load_shard(self.dataset, self.files[number], self.spec)
        return map_shard(self.dataset, self.files[number], self.spec, self.disk)

    def open_ahead(self, num: int) -> None:
        """Read at most `num` shards ahead from now on, within the same memory."""
        if num > 0:
            self._ahead = ReadAhead(self.load, num)
            self._reserved = num * self.largest_bytes()

    def read_ahead(self, numbers: Sequence[int]) -> None:
        """Begin to read the first of these shards that are not here."""
        if self._ahead is not None:
            self._ahead.want([number for number in numbers if number not in self.shards])

    def largest_bytes(self) -> int:
        """Bytes of the largest shard."""
        return max(file.rows for file in self.files) * decoded_row_bytes(self.spec)

    def num_bytes(self, *, mapped: bool | None = None) -> int:
        """Bytes of all open shards, or only of those that are mapped from files, or in memory."""
        return sum(shard.num_bytes for shard in self.shards.values() if mapped in (None, shard.mapped))

    def close(self) -> None:
        """Release the shards, and end the thread."""
        if self._ahead is not None:
            self._ahead.close()
        self.shards.clear()
