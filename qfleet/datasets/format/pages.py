"""What the pages of a Parquet file would take when they are decoded, by their own headers.

The footer of a file may say anything. A page is never decoded into more bytes than its own header says, so these
headers are read first: they are structs in Thrift's compact protocol, which is small enough to be read here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Fields: TypeAlias = dict[int, Any]

# Types of Thrift's compact protocol.
_TRUE = 1
_FALSE = 2
_BYTE = 3
_I16 = 4
_I32 = 5
_I64 = 6
_BINARY = 8
_STRUCT = 12
_MAX_LEVELS = 4
# In PageHeader: the kind of the page, its sizes, and the header of this kind; in that one, the encoding of its values.
_KIND = 1
_DECODED_BYTES = 2
_STORED_BYTES = 3
_DICTIONARY = 2
_OF_KIND = {0: 5, _DICTIONARY: 7, 3: 8}
_NUM_VALUES = 1
_ENCODING = {0: 2, _DICTIONARY: 2, 3: 4}
# PLAIN, PLAIN_DICTIONARY, RLE, DELTA_BINARY_PACKED, RLE_DICTIONARY, BYTE_STREAM_SPLIT. Not DELTA_BYTE_ARRAY: there a
# few bytes may stand for as many megabytes.
ENCODINGS = {0, 2, 3, 5, 8, 9}


@dataclass(slots=True)
class CompactReader:
    """Reads structs of Thrift's compact protocol; ValueError if there are none."""

    data: memoryview
    at: int

    def struct(self, level: int = 0) -> Fields:
        """The fields of a struct by their numbers; of binary fields, the length."""
        if level > _MAX_LEVELS:
            raise ValueError("the header of a page is nested too deeply")
        found: Fields = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.signed()
            found[number] = self._value(head & 15, level)
        return found

    def byte(self) -> int:
        """The next byte."""
        if self.at >= len(self.data):
            raise ValueError("the header of a page is cut off")
        self.at += 1
        return self.data[self.at - 1]

    def unsigned(self) -> int:
        """A number of 7 bits per byte, the lowest first."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number in the header of a page is too long")

    def signed(self) -> int:
        """A number whose lowest bit is its sign."""
        value = self.unsigned()
        return (value >> 1) ^ -(value & 1)

    def _value(self, kind: int, level: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _BYTE:
            return self.byte()
        if kind in (_I16, _I32, _I64):
            return self.signed()
        if kind == _STRUCT:
            return self.struct(level + 1)
        if kind == _BINARY:
            length = self.unsigned()
            self.at += length
            return length
        raise ValueError("the header of a page has a field of an unknown kind")


@dataclass(frozen=True, slots=True)
class Page:
    """What the header of a page says."""

    kind: int
    encoding: int
    num_values: int
    decoded_bytes: int

    @property
    def is_dictionary(self) -> bool:
        """Does it hold the values that other pages refer to?"""
        return self.kind == _DICTIONARY

    @property
    def refers(self) -> bool:
        """Does it hold numbers of values in the dictionary?"""
        return not self.is_dictionary and self.encoding in (2, 8)


def chunk_bytes(data: memoryview, begin: int, end: int) -> int:
    """The bytes that all pages of a column chunk have when they are decoded; ValueError if it has no such pages."""
    return sum(page.decoded_bytes for page in chunk_pages(data, begin, end))


def chunk_pages(data: memoryview, begin: int, end: int) -> Iterator[Page]:
    """The headers of the pages of a column chunk; ValueError if it has none, or some of another encoding."""
    if not 0 <= begin < end <= len(data):
        raise ValueError("a column lies outside of the file")
    return _pages(CompactReader(data[:end], begin), end)


def _pages(reader: CompactReader, end: int) -> Iterator[Page]:
    while reader.at < end:
        header = reader.struct()
        decoded = header.get(_DECODED_BYTES, -1)
        stored = header.get(_STORED_BYTES, -1)
        if not _is_count(decoded) or not _is_count(stored) or reader.at + stored > end:
            raise ValueError("the sizes of a page are not possible")
        yield _page(header, decoded)
        reader.at += stored


def _page(header: Fields, decoded: int) -> Page:
    kind = header.get(_KIND)
    if kind not in _OF_KIND:
        raise ValueError("a page is neither data nor a dictionary")
    own = header.get(_OF_KIND[kind], {})
    if not isinstance(own, dict) or not _is_count(own.get(_NUM_VALUES)):
        raise ValueError("a page does not say how many values it has")
    encoding = own.get(_ENCODING[kind])
    if encoding not in ENCODINGS:
        raise ValueError(f"a page has encoding {encoding}, and those of the format are {sorted(ENCODINGS)}")
    return Page(kind, encoding, own[_NUM_VALUES], decoded)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
