"""Replay rows as files: in segments at fixed places, so that most of them never change again."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from qfleet.data import State
from qfleet.replay import Replay, Span, Store, saved_spans
from qfleet.save import compress, decompress, pack_tensors, unpack_tensors

SEGMENT_BYTES = 8 * 2**20
HEADER_BYTES = 2**16  # names, shapes and alignment in a file of tensors
OPEN = "_open"


@dataclass(frozen=True, slots=True)
class Segment:
    """Some rows of some lanes, and the file they go into."""

    name: str
    span: Span


def segments_of(replay: Replay) -> Iterator[Segment]:
    """The rows that a checkpoint needs. A group's newest row may still become a final one: its segment is open."""
    for span in replay.spans():
        for lanes, begin, end in cut_span(span, replay.store.row_bytes):
            yield Segment(segment_name(lanes, begin, end, is_open=end == span[2]), (lanes, begin, end))


def is_final(name: str) -> bool:
    """Will the rows of this file never change?"""
    return name.endswith(".zst") and not name.endswith(f"{OPEN}.zst")


def pack_rows(replay: Replay, segment: Segment) -> bytes:
    """The content of a segment's file."""
    lanes, begin, end = segment.span
    return compress(pack_tensors(replay.store.read(begin, end, lanes)))


def restore_rows(store: Store, names: Iterable[str], read: Callable[[str, int], bytes], state: State) -> None:
    """Read rows from their files, which must be complete and no larger than their rows can be."""
    parts = sorted((*parse_segment_name(name, store.lanes), name) for name in names)
    for lanes, at, head in saved_spans(state, store.lanes, store.rows):
        while at < head:
            if not parts or parts[0][:3] != (lanes.start, lanes.stop, at) or not at < parts[0][3] <= head:
                raise ValueError(f"replay rows from {at} on of lane {lanes.start} are missing")
            *_, end, name = parts.pop(0)
            limit = (end - at) * (lanes.stop - lanes.start) * store.row_bytes + HEADER_BYTES
            store.restore(at, end, unpack_tensors(decompress(read(name, limit), limit)), lanes)
            at = end
    if parts:
        raise ValueError(f"{parts[0][-1]} is not a part of the replay")


def cut_span(span: Span, row_bytes: int) -> Iterator[Span]:
    """A group's rows in segments that begin and end at fixed places, but for the first and the last."""
    lanes, begin, head = span
    size = segment_rows(row_bytes * (lanes.stop - lanes.start))
    while begin < head:
        end = min((begin // size + 1) * size, head)
        yield lanes, begin, end
        begin = end


def segment_name(lanes: slice, begin: int, end: int, *, is_open: bool) -> str:
    """The name of a file: equal names hold equal rows, except that an open segment may still change."""
    place = f"{begin:012d}_{end:012d}_{lanes.start:05d}_{lanes.stop:05d}"
    return f"replay/rows_{place}{OPEN if is_open else ''}.zst"


def parse_segment_name(name: str, lanes: int) -> tuple[int, int, int, int]:
    """Lanes and rows [begin, end) of a segment; in older versions it held all lanes."""
    begin, end, *group = (int(part) for part in name.removesuffix(".zst").removesuffix(OPEN).split("_")[1:])
    first, stop = group or (0, lanes)
    return first, stop, begin, end


def segment_rows(bytes_per_row: int) -> int:
    """Rows per segment: a power of two near SEGMENT_BYTES."""
    return max(64, 1 << (max(1, SEGMENT_BYTES // bytes_per_row).bit_length() - 1))
