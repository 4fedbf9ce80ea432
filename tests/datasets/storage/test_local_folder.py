from pathlib import Path

import pytest

from qfleet.datasets.storage import open_place
from qfleet.errors import StorageError


def test_files_are_written_whole_and_read_back(tmp_path: Path) -> None:
    place = open_place(str(tmp_path / "deep/set"))
    assert place.names() == []
    place.write("data/a.parquet", b"0123456789")
    place.write("data/a.parquet", b"abcdefghij")
    assert place.names() == ["data/a.parquet"]
    assert place.read("data/a.parquet", 10) == b"abcdefghij"
    assert place.read_range("data/a.parquet", 2, 5) == b"cde"
    assert (place.size("data/a.parquet"), place.exists("data/a.parquet"), place.exists("b")) == (10, True, False)


def test_write_new_never_replaces(tmp_path: Path) -> None:
    place = open_place(str(tmp_path))
    assert place.write_new("manifest.json", b"one")
    assert not place.write_new("manifest.json", b"two")
    assert place.read("manifest.json", 10) == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "link", "folder/secret", "missing"])
def test_names_stay_inside_and_links_are_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    inside = tmp_path / "set"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "folder").symlink_to(tmp_path)
    place = open_place(str(inside))
    with pytest.raises(StorageError):
        place.read(name, 100)
    if name != "missing":
        assert not place.exists(name)


def test_a_larger_file_is_not_read(tmp_path: Path) -> None:
    place = open_place(str(tmp_path))
    place.write("a", b"12345")
    with pytest.raises(StorageError, match="cannot be read"):
        place.read("a", 4)
