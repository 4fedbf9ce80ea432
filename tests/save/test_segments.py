"""Segments come back whole or not at all, and never fill the memory."""

import resource
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.save.damage import Damaged
from qfleet.save.segments import compress, decompress, zstd


@given(st.binary(max_size=300))
def test_round_trip(data: bytes) -> None:
    assert decompress(compress(data), len(data)) == data


def test_memory_views_are_compressed() -> None:
    rows = np.arange(600, dtype=np.float32).reshape(20, 30)
    assert decompress(compress(rows.data), rows.nbytes) == rows.tobytes()


def test_every_flipped_byte_is_noticed_by_the_segment_itself() -> None:
    data = np.random.default_rng(0).integers(0, 50, 700, np.uint8).tobytes()
    frame = compress(data)
    for index in range(len(frame)):
        bent = bytearray(frame)
        bent[index] ^= 0xFF
        with pytest.raises(Damaged):
            decompress(bytes(bent), len(data))


@pytest.mark.parametrize("bent", [b"", b"\x28", compress(b"x" * 99)[:-1], compress(b"x") + b"y", compress(b"x") * 2])
def test_broken_frames_are_damage(bent: bytes) -> None:
    with pytest.raises(Damaged):
        decompress(bent, 1000)


def bomb() -> bytes:
    """A gigabyte of zeros in some kilobytes that declares no size."""
    maker = zstd.ZstdCompressor()
    return b"".join(maker.compress(bytes(1 << 20)) for _ in range(1024)) + maker.flush()


def test_a_bomb_without_a_declared_size_is_refused_in_little_time_and_memory() -> None:
    frame = bomb()
    assert len(frame) < 200_000
    assert zstd.get_frame_info(frame).decompressed_size is None
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(Damaged, match="more than the 1000000 bytes"):
        decompress(frame, 1_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    assert time.process_time() - begin < 1


def test_a_declared_size_over_the_limit_is_refused_before_reading() -> None:
    with pytest.raises(Damaged, match="declares 1048576 bytes where at most 1048575"):
        decompress(compress(bytes(1 << 20)), (1 << 20) - 1)
