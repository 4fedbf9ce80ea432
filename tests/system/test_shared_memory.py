"""Unnamed shared memory: all processes see the same bytes, and nothing leaks."""

import multiprocessing
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from qfleet.system.shared_memory import SharedMemory

SIZE = 10_000


def _add_one(region: SharedMemory) -> None:
    numbers = np.frombuffer(region.view, np.uint8)
    numbers += 1


def _shrink(region: SharedMemory) -> None:
    os.ftruncate(region._fd, 1)


def _in_child(method: str, work, region: SharedMemory) -> int:
    child = multiprocessing.get_context(method).Process(target=work, args=(region,))
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def _mapped() -> int:
    return sum("memfd:qfleet" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_new_memory_is_zero_and_has_the_requested_size() -> None:
    region = SharedMemory(SIZE)
    assert (region.size, len(region.view), bytes(region.view)) == (SIZE, SIZE, bytes(SIZE))
    region.close()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_parent_reads_what_a_child_writes(method: str) -> None:
    region = SharedMemory(SIZE)
    region.view[:2] = b"\x05\x07"
    assert _in_child(method, _add_one, region) == 0
    assert bytes(region.view[:3]) == b"\x06\x08\x01"
    region.close()


def test_without_memfd_an_unlinked_file_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    region = SharedMemory(SIZE)
    assert list(tmp_path.iterdir()) == []
    assert _in_child("forkserver", _add_one, region) == 0
    assert bytes(region.view[:1]) == b"\x01"
    region.close()


def test_a_process_cannot_shrink_shared_memory() -> None:
    region = SharedMemory(SIZE)
    assert _in_child("forkserver", _shrink, region) == 1
    assert bytes(region.view) == bytes(SIZE)
    region.close()


def test_close_releases_descriptor_and_mapping() -> None:
    before = _descriptors()
    mapped = _mapped()
    region = SharedMemory(SIZE)
    assert _mapped() == mapped + 1
    region.close()
    region.close()
    assert _descriptors() == before
    assert _mapped() == mapped
    with pytest.raises(ValueError, match="closed region"):
        region.__reduce__()


def test_an_array_keeps_closed_memory_mapped_until_it_is_dropped() -> None:
    before = _mapped()
    region = SharedMemory(SIZE)
    array = np.frombuffer(region.view, np.uint8)
    region.close()
    array[0] = 3  # still there
    del region
    assert array[0] == 3
    assert _mapped() == before + 1
    del array
    assert _mapped() == before


def test_deleting_the_object_releases_descriptor_and_mapping() -> None:
    before = _descriptors()
    mapped = _mapped()
    region = SharedMemory(SIZE)
    del region
    assert _descriptors() == before
    assert _mapped() == mapped


def test_an_empty_region_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        SharedMemory(0)
