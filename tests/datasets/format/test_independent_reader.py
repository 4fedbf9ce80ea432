"""The page is enough to read what qfleet writes, and to write what it reads."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from qfleet.data import Spec
from qfleet.datasets.format import open_dataset
from qfleet.datasets.inspect import validate_dataset
from tests.datasets.convert.cases import ACTIONS, OBSERVATIONS, episodes_of, made_dataset
from tests.datasets.format.independent_reader import read_data_set
from tests.datasets.format.independent_writer import write_data_set
from tests.support.recorded import make_dataset

BOOLS = spaces.Box(0, 1, (2, 3), np.bool_)


@pytest.mark.parametrize("name", [*OBSERVATIONS, "bools"])
@pytest.mark.parametrize("masked", [False, True])
def test_what_qfleet_writes_is_read_by_the_page(tmp_path: Path, name: str, masked: bool) -> None:
    space = (OBSERVATIONS | {"bools": BOOLS})[name]
    made = made_dataset(tmp_path / "a", space, ACTIONS["several"], [1, 5, 3], 7, masked)
    version, found = read_data_set(tmp_path / "a")
    assert version == made.version
    for episode in episodes_of(made):
        theirs = found[episode.id]
        for column, array in episode.observations.items():
            assert theirs["observations"][column].tobytes() == array.tobytes()
        np.testing.assert_array_equal(theirs["action"], episode.action)
        np.testing.assert_array_equal(theirs["reward"], episode.reward)
        assert (theirs["terminated"], theirs["truncated"]) == (episode.terminated, episode.truncated)
        assert (theirs["seed"], theirs["behaviour"], theirs["world"]) == (episode.seed, "chance", "Made-v0")
        assert (theirs["probability"] is None) == (episode.probability is None)
        assert (theirs["mask"] is None) == (episode.mask is None)


def test_several_row_groups_and_files_are_read_by_the_page(tmp_path: Path) -> None:
    made = make_dataset(tmp_path / "a", [900] * 9, spec=Spec((600,), "float64", (2,)), file_bytes=9 << 20)
    assert {(row.file, row.row_group) for row in made.index} >= {
        ("data/all-00000.parquet", 1),
        ("data/all-00001.parquet", 0),
    }
    _, found = read_data_set(tmp_path / "a")
    assert [each["hash"] for each in found.values()] == [row.hash for row in made.index]


def test_sketches_are_those_of_the_page(tmp_path: Path) -> None:
    made_dataset(tmp_path / "a", OBSERVATIONS["vector"], ACTIONS["discrete"], [30, 40], 3, False)
    found = json.loads((tmp_path / "a/statistics.json").read_text())["all"]
    _, episodes = read_data_set(tmp_path / "a")
    rewards = np.concatenate([each["reward"] for each in episodes.values()])
    assert dict(zip(*found["reward"]["sketch"][0].values(), strict=True)) == counted(rewards)
    third = np.concatenate([each["observations"]["obs"][:, 2] for each in episodes.values()])
    assert dict(zip(*found["observations"]["obs"]["sketch"][2].values(), strict=True)) == counted(third)
    assert found["observations"]["obs"]["max"][2] == third.max()


def counted(values: np.ndarray) -> dict[int, int]:
    """A sketch, as the page explains it."""
    found: dict[int, int] = {}
    for value in values.astype(np.float64).tolist():
        bucket = 0
        if abs(value) >= 2**-32:
            e = math.frexp(abs(value))[1] - 1
            bucket = min(1 + 64 * (e + 32) + math.floor(64 * (abs(value) / 2.0**e - 1)), 10_240)
        bucket = -bucket if value < 0 else bucket
        found[bucket] = found.get(bucket, 0) + 1
    return dict(sorted(found.items()))


def test_what_is_written_by_the_page_is_read_and_valid(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    episodes = {
        f"walk {number}": {
            "obs": rng.normal(size=(length + 1, 3)).astype("<f4"),
            "action": rng.integers(0, 2, length),
            "reward": rng.normal(size=length),
            "terminated": number % 2 == 0,
        }
        for number, length in enumerate([1, 7, 4])
    }
    write_data_set(tmp_path / "a", episodes)
    dataset = open_dataset(str(tmp_path / "a"))
    assert validate_dataset(dataset) == []
    assert dataset.version == hashlib.sha256((tmp_path / "a/manifest.json").read_bytes()).hexdigest()
    assert [episode.id for episode in episodes_of(dataset)] == list(episodes)
    np.testing.assert_array_equal(dataset.episode("walk 1").observations["obs"], episodes["walk 1"]["obs"])
