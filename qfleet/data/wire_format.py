"""Wire format of messages: a typed struct and named arrays as one flat buffer. Nothing is pickled.

Layout, little-endian: header (checksum, magic, format, number, length, bytes of the table), the table as msgpack, then
the arrays, each aligned to 16 bytes. The checksum covers every other byte of the message, so that half a message, a
mixture of two, and one damaged in transit are refused. Sizes in the table are checked against limits, and the struct
against the types that the receiver expects.
"""

import importlib
import math
import struct
import zlib
from collections.abc import Collection
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct

from qfleet.data.types import Array
from qfleet.errors import UsageError
from qfleet.install import install_command

Arrays: TypeAlias = dict[str, Array]
Count: TypeAlias = Annotated[int, Meta(ge=0)]

# Numbers and booleans only, in the byte order of the format.
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
NUMBER_INDEX = 2  # of the number, counted in 8-byte integers from the header's start
SMALL_BYTES = 1 << 16
CHECKSUM_COLUMNS = 4096


class MessageTooLarge(ValueError):
    """A message does not fit into the memory given."""


class MessageNotWhole(ValueError):
    """These bytes are not one whole message: not written yet, torn or damaged."""


class Message(Struct, tag=True, forbid_unknown_fields=True):
    """A message without its arrays; each kind of message is a class of its own, named in what is sent."""


Parts: TypeAlias = tuple[Any, Arrays]  # a Message and its arrays


class ArrayEntry(Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """The table's description of one array."""

    name: Annotated[str, Meta(max_length=64)]
    dtype: Dtype
    shape: Annotated[tuple[Size, ...], Meta(max_length=8)]
    stored_bytes: Size
    compressed: bool


class ArrayTable(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The struct of a message and its arrays' descriptions; offsets follow from the order and the sizes."""

    message: msgspec.Raw
    entries: Annotated[list[ArrayEntry], Meta(max_length=256)]


ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(ArrayTable)


class ArrayMessage(NamedTuple):
    """A message before it is written: its encoded table, its arrays as they are stored, and its length in bytes."""

    table: bytes
    arrays: list[Array]
    length: int


def pack(message: Message, arrays: Arrays, into: memoryview, *, compress: Collection[str] = (), number: int = 0) -> int:
    """Write a message into this memory; returns its length. A ring gives its slots a `number`."""
    return write_message(lay_out_message(message, arrays, compress), into, number)


def packed_bytes(message: Message, arrays: Arrays) -> int:
    """The length of the message without compression; with it, the message is never longer."""
    return lay_out_message(message, arrays).length


def to_bytes(message: Message, arrays: Arrays | None = None, *, compress: Collection[str] = ()) -> bytes:
    """The message in new memory."""
    flat = lay_out_message(message, arrays or {}, compress)
    memory = bytearray(flat.length)
    write_message(flat, memoryview(memory), 0)
    return bytes(memory)


def unpack(view: memoryview | bytes, kind: Any, *, limit_bytes: int, number: int | None = None) -> Parts:
    """A message of this kind (a class of messages or a union of them) and its arrays, in new memory.

    Any deviation from what `pack` writes is a ValueError.
    """
    # Copy first, then check the copy: another process may write while this one reads.
    own, begin = copy_message(memoryview(view).cast("B"), limit_bytes, number)
    try:
        table = DECODER.decode(own[HEADER_BYTES:begin].data)
        message = message_decoder(kind).decode(table.message)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the message's table: {error}") from error
    return message, read_arrays(own, begin, table.entries, limit_bytes)


@lru_cache(maxsize=64)
def message_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of a kind of messages."""
    return msgspec.msgpack.Decoder(kind)


def lay_out_message(message: Message, arrays: Arrays, compress: Collection[str] = ()) -> ArrayMessage:
    """Describe the arrays; compress those named in `compress` if that makes them smaller."""
    entries = []
    stored = []
    for name, array in arrays.items():
        if array.dtype.str not in DTYPES:
            raise ValueError(f"{name}: arrays of {array.dtype} cannot be sent")
        small = compress_array(array) if name in compress else None
        part = array if small is None else np.frombuffer(small, np.uint8)
        entries.append(ArrayEntry(name, array.dtype.str, array.shape, part.nbytes, small is not None))  # type: ignore[arg-type]
        stored.append(part)
    table = ENCODER.encode(ArrayTable(msgspec.Raw(ENCODER.encode(message)), entries))
    length = aligned(HEADER_BYTES + len(table)) + sum(aligned(part.nbytes) for part in stored)
    return ArrayMessage(table, stored, length)


def write_message(message: ArrayMessage, into: memoryview, number: int) -> int:
    """Write a message, its header last, so that a reader hardly ever sees half a message; returns its length."""
    table, arrays, length = message
    if length > len(into):
        raise MessageTooLarge(f"a message of {length} bytes does not fit into {len(into)}")
    end = HEADER_BYTES + len(table)
    into[HEADER_BYTES:end] = table
    for array in arrays:
        begin = pad(into, end)
        np.ndarray(array.shape, array.dtype, into, begin)[...] = array
        end = begin + array.nbytes
    pad(into, end)
    head = HEAD.pack(MAGIC, FORMAT, number, length, len(table))
    check = checksum(np.frombuffer(into, np.uint8, length - HEADER_BYTES, HEADER_BYTES), zlib.crc32(head))
    into[:HEADER_BYTES] = CHECK.pack(check) + head
    return length


def copy_message(view: memoryview, limit_bytes: int, number: int | None) -> tuple[Array, int]:
    """A copy of the message that begins here, and where its table ends."""
    if len(view) < HEADER_BYTES:
        raise MessageNotWhole(f"{len(view)} bytes are too few for a message")
    header = bytes(view[:HEADER_BYTES])
    (check,) = CHECK.unpack_from(header)
    magic, version, found, length, table_bytes = HEAD.unpack_from(header, 8)
    if (magic, version) != (MAGIC, FORMAT) or found != (found if number is None else number):
        raise MessageNotWhole(f"not the message expected: magic {magic:#x}, format {version}, number {found}")
    begin = HEADER_BYTES + table_bytes
    if not begin <= length <= min(len(view), limit_bytes) or length % ALIGN:
        raise MessageNotWhole(f"a message of {length} bytes, {table_bytes} of them its table, in {len(view)}")
    own = np.empty(length, np.uint8)
    own[:] = np.frombuffer(view, np.uint8, length)
    if checksum(own[HEADER_BYTES:], zlib.crc32(header[CHECK.size :])) != check:
        raise MessageNotWhole("the message's checksum is wrong")
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
            raise ValueError(f"{entry.name}: {entry.dtype} {entry.shape} does not fit into the message")
        raw = decompress_array(own[begin:end], wanted) if entry.compressed else own[begin:end]
        if len(raw) != wanted:
            raise ValueError(f"{entry.name}: {len(raw)} bytes for {entry.dtype} {entry.shape}")
        if entry.dtype == "|b1" and raw.size and raw.max() > 1:
            raise ValueError(f"{entry.name}: not only true and false")
        arrays[entry.name] = np.ndarray(entry.shape, entry.dtype, raw)
    if aligned(end) != len(own):
        raise ValueError(f"{len(own) - aligned(end)} bytes after the last array")
    return arrays


def checksum(data: Array, start: int = 0) -> int:  # [bytes] uint8, a multiple of 8
    """The CRC of short data. Long data is first reduced to column sums and row products, at the speed of memory.

    Every column of 64-bit integers is summed, and every row after a multiplication by odd numbers. A change that leaves
    all column sums as they are changes two rows at least, and these products unless several changes cancel.
    """
    if data.size < SMALL_BYTES:
        return zlib.crc32(data.data, start)
    integers = data.view(np.uint64)
    whole = len(integers) // CHECKSUM_COLUMNS * CHECKSUM_COLUMNS
    rows = integers[:whole].reshape(-1, CHECKSUM_COLUMNS)
    check = zlib.crc32((rows @ ODD).data, zlib.crc32(rows.sum(0).data, start))
    return zlib.crc32(integers[whole:].data, check)


def odd_numbers(num: int) -> Array:  # [num] uint64
    """Pseudorandom odd numbers (SplitMix64), the same on every machine."""
    mixed = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


ODD = odd_numbers(CHECKSUM_COLUMNS)


def compress_array(array: Array) -> bytes | None:
    """The array compressed, if that is smaller."""
    small: bytes = lz4_block().compress(np.ascontiguousarray(array).tobytes(), store_size=False)
    return small if len(small) < array.nbytes else None


def decompress_array(small: Array, wanted_bytes: int) -> Array:  # -> [bytes] uint8
    """The bytes of a compressed array, if there are as many as expected."""
    block = lz4_block()
    try:
        raw = block.decompress(small.tobytes(), uncompressed_size=wanted_bytes, return_bytearray=True)
    except (block.LZ4BlockError, OverflowError) as error:
        raise ValueError(f"a compressed array: {error}") from error
    return np.frombuffer(raw, np.uint8)


def lz4_block() -> Any:
    """The module lz4.block, which is an optional dependency."""
    try:
        return importlib.import_module("lz4.block")
    except ImportError as error:
        raise UsageError(
            "Compression is asked for, but lz4 is not installed.",
            "The compression of messages and of the replay store is an extra.",
            f"Install it: {install_command('lz4')}, or switch compression off.",
        ) from error


def aligned(position: int) -> int:
    """The next offset where an array may begin."""
    return -(-position // ALIGN) * ALIGN


def pad(into: memoryview, position: int) -> int:
    """Write zeros up to the next offset where an array may begin; returns that offset."""
    begin = aligned(position)
    if begin > position:
        into[position:begin] = bytes(begin - position)
    return begin
