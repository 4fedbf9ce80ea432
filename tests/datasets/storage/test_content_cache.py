import fcntl
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qfleet.datasets.storage import ContentCache, content_cache


def kept(cache: ContentCache, data: bytes, age_seconds: int = 0) -> str:
    name = hashlib.sha256(data).hexdigest()
    cache.put(name, data)
    file = cache.folder / name
    if file.exists():
        os.utime(file, (file.stat().st_mtime - age_seconds,) * 2)
    return name


def test_the_files_used_longest_ago_make_room(tmp_path: Path) -> None:
    cache = ContentCache(tmp_path / "cache", max_bytes=30)
    names = [kept(cache, bytes([number]) * 10, age_seconds=100 - number) for number in range(3)]
    assert cache.get(names[0], 10) == bytes(10)  # now the newest
    kept(cache, b"d" * 10)
    assert [cache.get(name, 10) is not None for name in names] == [True, False, True]
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= 30


def test_a_damaged_file_is_removed_and_missing(tmp_path: Path) -> None:
    cache = ContentCache(tmp_path / "cache")
    name = kept(cache, b"0123456789")
    (cache.folder / name).write_bytes(b"012345678x")
    assert cache.get(name, 10) is None
    assert not (cache.folder / name).exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    cache = ContentCache(tmp_path / "cache")
    name = kept(cache, b"0123456789")
    (cache.folder / name).rename(tmp_path / "elsewhere")
    (cache.folder / name).symlink_to(tmp_path / "elsewhere")
    assert cache.get(name, 10) is None


def test_a_larger_file_than_the_cache_is_not_kept(tmp_path: Path) -> None:
    cache = ContentCache(tmp_path / "cache", max_bytes=5)
    assert cache.get(kept(cache, b"0123456789"), 10) is None


def test_links_and_foreign_files_are_neither_followed_nor_removed(tmp_path: Path) -> None:
    cache = ContentCache(tmp_path / "cache", max_bytes=25)
    cache.folder.mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(b"x" * 1000)
    linked = hashlib.sha256(b"linked").hexdigest()
    folder = hashlib.sha256(b"folder").hexdigest()
    (cache.folder / linked).symlink_to(outside)
    (cache.folder / folder).mkdir()
    (cache.folder / "notes.txt").write_bytes(b"n" * 1000)
    (cache.folder / ".other.draft").write_bytes(b"o")
    (cache.folder / "more").symlink_to(tmp_path)
    for path in (cache.folder / "notes.txt", outside):
        os.utime(path, (1, 1))
    names = [kept(cache, bytes([number]) * 10, age_seconds=100 - number) for number in range(4)]
    cache.put(linked, b"linked")
    cache.put(folder, b"folder")
    assert [cache.get(name, 10) is not None for name in names] == [False, False, True, True]
    assert cache.get(linked, 10) is None
    assert (cache.folder / linked).is_symlink()
    assert (cache.folder / folder).is_dir()
    assert (cache.folder / "notes.txt").read_bytes() == b"n" * 1000
    assert (cache.folder / ".other.draft").exists()
    assert (cache.folder / "more").is_symlink()
    assert outside.read_bytes() == b"x" * 1000


@pytest.mark.parametrize("kind", ["link", "folder", "second name"])
def test_a_lock_that_is_not_ours_costs_only_the_cache(tmp_path: Path, kind: str) -> None:
    cache = ContentCache(tmp_path / "cache")
    cache.folder.mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(b"x")
    if kind == "link":
        (cache.folder / ".lock").symlink_to(outside)
    elif kind == "folder":
        (cache.folder / ".lock").mkdir()
    else:
        (cache.folder / ".lock").hardlink_to(outside)
    assert cache.get(kept(cache, b"0123456789"), 10) is None
    assert outside.read_bytes() == b"x"


def test_the_unfinished_file_of_a_killed_writer_is_removed(tmp_path: Path) -> None:
    cache = ContentCache(tmp_path / "cache")
    name = kept(cache, b"0123456789")
    (cache.folder / f".{name}.0123abcd.draft").write_bytes(b"01234")
    kept(cache, b"more")
    assert sorted(path.name for path in cache.folder.glob(".*")) == [".lock"]


def test_a_writer_that_holds_the_lock_too_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_cache, "LOCK_SECONDS", 0.1)
    cache = ContentCache(tmp_path / "cache")
    first = kept(cache, b"first")
    with (cache.folder / ".lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = kept(cache, b"second")
        assert cache.get(first, 10) == b"first"
    assert cache.get(second, 10) is None
    assert cache.get(kept(cache, b"second"), 10) == b"second"


USER = """
import hashlib, random, sys
from pathlib import Path
from qfleet.datasets.storage import ContentCache

cache = ContentCache(Path(sys.argv[1]), max_bytes=20_000)
choose = random.Random(int(sys.argv[2]))
found = 0
for _ in range(400):
    data = bytes([choose.randrange(40)]) * 1000
    name = hashlib.sha256(data).hexdigest()
    kept = cache.get(name, 1000)
    assert kept in (None, data)
    found += kept is not None
    if kept is None:
        cache.put(name, data)
        here = [path for path in cache.folder.iterdir() if len(path.name) == 64]
        assert len(here) <= 20, len(here)
print(found)
"""


@pytest.mark.timeout(60)
def test_two_processes_use_one_folder_at_the_same_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", USER, str(tmp_path / "cache")]
    users = [subprocess.Popen([*command, seed], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for seed in "12"]
    ended = [user.communicate(timeout=50) for user in users]
    assert [user.returncode for user in users] == [0, 0], ended
    assert all(int(output) > 100 for output, _ in ended)  # half of the 40 files fit
    cache = ContentCache(tmp_path / "cache", max_bytes=20_000)
    names = [path.name for path in cache.folder.iterdir() if path.name != ".lock"]
    assert 0 < len(names) <= 20
    assert all(cache.get(name, 1000) is not None for name in names)


@pytest.mark.timeout(60)
def test_a_process_killed_while_it_adds_files_leaves_a_usable_cache(tmp_path: Path) -> None:
    command = [sys.executable, "-c", USER.replace("range(400)", "range(10**9)"), str(tmp_path / "cache"), "1"]
    cache = ContentCache(tmp_path / "cache", max_bytes=20_000)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as user:
        limit = time.monotonic() + 40
        while not cache.folder.exists() or len(list(cache.folder.iterdir())) < 10:
            assert time.monotonic() < limit
            time.sleep(0.01)
        user.kill()
    name = kept(cache, b"0123456789")
    assert cache.get(name, 10) == b"0123456789"
    names = [path.name for path in cache.folder.iterdir() if path.name != ".lock"]
    assert all(cache.get(each, 1000) is not None for each in names)
