"""What a reader would refuse is not written."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qfleet.data import Spec
from qfleet.data.space_format import EnvSpaces
from qfleet.datasets.format import (
    Description,
    RecordedEpisode,
    open_dataset,
    space_columns,
    spec_columns,
    write_dataset,
)
from qfleet.datasets.inspect import validate_dataset
from qfleet.datasets.storage import open_place
from qfleet.errors import UsageError
from tests.datasets.convert.cases import ACTIONS, OBSERVATIONS, made_dataset
from tests.support.recorded import SPEC, make_episode

GOOD = make_episode(1)
OBS = GOOD.observations["obs"]


def write(folder: Path, episode: RecordedEpisode, description: Description | None = None) -> None:
    write_dataset(open_place(folder), description or Description("X-v0", SPEC, spec_columns(SPEC)), [episode], {})


BROKEN: dict[str, dict[str, Any]] = {
    "its id has 4,098 bytes": {"id": "é" * 2_049},
    "its behaviour has 5,000 bytes": {"behaviour": "x" * 5_000},
    "its world is not valid text": {"env_id": "\ud800"},
    "does not fit into 64 bits": {"seed": 2**63},
    "an action is not one of 2": {"action": np.array([0, 1, 2, 0, 0])},
    "values of action are float64, and do not fit into int64": {"action": np.array([0, 0.5, 1, 0, 0])},
    "larger than 3.40282e.38": {"reward": np.array([1e39, 0, 0, 0, 0])},
    "values of obs are float64, and do not fit into float32": {"observations": {"obs": OBS.astype(np.float64) + 1e-9}},
    "obs has the shape .2., and the layout .3.": {"observations": {"obs": OBS[:, :2]}},
    "its observations are other": {"observations": {"other": OBS}},
    "obs belongs to 4 steps": {"observations": {"obs": OBS[:-1]}},
    "it has masks, and its environment has none": {"mask": np.ones((6, 2), np.bool_)},
    "a probability is not above 0": {"probability": np.array([0.5, np.nan, 1, 1, 1])},
    "it has no steps": {"observations": {"obs": OBS[:1]}, "action": np.zeros(0, np.int64), "reward": np.zeros(0)},
}


@pytest.mark.parametrize("problem", BROKEN)
def test_an_episode_that_no_reader_takes_is_not_written(tmp_path: Path, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        write(tmp_path / "a", replace(GOOD, **BROKEN[problem]))
    assert not (tmp_path / "a/manifest.json").exists()


def test_choices_outside_of_their_space_and_forbidden_actions_are_not_written(tmp_path: Path) -> None:
    space = spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete([2, 2])))
    spec = Spec((7,), "float32", (2,), masked=True)
    description = Description("X-v0", spec, space_columns(space), EnvSpaces(space, spaces.Discrete(2), masked=True))
    observations = {"obs/0": np.array([0, 2]), "obs/1": np.array([[0, 1], [1, 1]])}
    episode = RecordedEpisode("a", observations, np.array([1]), np.zeros(1), True, False)
    write(tmp_path / "a", episode, description)
    assert validate_dataset(open_dataset(str(tmp_path / "a"))) == []
    for name, odd in (("obs/0", np.array([0, 3])), ("obs/1", np.array([[0, 1], [1, -1]]))):
        with pytest.raises(UsageError, match=f"{name} holds a number outside of its space"):
            write(tmp_path / "b", replace(episode, observations=observations | {name: odd}), description)
    with pytest.raises(UsageError, match="not allowed by its mask"):
        write(tmp_path / "b", replace(episode, mask=np.array([[True, False], [True, True]])), description)


def test_arrays_of_other_types_are_written_in_those_of_the_format(tmp_path: Path) -> None:
    odd = replace(
        GOOD,
        observations={"obs": OBS.astype(">f8")},
        action=GOOD.action.astype(np.int8),
        reward=GOOD.reward.astype(np.float32),
    )
    write(tmp_path / "a", odd)
    dataset = open_dataset(str(tmp_path / "a"))
    assert validate_dataset(dataset) == []
    assert dataset.episode("e1").content_hash() == GOOD.content_hash()


def test_what_the_manifest_cannot_hold_is_not_published(tmp_path: Path) -> None:
    description = Description("X-v0", SPEC, spec_columns(SPEC))
    with pytest.raises(UsageError, match="this data set cannot be published"):
        write_dataset(open_place(tmp_path / "a"), description, [GOOD], {"note": "x" * 20_000})
    assert not (tmp_path / "a/manifest.json").exists()


@settings(max_examples=25, deadline=None)
@example("dict", "several", [1, 4], 0, True)
@example("picture", "binary", [1], 3, False)
@given(
    observation=st.sampled_from(sorted(OBSERVATIONS)),
    action=st.sampled_from(sorted(ACTIONS)),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    masked=st.booleans(),
)
def test_whatever_is_written_is_valid(
    observation: str, action: str, lengths: list[int], seed: int, masked: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = made_dataset(Path(folder), OBSERVATIONS[observation], ACTIONS[action], lengths, seed, masked)
        assert validate_dataset(made) == []
