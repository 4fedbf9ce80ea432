"""Array messages are unpacked as they were packed, and only whole messages are accepted."""

import contextlib
import operator
import random
import re
import struct
import subprocess
import sys
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qfleet.data import wire_format
from qfleet.data.types import Array
from qfleet.data.wire_format import (
    Count,
    Message,
    MessageNotWhole,
    MessageTooLarge,
    pack,
    packed_bytes,
    to_bytes,
    unpack,
)
from qfleet.errors import UsageError
from qfleet.install import install_command

LIMIT = 1 << 20


class Empty(Message):
    """A message without fields."""


class Note(Message):
    """A message with a field of every kind."""

    step: Count = 0
    text: str = ""
    share: float | None = None
    flags: tuple[bool, bool] = (False, True)
    counts: tuple[int, ...] = ()


class Other(Message):
    """A message of another kind."""

    step: int = 0


KIND = Empty | Note
EMPTY = {"type": "Empty"}
NOTES = st.builds(
    Note,
    st.integers(0, 2**64 - 1),
    st.text(),
    st.none() | st.floats(allow_nan=False),
    st.tuples(st.booleans(), st.booleans()),
    st.lists(st.integers(-(2**63), 2**64 - 1), max_size=5).map(tuple),
)
NUMBERS = hnp.arrays(
    st.sampled_from(sorted(wire_format.DTYPES)), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)
)
ARRAYS = st.dictionaries(st.text(max_size=10), NUMBERS, max_size=5)


def same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape, one[name].tobytes())
        == (other[name].dtype, other[name].shape, other[name].tobytes())
        for name in one
    )


def forged(table: Any, tail: bytes = b"", length: int | None = None, table_bytes: int | None = None) -> bytes:
    """A message with a valid checksum and any table."""
    raw = table if isinstance(table, bytes) else msgspec.msgpack.encode(table)
    body = raw + bytes(-(wire_format.HEADER_BYTES + len(raw)) % wire_format.ALIGN) + tail
    size = wire_format.HEADER_BYTES + len(body) if length is None else length
    head = wire_format.HEAD.pack(
        wire_format.MAGIC, wire_format.FORMAT, 0, size, len(raw) if table_bytes is None else table_bytes
    )
    return wire_format.CHECK.pack(zlib.crc32(body, zlib.crc32(head))) + head + body


@given(st.just(Empty()) | NOTES, ARRAYS, st.booleans())
def test_messages_are_unpacked_as_packed(note: Message, arrays: dict[str, Array], compressed: bool) -> None:
    message = to_bytes(note, arrays, compress=tuple(arrays) if compressed else ())
    found_note, found = unpack(message, KIND, limit_bytes=LIMIT)
    assert type(found_note) is type(note)
    assert found_note == note
    assert same(found, arrays)
    assert all(array.flags.writeable and array.flags.aligned for array in found.values())
    assert len(message) <= packed_bytes(note, arrays)
    assert compressed or len(message) == packed_bytes(note, arrays)


def test_a_message_needs_no_arrays() -> None:
    assert unpack(to_bytes(Note(3)), Note, limit_bytes=LIMIT) == (Note(3), {})


def test_arrays_with_strides_are_packed_and_unpacked_as_copies() -> None:
    array = np.arange(60.0).reshape(3, 4, 5)[:, ::2, ::-1]
    memory = bytearray(2000)
    pack(Empty(), {"a": array}, memoryview(memory))
    _, found = unpack(memoryview(memory), KIND, limit_bytes=LIMIT)
    memory[:] = bytes(2000)
    assert np.array_equal(found["a"], array)


def test_long_arrays_are_unpacked_as_packed() -> None:
    array = np.random.default_rng(0).integers(0, 256, 300_001, dtype=np.uint8)
    assert np.array_equal(unpack(to_bytes(Empty(), {"a": array}), KIND, limit_bytes=LIMIT)[1]["a"], array)


def test_equal_messages_have_equal_bytes_whatever_the_memory_held() -> None:
    dirty = bytearray(b"\xff" * 1000)
    length = pack(Note(1), {"x": np.arange(3, dtype=np.uint8)}, memoryview(dirty))
    assert bytes(dirty[:length]) == to_bytes(Note(1), {"x": np.arange(3, dtype=np.uint8)})
    assert bytes(dirty[length:]) == b"\xff" * (1000 - length)


@pytest.mark.parametrize("size", [60, 150_000])
def test_every_flipped_byte_is_noticed(size: int) -> None:
    message = bytearray(to_bytes(Note(3), {"a": np.arange(size, dtype=np.uint8), "b": np.ones(3)}))
    positions = range(len(message)) if size < 100 else random.Random(0).sample(range(len(message)), 300)
    for position in positions:
        for bit in (1, 16, 128):
            message[position] ^= bit
            with pytest.raises(ValueError):  # noqa: PT011  which part notices depends on the position
                unpack(bytes(message), KIND, limit_bytes=LIMIT)
            message[position] ^= bit
    unpack(bytes(message), KIND, limit_bytes=LIMIT)


@pytest.mark.parametrize("cut", [0, 1, 39, 40, 41, 100])
def test_part_of_a_message_is_refused(cut: int) -> None:
    message = to_bytes(Note(3), {"a": np.arange(60)})
    with pytest.raises(MessageNotWhole):
        unpack(message[:cut], KIND, limit_bytes=LIMIT)
    with pytest.raises(MessageNotWhole):
        unpack(message[cut + 1 :], KIND, limit_bytes=LIMIT)


@pytest.mark.parametrize("size", [50, 20_000])
def test_a_mixture_of_two_messages_is_refused(size: int) -> None:
    rng, moved = np.random.default_rng(1), np.arange(size, dtype=np.int64)
    one, other = to_bytes(Note(1), {"a": moved}), to_bytes(Note(2), {"a": np.roll(moved, 8)})
    for _ in range(200):
        kept = rng.random(len(one) // 8) < rng.random()
        integers = np.where(kept, np.frombuffer(one, np.uint64), np.frombuffer(other, np.uint64))
        if integers.tobytes() not in (one, other):
            with pytest.raises(ValueError):  # noqa: PT011
                unpack(integers.tobytes(), KIND, limit_bytes=LIMIT)


@pytest.mark.parametrize("size", [6_000, 600_000])  # below and above the size that is folded
def test_the_checksum_sees_a_picture_that_moved(size: int) -> None:
    """Sums alone do not see a sprite that moves by whole integers, nor two that move in opposite directions."""
    still = np.zeros(size, np.uint8)
    still[1607:1640:16] = 200  # in the highest byte of integers, where a product keeps the least
    moved, twice = np.roll(still, 32), np.roll(still, 32) + np.roll(still, 3000)
    back = still + np.roll(still, 3032)
    for one, other in ((still, moved), (twice, back)):
        assert one.view(np.uint64).sum() == other.view(np.uint64).sum()
        assert wire_format.checksum(one) != wire_format.checksum(other)


def test_the_checksum_sees_swapped_rows() -> None:
    integers = np.arange(4 * wire_format.CHECKSUM_COLUMNS, dtype=np.uint64)
    swapped = integers.reshape(4, -1)[[1, 0, 2, 3]].ravel()
    assert wire_format.checksum(integers.view(np.uint8)) != wire_format.checksum(swapped.view(np.uint8))


def test_the_checksum_equals_plain_arithmetic() -> None:
    assert wire_format.ODD[:2].tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1]  # SplitMix64 from 0
    integers = [(number * 0x9E3779B97F4A7C15 + 12345) % 2**64 for number in range(2 * wire_format.CHECKSUM_COLUMNS + 7)]
    data = np.array(integers, np.uint64).view(np.uint8)
    rows, odd = (
        [
            integers[: wire_format.CHECKSUM_COLUMNS],
            integers[wire_format.CHECKSUM_COLUMNS : 2 * wire_format.CHECKSUM_COLUMNS],
        ],
        wire_format.ODD.tolist(),
    )
    columns = [(first + second) % 2**64 for first, second in zip(*rows, strict=True)]
    products = [sum(map(operator.mul, row, odd)) % 2**64 for row in rows]
    folded = [*columns, *products, *integers[2 * wire_format.CHECKSUM_COLUMNS :]]
    assert wire_format.checksum(data, 77) == zlib.crc32(struct.pack(f"<{len(folded)}Q", *folded), 77)
    assert wire_format.checksum(data[:800], 77) == zlib.crc32(data[:800].tobytes(), 77)


def test_a_message_that_is_too_large_is_refused() -> None:
    arrays = {"a": np.zeros(100, np.uint8)}
    room = packed_bytes(Empty(), arrays)
    assert pack(Empty(), arrays, memoryview(bytearray(room))) == room
    with pytest.raises(MessageTooLarge, match=f"{room} bytes"):
        pack(Empty(), arrays, memoryview(bytearray(room - 1)))
    with pytest.raises(ValueError, match="message of"):
        unpack(to_bytes(Empty(), arrays), KIND, limit_bytes=room - 1)


def test_objects_and_other_byte_orders_are_not_sent() -> None:
    for array in (np.array([{}]), np.zeros(3, ">f4"), np.zeros(3, "M8[s]"), np.zeros(3, "U4"), np.zeros(3, "c16")):
        with pytest.raises(ValueError, match="cannot be sent"):
            packed_bytes(Empty(), {"a": array})


BAD = {
    "an object": ([EMPTY, [["a", "|O", [1], 8, False]]], 8),
    "negative": ([EMPTY, [["a", "<f4", [-1], 4, False]]], 4),
    "huge": ([EMPTY, [["a", "<f4", [2**40, 2**40], 8, False]]], 8),
    "huge and empty": ([EMPTY, [["a", "<f4", [0, *[2**40] * 7], 0, False]]], 0),
    "more dimensions than any": ([EMPTY, [["a", "|u1", [1] * 60, 1, False]]], 16),
    "shorter than its shape": ([EMPTY, [["a", "<f4", [4], 8, False]]], 16),
    "longer than the message": ([EMPTY, [["a", "|u1", [400], 400, False]]], 16),
    "twice": ([EMPTY, [["a", "|u1", [1], 1, False]] * 2], 32),
    "neither true nor false": ([EMPTY, [["a", "|b1", [1], 1, False]]], 16),
    "something behind": ([EMPTY, []], 16),
    "unknown fields": ([EMPTY, [], 1], 0),
    "a number for a name": ([EMPTY, [[1, "|u1", [1], 1, False]]], 16),
    "a class of another role": ([{"type": "Other", "step": 1}, []], 0),
    "no class": ([{}, []], 0),
    "a class that is a number": ([{"type": 1}, []], 0),
    "a field that is not known": ([{"type": "Empty", "step": 1}, []], 0),
    "text for a number": ([{"type": "Note", "step": "1"}, []], 0),
    "a number below its limit": ([{"type": "Note", "step": -1}, []], 0),
    "a fraction for a number": ([{"type": "Note", "step": 1.5}, []], 0),
    "a number for text": ([{"type": "Note", "text": 1}, []], 0),
    "bytes for text": ([{"type": "Note", "text": b"x"}, []], 0),
    "too many items": ([{"type": "Note", "flags": [True, True, True]}, []], 0),
    "a nested list": ([{"type": "Note", "counts": [[1]]}, []], 0),
    "a list for a message": ([[], []], 0),
    "not a table": ([1], 0),
    "compressed nonsense": ([EMPTY, [["a", "|u1", [64], 16, True]]], 16),
    "a bomb": ([EMPTY, [["a", "|u1", [2**39], 16, True]]], 16),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_table_is_refused(name: str) -> None:
    table, size = BAD[name]
    with pytest.raises(ValueError, match=r"."):
        unpack(forged(table, b"\x07" * size), KIND, limit_bytes=LIMIT)
    assert unpack(forged([EMPTY, [["a", "|u1", [1], 1, False]]], b"\x07" * 16), KIND, limit_bytes=LIMIT)[1]["a"] == [7]


NAME = b"\xa4type\xa4Note"  # the class of a message, inside a map of two fields
LIES = {  # each announces 2**32 - 1 further elements
    "a list": b"\xdd\xff\xff\xff\xff",
    "entries": b"\x92\x81\xa4type\xa5Empty\xdd\xff\xff\xff\xff",
    "fields": b"\x92\xdf\xff\xff\xff\xff",
    "a field's text": b"\x92\x82" + NAME + b"\xa4text\xdb\xff\xff\xff\xff",
    "a field's list": b"\x92\x82" + NAME + b"\xa6counts\xdd\xff\xff\xff\xff",
    "a shape": b"\x92\x81\xa4type\xa5Empty\x91\x95\xa1a\xa3<f4\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("table", LIES.values(), ids=LIES.keys())
def test_false_lengths_allocate_no_memory(table: bytes) -> None:
    code = (
        "import resource, sys; from qfleet.data.wire_format import Message, unpack\n"
        "class Empty(Message):\n    pass\n"
        "class Note(Message):\n    text: str = ''\n    counts: tuple[int, ...] = ()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    unpack(bytes.fromhex(sys.argv[1]), Empty | Note, limit_bytes=1 << 40)\n"
        "except ValueError:\n    pass\n"
        "else:\n    sys.exit(2)\n"
        "sys.exit(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > 50_000)"
    )
    command = [sys.executable, "-c", code, forged(table).hex()]
    assert subprocess.run(command, timeout=60).returncode == 0


@given(st.binary(max_size=200), st.integers(0, 300), st.integers(0, 300))
@settings(max_examples=300)
def test_any_bytes_raise_at_most_a_value_error(table: bytes, length: int, table_bytes: int) -> None:
    for message in (table, forged(table), forged(table, length=length), forged(table, table_bytes=table_bytes)):
        with contextlib.suppress(ValueError):
            unpack(message, KIND, limit_bytes=4096)


@given(st.data())
@settings(max_examples=200)
def test_a_changed_table_raises_at_most_a_value_error(data: st.DataObject) -> None:
    entry = ["a", "|u1", [2, 3], 6, False]
    table = bytearray(msgspec.msgpack.encode([{"type": "Note", "step": 1}, [entry, ["b", "<f8", [1], 8, True]]]))
    table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, arrays = unpack(forged(bytes(table), bytes(32)), KIND, limit_bytes=4096)
    except ValueError:
        return
    assert sum(array.nbytes for array in arrays.values()) <= 4096


def test_arrays_are_compressed_only_where_that_saves_bytes() -> None:
    frames, noise = np.zeros((8, 84, 84), np.uint8), np.random.default_rng(0).integers(0, 256, 9000, dtype=np.uint8)
    arrays = {"frames": frames, "noise": noise}
    small = to_bytes(Empty(), arrays, compress=("frames", "noise"))
    assert len(small) < noise.nbytes + 1000
    assert same(unpack(small, KIND, limit_bytes=LIMIT)[1], arrays)
    assert len(to_bytes(Empty(), arrays, compress=("noise",))) == packed_bytes(Empty(), arrays)
    with pytest.raises(ValueError, match="does not fit"):
        unpack(small, KIND, limit_bytes=frames.nbytes)


def test_without_the_extra_compression_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    small = to_bytes(Empty(), {"a": np.zeros(1000)}, compress=("a",))
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    for use in (
        lambda: to_bytes(Empty(), {"a": np.zeros(9)}, compress=("a",)),
        lambda: unpack(small, KIND, limit_bytes=LIMIT),
    ):
        with pytest.raises(UsageError, match=re.escape(install_command("lz4"))):
            use()
    to_bytes(Empty(), {"a": np.zeros(9)})  # needs no extra


def test_a_number_must_be_the_one_expected() -> None:
    memory = memoryview(bytearray(200))
    pack(Empty(), {}, memory, number=7)
    assert memory.cast("Q")[wire_format.NUMBER_INDEX] == 7
    assert unpack(memory, KIND, limit_bytes=LIMIT, number=7) == (Empty(), {})
    with pytest.raises(MessageNotWhole, match="number 7"):
        unpack(memory, KIND, limit_bytes=LIMIT, number=8)


def test_a_message_of_another_kind_is_refused() -> None:
    for message, kind in ((Other(1), KIND), (Note(1), Empty), (Note(1), Other), (Empty(), Note | Other)):
        with pytest.raises(ValueError, match=f"Invalid value '{type(message).__name__}'"):
            unpack(to_bytes(message, {"a": np.zeros(3)}), kind, limit_bytes=LIMIT)
    assert unpack(to_bytes(Other(1)), KIND | Other, limit_bytes=LIMIT) == (Other(1), {})


def test_what_is_wrong_with_a_field_is_said() -> None:
    for fields, match in (
        ({"type": "Note", "step": "1"}, r"Expected `int`, got `str` - at `\$.step`"),
        ({"type": "Note", "stop": 1}, "unknown field `stop`"),
        ({"type": "Note", "step": -1}, r">= 0 - at `\$.step`"),
    ):
        with pytest.raises(ValueError, match=match):
            unpack(forged([fields, []]), KIND, limit_bytes=LIMIT)
    assert unpack(forged([{"type": "Note"}, []]), KIND, limit_bytes=LIMIT) == (Note(), {})
