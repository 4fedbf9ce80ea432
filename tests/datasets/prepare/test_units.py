from pathlib import Path

import pytest

from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from qfleet.datasets.prepare import PreparePlan, SplitRule, prepare_dataset
from qfleet.datasets.prepare.units import unit_bytes
from tests.support.recorded import make_dataset


def test_many_small_files_become_few_full_ones(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "raw", [10 + at % 5 for at in range(4_000)], file_bytes=3_000)
    assert len(dataset.files()) >= 500
    file_bytes = 64_000
    prepare_dataset(dataset, str(tmp_path / "out"), PreparePlan(SplitRule(80, 20, 0), file_bytes=file_bytes))
    prepared = open_dataset(str(tmp_path / "out"))
    assert validate_dataset(prepared) == []
    assert {row.id for row in prepared.index} == {row.id for row in dataset.index}
    row_bytes = prepared.manifest.layout.row_bytes
    sizes = [file.rows * row_bytes for file in prepared.files()]
    assert max(sizes) <= file_bytes
    assert min(sizes) >= file_bytes / 3
    assert len(sizes) < 1.6 * sum(sizes) / file_bytes + 2


def test_units_fill_files_but_leave_work_for_several() -> None:
    file = 64
    assert unit_bytes([80, 10, 10], file) == 80  # a small set: one training file
    assert unit_bytes([8_000, 1_000, 1_000], file) == 625  # larger: sixteen units
    assert unit_bytes([80_000, 10_000, 10_000], file) == 640  # large: a file of every split
    assert unit_bytes([10**9, 10**9, 1], file) == 32 * file  # what one lost worker costs is bounded
    assert unit_bytes([], file) == file


def test_an_episode_larger_than_a_file_has_one_for_itself(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "raw", [500, 3, 3, 500, 3], file_bytes=1_000)
    prepare_dataset(dataset, str(tmp_path / "out"), PreparePlan(SplitRule(100, 0, 0), file_bytes=2_000))
    prepared = open_dataset(str(tmp_path / "out"))
    assert validate_dataset(prepared) == []
    assert prepared.manifest.num_episodes == 5


def test_files_of_other_settings_have_other_names(tmp_path: Path) -> None:
    """A killed preparation and one with other settings never write the same file."""
    dataset = make_dataset(tmp_path / "raw", [5] * 50)
    names = []
    for salt in ("a", "b"):
        prepare_dataset(dataset, str(tmp_path / salt), PreparePlan(SplitRule(salt=salt)))
        names.append({file.name for file in open_dataset(str(tmp_path / salt)).files()})
    assert not names[0] & names[1]


@pytest.mark.parametrize("num", [1, 3])
def test_row_groups_never_cut_an_episode(tmp_path: Path, num: int) -> None:
    dataset = make_dataset(tmp_path / "raw", [7] * 30 * num, file_bytes=1_000)
    prepare_dataset(dataset, str(tmp_path / "out"), PreparePlan(file_bytes=5_000))
    prepared = open_dataset(str(tmp_path / "out"))
    for file in prepared.files():
        for rows in prepared.row_groups(file):
            assert rows.problems() == []
