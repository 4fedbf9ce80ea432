"""Parcels: a small dict and named arrays as one flat buffer, for shared memory and for wires. Nothing is pickled.

Layout, little-endian: header (checksum, magic, format, number, length, bytes of the table), the table as msgpack, then
the arrays, each from a multiple of 16 bytes on. The checksum covers every other byte of the parcel, so that half a
parcel, a mixture of two, and one damaged on its way are refused. What the table says is believed only within limits.
"""

import importlib
import math
import struct
import zlib
from collections.abc import Collection
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct

from qfleet.data.types import Array
from qfleet.errors import UsageError

Scalar: TypeAlias = bool | int | float | str | None
Facts: TypeAlias = dict[str, Scalar | Annotated[list[Scalar], Meta(max_length=4096)]]
Arrays: TypeAlias = dict[str, Array]
Parts: TypeAlias = tuple[Facts, Arrays]

# Plain numbers only, in the byte order of the format.
Dtype = Literal["|b1", "|u1", "|i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8"]
Size = Annotated[int, Meta(ge=0, le=2**40)]
DTYPES = frozenset(get_args(Dtype))

MAGIC = 0x4C504651
FORMAT = 1
ALIGN = 16
# magic, format, number, length, bytes of the table
CHECK = struct.Struct("<Q")
HEAD = struct.Struct("<IIQQQ")
HEADER_BYTES = CHECK.size + HEAD.size
NUMBER_WORD = 2  # where the number lies, in words of 8 bytes
SMALL_BYTES = 1 << 16
ROW_WORDS = 4096


class MessageTooLarge(ValueError):
    """A parcel does not fit where it should go."""


class MessageNotWhole(ValueError):
    """These bytes are not one whole parcel: not there yet, torn or damaged."""


class ArrayEntry(Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """One array, as the table describes it."""

    name: Annotated[str, Meta(max_length=64)]
    dtype: Dtype
    shape: Annotated[tuple[Size, ...], Meta(max_length=8)]
    stored_bytes: Size
    squeezed: bool


class ArrayTable(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a parcel holds; where each array lies follows from the order and the sizes."""

    facts: Facts
    entries: Annotated[list[ArrayEntry], Meta(max_length=256)]


ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(ArrayTable)


class ArrayMessage(NamedTuple):
    """A parcel before it is written."""

    table: bytes
    arrays: list[Array]
    length: int


def pack(meta: Facts, arrays: Arrays, into: memoryview, *, compress: Collection[str] = (), number: int = 0) -> int:
    """Write a parcel into this memory; returns its length. A ring gives its slots a `number`."""
    return write(lay_out(meta, arrays, compress), into, number)


def packed_bytes(meta: Facts, arrays: Arrays) -> int:
    """How long the parcel is without compression; with it, the parcel is never longer."""
    return lay_out(meta, arrays).length


def to_bytes(meta: Facts, arrays: Arrays, *, compress: Collection[str] = ()) -> bytes:
    """The parcel as bytes of its own."""
    contents = lay_out(meta, arrays, compress)
    memory = bytearray(contents.length)
    write(contents, memoryview(memory), 0)
    return bytes(memory)


def unpack(view: memoryview | bytes, *, limit_bytes: int, number: int | None = None) -> Parts:
    """What a parcel holds, in memory of its own; anything that is not as `pack` writes it is a ValueError."""
    # A copy first, then the check of the copy: another process may write while this one reads.
    own, begin = copy_whole(memoryview(view).cast("B"), limit_bytes, number)
    try:
        table = DECODER.decode(own[HEADER_BYTES:begin].data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the parcel's table: {error}") from error
    return table.facts, read_arrays(own, begin, table.entries, limit_bytes)


def lay_out(meta: Facts, arrays: Arrays, compress: Collection[str] = ()) -> ArrayMessage:
    """Describe the arrays, and compress those named where that makes them smaller."""
    entries = []
    stored = []
    for name, array in arrays.items():
        if array.dtype.str not in DTYPES:
            raise ValueError(f"{name}: arrays of {array.dtype} cannot be sent")
        small = squeeze(array) if name in compress else None
        part = array if small is None else np.frombuffer(small, np.uint8)
        entries.append(ArrayEntry(name, array.dtype.str, array.shape, part.nbytes, small is not None))  # type: ignore[arg-type]
        stored.append(part)
    table = ENCODER.encode(ArrayTable(meta, entries))
    length = aligned(HEADER_BYTES + len(table)) + sum(aligned(part.nbytes) for part in stored)
    return ArrayMessage(table, stored, length)


def write(contents: ArrayMessage, into: memoryview, number: int) -> int:
    """The parcel's bytes; the header comes last, so that a reader hardly ever meets half a parcel."""
    table, arrays, length = contents
    if length > len(into):
        raise MessageTooLarge(f"a parcel of {length} bytes does not fit into {len(into)}")
    end = HEADER_BYTES + len(table)
    into[HEADER_BYTES:end] = table
    for array in arrays:
        begin = fill_up(into, end)
        np.ndarray(array.shape, array.dtype, into, begin)[...] = array
        end = begin + array.nbytes
    fill_up(into, end)
    head = HEAD.pack(MAGIC, FORMAT, number, length, len(table))
    check = checksum(np.frombuffer(into, np.uint8, length - HEADER_BYTES, HEADER_BYTES), zlib.crc32(head))
    into[:HEADER_BYTES] = CHECK.pack(check) + head
    return length


def copy_whole(view: memoryview, limit_bytes: int, number: int | None) -> tuple[Array, int]:
    """A copy of the parcel that begins here, and where its table ends; NotWhole if there is none."""
    if len(view) < HEADER_BYTES:
        raise MessageNotWhole(f"{len(view)} bytes are too few for a parcel")
    header = bytes(view[:HEADER_BYTES])
    (check,) = CHECK.unpack_from(header)
    (magic, form, found, length, table_bytes) = HEAD.unpack_from(header, 8)
    if (magic, form) != (MAGIC, FORMAT) or found != (found if number is None else number):
        raise MessageNotWhole(f"not the parcel expected: magic {magic:#x}, format {form}, number {found}")
    begin = HEADER_BYTES + table_bytes
    if not begin <= length <= min(len(view), limit_bytes) or length % ALIGN:
        raise MessageNotWhole(f"a parcel of {length} bytes, {table_bytes} of them its table, in {len(view)}")
    own = np.empty(length, np.uint8)
    own[:] = np.frombuffer(view, np.uint8, length)
    if checksum(own[HEADER_BYTES:], zlib.crc32(header[CHECK.size :])) != check:
        raise MessageNotWhole("the parcel's checksum is wrong")
    return own, begin


def read_arrays(own: Array, end: int, entries: list[ArrayEntry], limit_bytes: int) -> Arrays:
    """The arrays behind the table, as views of `own` where they were not compressed."""
    arrays: Arrays = {}
    for entry in entries:
        begin = aligned(end)
        wanted = math.prod(entry.shape) * np.dtype(entry.dtype).itemsize
        end = begin + entry.stored_bytes
        limit_bytes = limit_bytes - wanted
        if entry.name in arrays or limit_bytes < 0 or end > len(own):
            raise ValueError(f"{entry.name}: {entry.dtype} {entry.shape} does not fit into the parcel")
        raw = unsqueeze(own[begin:end], wanted) if entry.squeezed else own[begin:end]
        if len(raw) != wanted:
            raise ValueError(f"{entry.name}: {len(raw)} bytes for {entry.dtype} {entry.shape}")
        if entry.dtype == "|b1" and raw.size and raw.max() > 1:
            raise ValueError(f"{entry.name}: not only true and false")
        arrays[entry.name] = np.ndarray(entry.shape, entry.dtype, raw)
    if aligned(end) != len(own):
        raise ValueError(f"{len(own) - aligned(end)} bytes behind the last array")
    return arrays


def checksum(data: Array, start: int = 0) -> int:  # [bytes] uint8, a multiple of 8
    """A CRC of short data. Long data is first folded, at the speed of memory, into rows and columns.

    Every column of 64-bit words is summed, and every row after a multiplication by odd numbers. A change that spares
    all column sums is in two rows at least, and there it is seen unless several changes cancel by the odd numbers.
    """
    if data.size < SMALL_BYTES:
        return zlib.crc32(data.data, start)
    words = data.view(np.uint64)
    whole = len(words) // ROW_WORDS * ROW_WORDS
    rows = words[:whole].reshape(-1, ROW_WORDS)
    return zlib.crc32(words[whole:].data, zlib.crc32((rows @ ODD).data, zlib.crc32(rows.sum(0).data, start)))


def odd_numbers(num: int) -> Array:  # [num] uint64
    """As good as random (SplitMix64), and the same everywhere."""
    mixed = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


ODD = odd_numbers(ROW_WORDS)


def squeeze(array: Array) -> bytes | None:
    """The array compressed, if that is smaller."""
    small: bytes = lz4_block().compress(np.ascontiguousarray(array).tobytes(), store_size=False)
    return small if len(small) < array.nbytes else None


def unsqueeze(small: Array, wanted_bytes: int) -> Array:  # -> [bytes] uint8
    """What was compressed, if it is as long as it should be."""
    block = lz4_block()
    try:
        raw = block.decompress(small.tobytes(), uncompressed_size=wanted_bytes, return_bytearray=True)
    except (block.LZ4BlockError, OverflowError) as error:
        raise ValueError(f"a compressed array: {error}") from error
    return np.frombuffer(raw, np.uint8)


def lz4_block() -> Any:
    """The compressor, which is an extra."""
    try:
        return importlib.import_module("lz4.block")
    except ImportError as error:
        raise UsageError(
            "Compression is asked for, but lz4 is not installed.",
            "Compression in flight and in the store is an extra.",
            "Install it with `pip install 'qfleet[lz4]'`, or switch compression off.",
        ) from error


def aligned(position: int) -> int:
    """The next place where an array may begin."""
    return -(-position // ALIGN) * ALIGN


def fill_up(into: memoryview, position: int) -> int:
    """Zeros up to the next place where an array may begin; returns it."""
    begin = aligned(position)
    if begin > position:
        into[position:begin] = bytes(begin - position)
    return begin
