"""Writing blocks of episodes into data files, in a thread of its own beside who records."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import numpy as np

from qfleet.datasets.format.arrow import require_arrow
from qfleet.datasets.format.block import (
    EpisodeBlock,
    block_statistics,
    block_table,
    content_hashes,
    join_blocks,
    rows_block,
)
from qfleet.datasets.format.bounded import BoundedParquet
from qfleet.datasets.format.index import IndexRow
from qfleet.datasets.format.manifest import DataFile, Description
from qfleet.datasets.format.reader import damaged
from qfleet.datasets.format.statistics import merge_statistics
from qfleet.datasets.format.tables import read_rows
from qfleet.datasets.format.writer import FILE_BYTES, GROUP_BYTES, LEVEL, WrittenFiles
from qfleet.datasets.storage import Place
from qfleet.errors import StorageError, UsageError

WRITE_SECONDS = 600  # more than a store may take for one file with all its retries


@dataclass(eq=False)
class BlockWriter:
    """Writes blocks into data files `data/PREFIXall-NUMBER.parquet`, at most `file_bytes` each if they fit.

    In memory are the blocks of one file that is not full, and those of one that is being written.
    """

    place: Place
    description: Description
    seed: int | None = None
    file_bytes: int = FILE_BYTES
    prefix: str = ""
    number: int = 0  # of the next file
    waiting: list[EpisodeBlock] = field(default_factory=list)  # of the file that is not full
    finished: list[WrittenFiles] = field(default_factory=list)
    _bytes: int = 0
    _pool: ThreadPoolExecutor | None = None
    _writing: Future[WrittenFiles] | None = None

    def add(self, block: EpisodeBlock) -> None:
        """Add episodes; refuses those that break the format's rules."""
        if problem := block.problem():
            raise UsageError(
                f"{problem}: it cannot be written",
                "A data set holds whole episodes of finite numbers: T actions between T + 1 observations.",
                "Correct the environment, or leave that number out of its observations and rewards.",
            )
        for part in block.parts(self.file_bytes):
            if self.waiting and self._bytes + part.num_bytes > self.file_bytes:
                self.end_file()
            self.waiting.append(part)
            self._bytes += part.num_bytes

    def end_file(self) -> None:
        """Begin to write what is waiting, when the file before it is written."""
        self.finish_writing()
        if not self.waiting:
            return
        blocks = self.waiting
        name = f"data/{self.prefix}all-{self.number:05d}.parquet"
        self.restart(self.number + 1)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "data-writer")
        self._writing = self._pool.submit(write_blocks, self.place, name, blocks, self.description, self.seed)

    def finish_writing(self) -> None:
        """Return when every file that was begun is written."""
        if self._writing is None:
            return
        writing = self._writing
        self._writing = None
        try:
            self.finished.append(writing.result(timeout=WRITE_SECONDS))
        except TimeoutError as error:
            raise StorageError(
                f"a data file is not written to {self.place.url} after {WRITE_SECONDS} seconds",
                "The place does not answer, or it is very slow.",
                "Check it and its connection, and start again; files without a manifest are no data set.",
            ) from error

    def restart(self, number: int) -> None:
        """Forget what is waiting; the next file has this number."""
        self.waiting = []
        self._bytes = 0
        self.number = number

    def finish(self) -> WrittenFiles:
        """Write what is waiting; returns everything that was written."""
        self.end_file()
        self.finish_writing()
        whole = WrittenFiles()
        for each in self.finished:
            whole.add(each)
        return whole

    def close(self) -> None:
        """End the thread; a file that is being written is finished."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def write_blocks(
    place: Place, name: str, blocks: Sequence[EpisodeBlock], description: Description, seed: int | None
) -> WrittenFiles:
    """Write one data file; returns its entry, the index of its episodes and their statistics."""
    block = join_blocks(blocks)
    parts = list(block.parts(GROUP_BYTES))
    data = encode_groups(parts, description)
    place.write(name, data)
    entry = DataFile(name, len(data), hashlib.sha256(data).hexdigest())
    return _indexed(entry, parts, description, seed)


def encode_groups(groups: Sequence[EpisodeBlock], description: Description) -> bytes:
    """The bytes of a data file with these row groups."""
    pa = require_arrow()
    layout = description.layout
    sink = pa.BufferOutputStream()
    options = {"compression": "zstd", "compression_level": LEVEL, "use_dictionary": ["episode"]}
    with pa.parquet.ParquetWriter(sink, layout.schema(), **options) as writer:
        for group in groups:
            table = block_table(group, layout)
            writer.write_table(table, row_group_size=len(table))
    return bytes(sink.getvalue())


def index_file(
    place: Place, file: DataFile, description: Description, seed: int | None, behaviour: str
) -> WrittenFiles:
    """The index and the statistics of a data file that was written before; StorageError if it is another one now."""
    data = place.read(file.name, file.bytes)
    if len(data) != file.bytes or hashlib.sha256(data).hexdigest() != file.sha256:
        raise damaged(place, file.name, "its bytes are not those that were written")
    layout = description.layout
    groups = BoundedParquet(data, layout.schema(), file.rows, layout.row_bytes).groups()
    blocks = [rows_block(read_rows(table, layout), behaviour) for table in groups]
    return _indexed(file, blocks, description, seed)


def _indexed(
    entry: DataFile, groups: Sequence[EpisodeBlock], description: Description, seed: int | None
) -> WrittenFiles:
    """A data file with the index of its episodes and their statistics."""
    rows: list[IndexRow] = []
    begin = 0
    for number, group in enumerate(groups):
        rows += block_index(group, entry.name, number, begin, description.env_id, seed)
        begin += len(group.action)
    entry = msgspec.structs.replace(
        entry, rows=begin, episodes=len(rows), steps=sum(group.num_steps for group in groups)
    )
    statistics = merge_statistics(block_statistics(group, description.layout.num_actions) for group in groups)
    return WrittenFiles([entry], rows, {} if statistics is None else {"all": statistics})


def block_index(
    block: EpisodeBlock, file: str, group: int, begin: int, env_id: str, seed: int | None
) -> list[IndexRow]:
    """The rows of the index for the episodes of a block."""
    hashes = content_hashes(block)
    return [
        IndexRow(
            id=id,
            file=file,
            row_group=group,
            row=begin + start,
            length=length,
            undiscounted_return=float(np.sum(block.reward[start : start + length])),
            terminated=terminated,
            truncated=truncated,
            seed=seed,
            world=env_id,
            behaviour=behaviour,
            split="all",
            hash=hashed,
        )
        for id, behaviour, start, length, terminated, truncated, hashed in zip(
            block.ids,
            block.behaviours,
            block.starts.tolist(),
            block.lengths.tolist(),
            block.terminated.tolist(),
            block.truncated.tolist(),
            hashes,
            strict=True,
        )
    ]
