"""Frames in compressed blocks: the same batches bit by bit, whatever the cut, and the savings are reported."""

from typing import Any

import numpy as np
import pytest

from qfleet.data import Array, Spec
from qfleet.errors import UsageError
from qfleet.replay import Cut, NStepReturn, Prioritized, Replay, SequenceCut, StepCut
from qfleet.replay.duplicates import DuplicateFilter
from qfleet.replay.kernels import BLOCK
from tests.replay.streams import random_stream, read_rows, restore_rows, rollout

FRAMES = Spec((6, 6), "uint8", (4,), stack=4, masked=True, state=(2,))
ODD = Spec((5, 3), "uint8", (4,))
VECTOR = Spec((3,), "float32", (4,), stack=2)
# Above the size from which the ring has little spare room, so that rows run out before the capacity is reached.
LARGE = Spec((1100,), "uint8", (4,), stack=4)
CUTS: list[Cut] = [StepCut(1), StepCut(5), SequenceCut(2, 3, 30, 9)]


def make(spec: Spec, cut: Cut, *, compress: bool, lanes: int = 3, capacity: int = 250, **more: Any) -> Replay:
    sampler = Prioritized(cut.items_in(capacity))
    rng = np.random.default_rng(0)
    return Replay(spec, lanes, capacity, sampler, rng, cut=cut, n_step=NStepReturn(1, 0.97), compress=compress, **more)


def add_and_sample(replay: Replay, rows: dict[str, Array], begin: int, end: int, at_once: int = 7) -> list[bytes]:
    """The bytes of all batches sampled while these rows are added."""
    seen: list[bytes] = []
    for row in range(begin, end, at_once):
        replay.add(rollout(rows, row, min(row + at_once, end)))
        if (batch := replay.sample(40)) is not None:
            seen += [value.tobytes() for name in batch.__slots__ if (value := getattr(batch, name)) is not None]
            replay.update(batch.ids, np.random.default_rng(row).random(len(batch.ids)).astype(np.float32))
    return seen


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("spec", [FRAMES, ODD, VECTOR, LARGE], ids=["frames", "odd", "vector", "large"])
def test_compressed_batches_are_bit_equal(spec: Spec, cut: Cut) -> None:
    rows = random_stream(np.random.default_rng(1), spec, 3, 400, np.array([0.0, 0.05, 0.4]))
    raw, packed = (add_and_sample(make(spec, cut, compress=compress), rows, 0, 400) for compress in (False, True))
    assert len(raw) > 100
    assert raw == packed


@pytest.mark.parametrize("stop", [5, 16, 17, 100, 333])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_restored_compressed_replay_samples_the_same(cut: Cut, stop: int) -> None:
    rows = random_stream(np.random.default_rng(2), FRAMES, 3, 400, end=0.1)
    first, second = make(FRAMES, cut, compress=True), make(FRAMES, cut, compress=True)
    add_and_sample(first, rows, 0, stop)
    state, saved = first.state_dict(), read_rows(first)
    add_and_sample(second, rows, 0, 90)  # the other has a past of its own, as after a roll-back
    expected = add_and_sample(first, rows, stop, 400)
    for restored in (second, make(FRAMES, cut, compress=True)):
        restore_rows(restored, saved)
        restored.load_state_dict(state)
        assert add_and_sample(restored, rows, stop, 400) == expected


def test_compressed_and_raw_stores_read_the_same_rows() -> None:
    rows = random_stream(np.random.default_rng(3), FRAMES, 3, 120, end=0.1)
    raw, packed = (make(FRAMES, StepCut(1), compress=compress) for compress in (False, True))
    for replay in (raw, packed):
        add_and_sample(replay, rows, 0, 120)
    for one, other in zip(read_rows(raw), read_rows(packed), strict=True):
        assert one[0] == other[0]
        assert one[1].keys() == other[1].keys()
        assert all(np.array_equal(one[1][name], other[1][name]) for name in one[1])


def test_the_filter_rejects_copies_of_compressed_frames() -> None:
    rng = np.random.default_rng(4)
    rows = random_stream(rng, FRAMES, 3, 200, end=0.05)
    rows["obs"][:] = rng.integers(0, 2, (200, 3, 1, 1))
    rows["reward"][:], rows["action"][:], rows["mask"][:] = 0, 0, True
    found = []
    for compress in (False, True):
        replay = make(FRAMES, StepCut(2), compress=compress, filter=DuplicateFilter())
        add_and_sample(replay, rows, 0, 200)
        assert replay.filter is not None
        assert replay.filter.kept_out > 100
        found.append((replay.filter.kept_out, replay.state_dict()["filter"]["keys"].tolist()))
    assert found[0] == found[1]


def test_compression_savings_are_counted() -> None:
    spec = Spec((84, 84), "uint8", (4,), stack=4)
    replay = make(spec, StepCut(1), compress=True, lanes=2, capacity=400)
    before = replay.store.compression_savings()
    assert before is not None
    assert (before.raw_bytes, before.packed_bytes, before.ratio) == (0, 0, 1.0)
    rows = random_stream(np.random.default_rng(5), spec, 2, 100, end=0.0)
    rows["obs"][:] = np.arange(84, dtype=np.uint8)  # nearly nothing
    replay.add(rollout(rows))
    replay.sample(8)
    saving = replay.store.compression_savings()
    assert saving is not None
    assert saving.packed_blocks == 100 // BLOCK * 2
    assert saving.raw_bytes == saving.packed_blocks * BLOCK * 84 * 84
    assert replay.store.packed is not None
    assert saving.packed_bytes == sum(len(blob) for blob in replay.store.packed.blobs if blob is not None)
    assert saving.ratio > 50
    assert saving.unpacked_blocks > 0
    assert min(saving.pack_seconds, saving.unpack_seconds) > 0.0
    assert replay.store.obs.nbytes == 0
    assert make(spec, StepCut(1), compress=False).store.compression_savings() is None


def test_the_count_of_bytes_is_right_when_blocks_are_replaced() -> None:
    replay = make(FRAMES, StepCut(1), compress=True, capacity=60)
    add_and_sample(replay, random_stream(np.random.default_rng(6), FRAMES, 3, 900, end=0.1), 0, 900)
    packed, saving = replay.store.packed, replay.store.compression_savings()
    assert packed is not None
    assert saving is not None
    assert saving.packed_blocks > len(packed.blobs)
    assert saving.packed_bytes == sum(len(blob) for blob in packed.blobs if blob is not None)


def test_without_lz4_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UsageError, match="lz4 is not installed"):
        make(FRAMES, StepCut(1), compress=True)
    assert make(FRAMES, StepCut(1), compress=False).store.packed is None
