import hashlib
import os
from pathlib import Path

from qfleet.datasets.storage import ContentCache


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
