"""Broken data sets: each is refused with a clear error and exit code 5."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from qfleet.errors import StorageError
from tests.support.recorded import make_dataset


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "its format is 2": lambda text: text.update(format=2),
    "unknown field": lambda text: text.update(more=1),
    "matching regex": lambda text: text["files"][0].update(name="../../etc/passwd.parquet"),
    "names a file twice": lambda text: text["files"].append(text["files"][0]),
    "one row more per episode": lambda text: text["files"][0].update(rows=10**9),
    "together": lambda text: text.update(num_steps=1),
    "values per row": lambda text: text["observations"][0].update(shape=[8_000_000, 8_000_000]),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_manifest_that_breaks_a_rule_is_refused(tmp_path: Path, reason: str) -> None:
    make_dataset(tmp_path / "a", [5, 5])
    change_manifest(tmp_path / "a", CHANGES[reason])
    with pytest.raises(StorageError, match=reason):
        open_dataset(str(tmp_path / "a"))


def test_without_a_manifest_there_is_no_data_set(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", [5])
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(StorageError, match="there is no data set") as caught:
        open_dataset(str(tmp_path / "a"))
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("name", ["data/all-00000.parquet", "episodes.parquet", "statistics.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "link"])
def test_a_damaged_file_is_found(tmp_path: Path, name: str, damage: str) -> None:
    make_dataset(tmp_path / "a", [5, 5])
    file = tmp_path / "a" / name
    data = file.read_bytes()
    file.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")
    elif damage != "gone":
        file.write_bytes(data[:-10] if damage == "cut" else data[:20] + bytes([data[20] ^ 1]) + data[21:])
    problems = validate_dataset(open_dataset(str(tmp_path / "a")))
    assert len(problems) == 1
    assert name in problems[0].text


def test_a_file_with_other_columns_is_refused_though_its_hash_is_right(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", [5, 5])
    entry = dataset.files()[0]
    table = pq.read_table(tmp_path / "a" / entry.name)
    rewrite(tmp_path / "a", table.set_column(2, "action", table["action"].cast(pa.int32())))
    dataset = open_dataset(str(tmp_path / "a"))
    assert "its columns are not those of the manifest" in validate_dataset(dataset)[0].text


def test_an_episode_cut_in_two_is_found(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", [5, 5])
    table = pq.read_table(tmp_path / "a" / dataset.files()[0].name)
    rows = [*range(3), 5, *range(3, 5), *range(6, 12)]
    rewrite(tmp_path / "a", table.take(rows))
    problems = validate_dataset(open_dataset(str(tmp_path / "a")))
    assert "not in order" in problems[0].text


def rewrite(folder: Path, table: pa.Table) -> None:
    """Replace the only data file, with its new hash in the manifest."""
    import hashlib

    file = folder / "data/all-00000.parquet"
    pq.write_table(table, file)
    data = file.read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change_manifest(folder, lambda text: text["files"][0].update(entry))


def test_another_version_at_the_same_path_is_refused(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", [5, 5])
    assert open_dataset(str(tmp_path / "a"), dataset.version).version == dataset.version
    with pytest.raises(StorageError, match="holds another data set than before"):
        open_dataset(str(tmp_path / "a"), "0" * 64)
