import tempfile
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.data import Spec
from qfleet.data.space_format import EnvSpaces
from qfleet.datasets.format import (
    Description,
    RecordedEpisode,
    join_observation,
    open_dataset,
    space_columns,
    spec_columns,
    split_observation,
    write_dataset,
)
from qfleet.datasets.storage import open_place
from qfleet.errors import UsageError
from tests.support.recorded import SPEC, make_dataset, make_episode

DICT = spaces.Dict(
    {"place": spaces.Box(-1, 1, (2,), np.float64), "picture": spaces.Box(0, 255, (2, 3), np.uint8)},
    kind=spaces.Discrete(3),
    pair=spaces.Tuple((spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3]))),
)


def require_equal(one: RecordedEpisode, other: RecordedEpisode) -> None:
    assert one.content_hash() == other.content_hash()
    assert (one.id, one.terminated, one.truncated, one.seed) == (
        other.id,
        other.terminated,
        other.truncated,
        other.seed,
    )
    for name, array in one.observations.items():
        assert array.dtype == other.observations[name].dtype
        np.testing.assert_array_equal(array, other.observations[name])


def written(description: Description, episodes: list[RecordedEpisode], file_bytes: int) -> list[RecordedEpisode]:
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(open_place(folder), description, episodes, {}, file_bytes)
        dataset = open_dataset(folder)
        return [episode for file in dataset.files() for episode in dataset.episodes(file)]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_episodes_come_back_bit_for_bit(data: st.DataObject) -> None:
    spec = data.draw(
        st.sampled_from(
            [
                Spec((3,), "float32", (2,)),
                Spec((2, 4), "uint8", (3, 2), masked=True),
                Spec((8, 8), "uint8", (4,), stack=4),
            ]
        )
    )
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=12))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    episodes = [random_episode(rng, number, length, spec) for number, length in enumerate(lengths)]
    read = written(Description("X-v0", spec, spec_columns(spec)), episodes, data.draw(st.sampled_from([1, 500, 10**6])))
    assert len(read) == len(episodes)
    for one, other in zip(episodes, read, strict=True):
        require_equal(one, other)


def random_episode(rng: np.random.Generator, number: int, length: int, spec: Spec) -> RecordedEpisode:
    obs = rng.integers(0, 256, (length + 1, *spec.obs)).astype(spec.dtype)
    action = rng.integers(0, spec.num_actions, length)
    mask = rng.integers(0, 2, (length + 1, spec.num_actions)) > 0
    mask[np.arange(length), action] = True
    return RecordedEpisode(
        id=f"é{number}",
        observations={"obs": obs},
        action=action,
        reward=rng.normal(size=length),
        terminated=bool(rng.integers(2)),
        truncated=bool(rng.integers(2)),
        probability=rng.uniform(0.1, 1.0, length) if rng.integers(2) else None,
        mask=mask if spec.masked else None,
        seed=int(rng.integers(100)) if rng.integers(2) else None,
    )


def test_observations_of_a_dict_have_a_column_per_leaf_in_its_own_type() -> None:
    columns = space_columns(DICT)
    assert {(each.name, each.dtype, each.shape) for each in columns} == {
        ("obs/picture", "uint8", (2, 3)),
        ("obs/place", "float64", (2,)),
        ("obs/kind", "int64", ()),
        ("obs/pair/0", "int8", (2,)),
        ("obs/pair/1", "int64", (2,)),
    }
    values = [DICT.sample() for _ in range(4)]
    parts = [split_observation(DICT, value) for value in values]
    observations = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
    episode = RecordedEpisode("a", observations, np.array([0, 1, 0]), np.zeros(3), False, True)
    spec = Spec((13,), "float32", (2,))
    kept = EnvSpaces(DICT, spaces.Discrete(2))
    (read,) = written(Description("X-v0", spec, columns, kept), [episode], 10**6)
    require_equal(episode, read)
    for at, value in enumerate(values):
        back = join_observation(DICT, {name: array[at] for name, array in read.observations.items()})
        assert DICT.contains({**back, "kind": np.int64(back["kind"])})
        np.testing.assert_array_equal(back["place"], value["place"])


def test_the_same_episodes_make_the_same_version(tmp_path: Path) -> None:
    one = make_dataset(tmp_path / "one", [5, 1, 9])
    other = make_dataset(tmp_path / "other", [5, 1, 9])
    third = make_dataset(tmp_path / "third", [5, 1, 8])
    assert one.version == other.version != third.version


def test_files_have_a_limit_and_never_cut_an_episode(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", [5] * 20, file_bytes=700)
    assert len(dataset.files()) > 4
    assert sum(file.episodes for file in dataset.files()) == 20
    assert [dataset.episode(f"e{number}").num_steps for number in (0, 19)] == [5, 5]


def test_an_episode_that_breaks_a_rule_is_refused(tmp_path: Path) -> None:
    broken = make_episode(0)
    broken.reward[2] = np.nan
    description = Description("X-v0", SPEC, spec_columns(SPEC))
    with pytest.raises(UsageError, match="a reward is not a finite number"):
        write_dataset(open_place(str(tmp_path / "a")), description, [broken], {})
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_a_place_with_a_data_set_is_not_written_again(tmp_path: Path) -> None:
    make_dataset(tmp_path / "a", [5])
    with pytest.raises(UsageError, match="holds a data set already"):
        make_dataset(tmp_path / "a", [6])
