"""Frames in compressed blocks of 16 rows of one lane, lossless; the newest block of every lane stays uncompressed.

Consecutive frames are nearly the same, so a block of them packs far better than each by itself (Pong: 70 times). To be
read, blocks are unpacked side by side; `table` holds their first frame. Shapes: R rows, L lanes, D integers of a frame,
F frames, M blocks of the ring.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qfleet.data import Array
from qfleet.data.wire_format import lz4_block
from qfleet.replay.kernels import BLOCK


@dataclass(frozen=True)
class CompressionSavings:
    """Memory saved and time spent by compression since the store was made."""

    raw_bytes: int  # of the frames in blocks
    packed_bytes: int  # of these blocks
    packed_blocks: int
    pack_seconds: float
    unpacked_blocks: int
    unpack_seconds: float

    @property
    def ratio(self) -> float:
        """How many times smaller the blocks are."""
        return self.raw_bytes / self.packed_bytes if self.packed_bytes else 1.0


class CompressedFrames:
    """The observations of a store of R rows."""

    def __init__(self, lanes: int, rows: int, frame: Array) -> None:
        self.lanes = lanes
        self.lz4 = lz4_block()
        blocks = rows // BLOCK + 1  # the newest R rows may begin within one
        self.blobs: list[bytes | None] = [None] * (blocks * lanes)
        self.table = np.zeros((blocks, lanes), np.int64)  # index of an unpacked block's first frame
        # The open block of every lane, [16, L] frames, followed by the unpacked blocks.
        self.frames = np.zeros((BLOCK * lanes, *frame.shape), frame.dtype)
        self.packed_blocks = self.unpacked_blocks = self.packed_bytes = 0
        self.pack_seconds = self.unpack_seconds = 0.0

    @property
    def open_blocks(self) -> Array:  # [16, L, D]
        """The rows of each lane's newest block."""
        return self.frames[: BLOCK * self.lanes].reshape(BLOCK, self.lanes, -1)

    def key(self, block: int, lane: int) -> int:
        """The index of a block in `blobs`."""
        return block % len(self.table) * self.lanes + lane

    def pack_complete(self, heads: Array, begin: int, end: int) -> None:
        """Pack the open blocks of lanes [begin, end) that are complete."""
        for lane in range(begin, end):
            if heads[lane] % BLOCK == 0:
                self.pack(int(heads[lane]) // BLOCK - 1, lane, self.open_blocks[:, lane])

    def pack(self, block: int, lane: int, frames: Array) -> None:
        """Compress the frames [16, D] of this block."""
        started = time.monotonic()
        key = self.key(block, lane)
        before = self.blobs[key]
        packed: bytes = self.lz4.compress(np.ascontiguousarray(frames), store_size=False)
        self.blobs[key] = packed
        self.packed_bytes += len(packed) - (0 if before is None else len(before))
        self.packed_blocks += 1
        self.pack_seconds += time.monotonic() - started

    def unpack(self, key: int) -> Array:  # [16, D]
        """The frames of a block; zeros if it was never written."""
        blob = self.blobs[key]
        shape = (BLOCK, *self.frames.shape[1:])
        if blob is None:
            return np.zeros(shape, self.frames.dtype)
        size = self.frames[:BLOCK].nbytes
        raw: bytes = self.lz4.decompress(blob, uncompressed_size=size)
        return np.frombuffer(raw, self.frames.dtype).reshape(shape)

    def unpack_rows(self, rows: Array, lanes: Array, heads: Array) -> None:
        """Unpack the blocks of these rows (in these lanes); their table entries are valid until the next call."""
        started = time.monotonic()
        blocks, lanes = np.broadcast_arrays(rows // BLOCK, lanes)
        closed = (rows >= 0) & (blocks < heads[lanes] // BLOCK)
        keys = np.unique(blocks[closed] % len(self.table) * self.lanes + lanes[closed])
        first = BLOCK * self.lanes
        if len(self.frames) < first + BLOCK * len(keys):
            longer = np.empty((first + BLOCK * len(keys), *self.frames.shape[1:]), self.frames.dtype)
            longer[:first] = self.frames[:first]
            self.frames = longer
        for place, key in enumerate(keys.tolist()):
            at = first + BLOCK * place
            self.frames[at : at + BLOCK] = self.unpack(key)
        self.table.ravel()[keys] = first + BLOCK * np.arange(len(keys))
        self.unpacked_blocks += len(keys)
        self.unpack_seconds += time.monotonic() - started

    def read(self, begin: int, end: int, lanes: range, heads: Array) -> Array:  # [T, B, D]
        """Rows [begin, end) of these lanes."""
        out = np.empty((end - begin, len(lanes), *self.frames.shape[1:]), self.frames.dtype)
        for block, in_block, in_range in block_slices(begin, end):
            for i, lane in enumerate(lanes):
                newest = block == heads[lane] // BLOCK
                frames = self.open_blocks[:, lane] if newest else self.unpack(self.key(block, lane))
                out[in_range, i] = frames[in_block]
        return out

    def restore(self, begin: int, end: int, lanes: range, values: Array) -> None:
        """Put rows [begin, end) of these lanes back; earlier rows of their first block become zeros.

        A block that `end` leaves incomplete is the newest of its lane, so every call but the last must end at a block's
        end.
        """
        for block, in_block, in_range in block_slices(begin, end):
            for i, lane in enumerate(lanes):
                frames = np.zeros((BLOCK, *self.frames.shape[1:]), self.frames.dtype)
                frames[in_block] = values[in_range, i]
                if in_block.stop < BLOCK:
                    self.open_blocks[:, lane] = frames
                else:
                    self.pack(block, lane, frames)

    def compression_savings(self) -> CompressionSavings:
        """The numbers so far."""
        blocks = sum(blob is not None for blob in self.blobs)
        raw = blocks * self.frames[:BLOCK].nbytes
        packing = (self.packed_blocks, self.pack_seconds)
        return CompressionSavings(raw, self.packed_bytes, *packing, self.unpacked_blocks, self.unpack_seconds)


def block_slices(begin: int, end: int) -> Iterator[tuple[int, slice, slice]]:
    """For each block of rows [begin, end): its number, and the rows within the block and within [begin, end)."""
    for block in range(begin // BLOCK, -(-end // BLOCK)):
        first = block * BLOCK
        low = max(begin, first)
        high = min(end, first + BLOCK)
        yield block, slice(low - first, high - first), slice(low - begin, high - begin)
