"""The work on one unit: row groups of its input files are divided among its output files, by Arrow's columns.

An order says all that the work needs, in bytes, and so does its answer: any process that can reach both places can do
it. The same order has the same answer, and writes the same files.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from qfleet.data import Array
from qfleet.datasets.format import (
    DataFile,
    Dataset,
    EpisodeBlock,
    Layout,
    Split,
    Statistics,
    StepRows,
    block_statistics,
    merge_statistics,
    open_dataset,
    open_parquet,
    put_file,
    require_arrow,
)
from qfleet.datasets.prepare.units import Unit
from qfleet.datasets.storage import Place, open_place
from qfleet.errors import QfleetError, StorageError, UsageError

Count = Annotated[int, Meta(ge=0)]


class OrderedEpisode(msgspec.Struct, frozen=True, array_like=True):
    """Where an episode is in its input file, and the number of its output file; -1: it is left out."""

    id: str
    row_group: Count
    row: Count
    length: Count
    output: int


class OrderedInput(msgspec.Struct, frozen=True):
    """An input file, and its episodes."""

    file: DataFile
    episodes: list[OrderedEpisode]


class OrderedOutput(msgspec.Struct, frozen=True):
    """An output file, and how many episodes each of its row groups has."""

    name: str
    split: Split
    groups: list[Count]


class UnitOrder(msgspec.Struct, frozen=True):
    """What is done in one unit."""

    source: str  # URL and version of the data set
    version: str
    target: str
    inputs: list[OrderedInput]
    outputs: list[OrderedOutput]


class UnitDone(msgspec.Struct, tag="done"):
    """The files that a unit has written, in the order of its outputs, and the statistics of each."""

    files: list[DataFile]
    statistics: list[Statistics]


class UnitRefused(msgspec.Struct, tag="refused"):
    """The error that ended a unit."""

    what: str
    why: str
    fix: str
    exit_code: int

    def error(self) -> QfleetError:
        """The error, to be raised."""
        kind = {UsageError.exit_code: UsageError, StorageError.exit_code: StorageError}.get(self.exit_code, QfleetError)
        return kind(self.what, self.why, self.fix)


def unit_order(unit: Unit, source: Dataset, target: Place) -> bytes:
    """The order of a unit."""
    inputs = []
    for each in unit.inputs:
        rows = zip(each.episodes, each.outputs, strict=True)
        found = [OrderedEpisode(row.id, row.row_group, row.row, row.length, output) for row, output in rows]
        inputs.append(OrderedInput(each.file, found))
    outputs = [OrderedOutput(each.name, each.split, each.groups) for each in unit.outputs]
    return msgspec.msgpack.encode(UnitOrder(source.place.url, source.version, target.url, inputs, outputs))


def unit_result(answer: bytes) -> UnitDone:
    """What a unit has written; raises the error that ended it."""
    found = msgspec.msgpack.decode(answer, type=UnitDone | UnitRefused)
    if isinstance(found, UnitRefused):
        raise found.error()
    return found


def do_unit(order: bytes) -> bytes:
    """Do the work on one unit; the answer says what was written, or what is wrong."""
    try:
        return msgspec.msgpack.encode(_written(msgspec.msgpack.decode(order, type=UnitOrder)))
    except QfleetError as error:
        return msgspec.msgpack.encode(UnitRefused(error.what, error.why, error.fix, error.exit_code))


@lru_cache(maxsize=2)
def _source(url: str, version: str) -> Dataset:
    """The data set that is read; a process opens it once."""
    return open_dataset(url, version)


def _written(order: UnitOrder) -> UnitDone:
    dataset = _source(order.source, order.version)
    target = open_place(order.target)
    layout = dataset.manifest.layout
    outputs = [GrowingFile(layout, each) for each in order.outputs]
    files: dict[int, DataFile] = {}
    for each in order.inputs:
        chosen = np.array([episode.output for episode in each.episodes])
        begin = 0
        for table, rows in dataset.tables(each.file, each.episodes):
            lengths = np.diff(rows.starts())
            wanted = chosen[begin : begin + len(lengths)]
            begin += len(lengths)
            for number in np.unique(wanted[wanted >= 0]).tolist():
                outputs[number].add(table, rows, lengths, wanted == number)
                if outputs[number].is_complete:
                    files[number] = outputs[number].write(target)
    done = [files[number] for number in range(len(outputs))]
    return UnitDone(done, [each.statistics for each in outputs if each.statistics is not None])


@dataclass(eq=False)
class GrowingFile:
    """An output file, in memory until it is complete; `waiting` are rows of the row group that is not complete yet."""

    layout: Layout
    order: OrderedOutput
    waiting: list[Any] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # in rows, one more than steps
    num_groups: int = 0
    rows: int = 0
    episodes: int = 0
    statistics: Statistics | None = None
    _sink: Any = None
    _writer: Any = None

    @property
    def is_complete(self) -> bool:
        """Has it all of its row groups?"""
        return self.num_groups == len(self.order.groups)

    def add(self, table: Any, rows: StepRows, lengths: Array, chosen: Array) -> None:  # [E] rows, [E] bool
        """Add the chosen episodes of a table."""
        pa = require_arrow()
        kept = np.repeat(chosen, lengths)
        plain = table.drop_columns(["episode"])
        self.waiting.append(plain if kept.all() else plain.filter(pa.array(kept)))
        starts = np.asarray(rows.starts()[:-1])[chosen]
        self.ids += [rows.episode[at] for at in starts.tolist()]
        self.lengths += lengths[chosen].tolist()
        found = block_statistics(_kept_block(rows, lengths[chosen], kept), self.layout.num_actions)
        self.statistics = merge_statistics([*([self.statistics] if self.statistics else []), found])
        while not self.is_complete and len(self.ids) >= self.order.groups[self.num_groups]:
            self._end_group(self.order.groups[self.num_groups])

    def _end_group(self, num: int) -> None:
        pa = require_arrow()
        num_rows = sum(self.lengths[:num])
        whole = pa.concat_tables(self.waiting)
        self.waiting = [whole.slice(num_rows)] if len(whole) > num_rows else []
        # Ids are written as they are read: each is in memory once, however many rows it has.
        numbers = pa.array(np.repeat(np.arange(num, dtype=np.int32), self.lengths[:num]))
        ids = pa.DictionaryArray.from_arrays(numbers, pa.array(self.ids[:num], pa.string()))
        group = whole.slice(0, num_rows).add_column(0, pa.field("episode", ids.type, nullable=False), ids)
        if self._writer is None:
            self._sink, self._writer = open_parquet(group.schema, store_schema=False)
        self._writer.write_table(group, row_group_size=num_rows)
        del self.ids[:num], self.lengths[:num]
        self.num_groups += 1
        self.rows += num_rows
        self.episodes += num

    def write(self, target: Place) -> DataFile:
        """Write the complete file."""
        self._writer.close()
        file = put_file(target, self.order.name, bytes(self._sink.getvalue()))
        self._sink = None
        steps = self.rows - self.episodes
        counts = {"rows": self.rows, "episodes": self.episodes, "steps": steps}
        return msgspec.structs.replace(file, split=self.order.split, **counts)


def _kept_block(rows: StepRows, lengths: Array, kept: Array) -> EpisodeBlock:  # [E] rows, [R] bool
    """What statistics need of some episodes."""
    whole = bool(kept.all())
    none = np.zeros(len(lengths), np.bool_)
    return EpisodeBlock(
        ids=[],
        behaviours=[],
        lengths=lengths - 1,
        terminated=none,
        truncated=none,
        observations={name: array if whole else array[kept] for name, array in rows.observations.items()},
        action=rows.action[kept],
        reward=rows.reward[kept],
        probability=rows.probability[kept],
    )
