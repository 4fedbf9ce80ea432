"""Decoded arrays in files: damage is found, files in use stay, one process makes what others wait for."""

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qfleet.datasets.storage import array_cache
from qfleet.datasets.storage.array_cache import HEADER_BYTES, ArrayCache, Arrays, Shapes

KEY = "a" * 64
SHAPES: Shapes = {"numbers": ("<i8", (1_000,)), "flags": ("|b1", (7, 3)), "none": ("<f4", (0,))}
FILE_BYTES = HEADER_BYTES + 8_000 + 64


def fill(arrays: Arrays) -> None:
    arrays["numbers"][:] = np.arange(1_000)
    arrays["flags"][:] = np.arange(21).reshape(7, 3) % 2


def refuse(arrays: Arrays) -> None:
    raise AssertionError("it is there")


def require_whole(arrays: Arrays | None) -> None:
    assert arrays is not None
    np.testing.assert_array_equal(arrays["numbers"], np.arange(1_000))
    np.testing.assert_array_equal(arrays["flags"], np.arange(21).reshape(7, 3) % 2)
    assert arrays["none"].shape == (0,)


def cache_at(folder: Path, max_bytes: int = 1 << 20, warn: Callable[[str], object] = print) -> ArrayCache:
    return ArrayCache(folder / "cache", max_bytes, warn)


def path_of(folder: Path, key: str = KEY) -> Path:
    return folder / "cache" / f"{key}.arrays"


def test_arrays_are_made_once_and_found_by_others(tmp_path: Path) -> None:
    require_whole(cache_at(tmp_path).get(KEY, SHAPES, fill))
    other = cache_at(tmp_path)
    require_whole(other.get(KEY, SHAPES, refuse))
    assert other.num_made == 0
    assert os.listdir(tmp_path / "cache") == [f"{KEY}.arrays"]
    assert path_of(tmp_path).stat().st_mode & 0o777 == 0o600


def test_what_is_written_into_the_arrays_stays_in_this_process(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    first = cache.get(KEY, SHAPES, fill)
    assert first is not None
    first["numbers"][:] = 0
    require_whole(cache_at(tmp_path).get(KEY, SHAPES, refuse))


def cut_short(path: Path) -> None:
    os.truncate(path, FILE_BYTES - 64)


def lengthen(path: Path) -> None:
    os.truncate(path, FILE_BYTES + 64)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "shorter": cut_short,
    "longer": lengthen,
    "empty": lambda path: path.write_bytes(b""),
    "a bit of an array": lambda path: flip(path, HEADER_BYTES + 4_321),
    "a bit of the header": lambda path: flip(path, 12),
    "no header": lambda path: path.write_bytes(bytes(HEADER_BYTES) + path.read_bytes()[HEADER_BYTES:]),
    "no JSON": lambda path: path.write_bytes(b"\xff" * FILE_BYTES),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str) -> None:
    cache_at(tmp_path).get(KEY, SHAPES, fill)
    gc.collect()
    DAMAGE[damage](path_of(tmp_path))
    again = cache_at(tmp_path)
    require_whole(again.get(KEY, SHAPES, fill))
    assert again.num_made == 1
    require_whole(cache_at(tmp_path).get(KEY, SHAPES, refuse))


def test_a_file_of_another_layout_is_made_again(tmp_path: Path) -> None:
    cache_at(tmp_path).get(KEY, {"numbers": ("<i8", (1_000,))}, lambda arrays: None)
    gc.collect()
    require_whole(cache_at(tmp_path).get(KEY, SHAPES, fill))


def test_links_are_not_followed(tmp_path: Path) -> None:
    cache_at(tmp_path).get(KEY, SHAPES, fill)
    target = tmp_path / "elsewhere"
    path_of(tmp_path).rename(target)
    path_of(tmp_path).symlink_to(target)
    before = target.read_bytes()
    cache = cache_at(tmp_path)
    require_whole(cache.get(KEY, SHAPES, fill))
    assert cache.num_made == 1
    assert target.read_bytes() == before
    assert not path_of(tmp_path).is_symlink()


def test_an_error_of_who_fills_leaves_nothing(tmp_path: Path) -> None:
    def fail(arrays: Arrays) -> None:
        raise ValueError("the data are damaged")

    cache = cache_at(tmp_path)
    with pytest.raises(ValueError, match="the data are damaged"):
        cache.get(KEY, SHAPES, fail)
    assert not [name for name in os.listdir(tmp_path / "cache") if not name.endswith(".lock")]
    require_whole(cache.get(KEY, SHAPES, fill))


def test_the_folder_stays_in_its_bounds(tmp_path: Path) -> None:
    cache = cache_at(tmp_path, 3 * FILE_BYTES)
    for number in range(6):
        require_whole(cache.get(f"{number:064x}", SHAPES, fill))
        gc.collect()
    names = sorted(name for name in os.listdir(tmp_path / "cache") if name.endswith(".arrays"))
    assert names == [f"{number:064x}.arrays" for number in (3, 4, 5)]


def test_files_in_use_are_not_removed(tmp_path: Path) -> None:
    """Not even for others: what is missing then is None, said once."""
    texts: list[str] = []
    cache = cache_at(tmp_path, 2 * FILE_BYTES, texts.append)
    held = [cache.get(f"{number:064x}", SHAPES, fill) for number in range(2)]
    other = cache_at(tmp_path, 2 * FILE_BYTES, texts.append)
    for number in (2, 3):
        assert other.get(f"{number:064x}", SHAPES, fill) is None
    assert len(texts) == 1
    assert "files in use" in texts[0]
    for arrays in held:
        require_whole(arrays)
    assert len(list((tmp_path / "cache").glob("*.arrays"))) == 2
    del arrays
    held.clear()
    gc.collect()
    require_whole(other.get(f"{2:064x}", SHAPES, fill))


def test_drafts_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    cache.get(KEY, SHAPES, fill)
    left = tmp_path / "cache" / f".{KEY}.0123456789abcdef.draft"
    left.write_bytes(b"half")
    require_whole(cache.get("b" * 64, SHAPES, fill))
    assert not left.exists()


@pytest.mark.parametrize("error", ["full", "no room", "read-only", "too small"])
def test_without_room_there_is_one_warning_and_no_arrays(
    tmp_path: Path, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    cache = cache_at(tmp_path, 100 if error == "too small" else 1 << 20, texts.append)
    if error == "full":

        def allocate(*args: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", allocate)
    elif error == "no room":
        monkeypatch.setattr(array_cache, "free_bytes", lambda folder: 1_000)
    elif error == "read-only":
        (tmp_path / "cache").write_text("a file where the folder should be")
    assert cache.get(KEY, SHAPES, fill) is None
    assert cache.get("b" * 64, SHAPES, fill) is None
    assert len(texts) == 1
    assert "decoded into memory" in texts[0]
    if error == "full":
        assert not [name for name in os.listdir(tmp_path / "cache") if not name.endswith(".lock")]


def test_others_wait_for_who_makes_the_arrays(tmp_path: Path) -> None:
    began = threading.Event()
    go_on = threading.Event()

    def slowly(arrays: Arrays) -> None:
        began.set()
        assert go_on.wait(20)
        fill(arrays)

    maker = threading.Thread(target=lambda: cache_at(tmp_path).get(KEY, SHAPES, slowly))
    maker.start()
    assert began.wait(20)
    impatient = cache_at(tmp_path)
    impatient.wait_seconds = 0.05
    assert impatient.get(KEY, SHAPES, refuse) is None  # it decodes into memory
    found: list[Arrays | None] = []
    waiting = threading.Thread(target=lambda: found.append(cache_at(tmp_path).get(KEY, SHAPES, refuse)))
    waiting.start()
    time.sleep(0.1)
    assert not found
    go_on.set()
    waiting.join(20)
    maker.join(20)
    require_whole(found[0])


def make_and_end(folder: str, key: str) -> None:
    def end(arrays: Arrays) -> None:
        os.kill(os.getpid(), 9)

    cache_at(Path(folder)).get(key, SHAPES, end)


def test_a_process_that_is_killed_in_between_keeps_nobody_waiting(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=make_and_end, args=(str(tmp_path), KEY))
    child.start()
    child.join(60)
    assert child.exitcode == -9
    started = time.monotonic()
    require_whole(cache_at(tmp_path).get(KEY, SHAPES, fill))
    assert time.monotonic() - started < 10
    assert [name for name in os.listdir(tmp_path / "cache") if name.endswith(".draft")] == []
