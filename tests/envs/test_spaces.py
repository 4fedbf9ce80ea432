"""Adapters of observation and action spaces."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from qfleet.envs.spaces import OutsideSpace, adapt_actions, adapt_obs
from qfleet.errors import UsageError


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float32", "float32"), ("float64", "float32"), ("int64", "float32"), ("uint8", "uint8")]
)
def test_boxes_keep_their_shape_and_are_stored_as_bytes_or_float32(dtype: str, stored: str) -> None:
    adapter = adapt_obs(spaces.Box(0, 100, (2, 3), np.dtype(dtype).type), "x")
    assert (adapter.shape, adapter.dtype) == ((2, 3), stored)
    value = np.arange(6, dtype=dtype).reshape(2, 3)
    np.testing.assert_array_equal(adapter.encode(value), value)


def test_a_box_without_dimensions_becomes_a_vector_of_one() -> None:
    adapter = adapt_obs(spaces.Box(0, 1, (), np.float32), "x")
    assert adapter.shape == (1,)
    assert adapter.encode(np.float32(0.5)).tolist() == [0.5]


def test_bools_are_bytes_that_a_network_reads_as_zero_and_one() -> None:
    adapter = adapt_obs(spaces.Box(0, 1, (3,), np.bool_), "x")
    assert adapter.dtype == "uint8"
    assert adapter.encode(np.array([True, False, True])).tolist() == [255, 0, 255]


def test_discrete_observations_become_one_hot() -> None:
    adapter = adapt_obs(spaces.Discrete(4, start=2), "x")
    assert adapter.encode(np.int64(3)).tolist() == [0, 1, 0, 0]
    for wrong in (1, 6, 2.5, np.array([2, 3])):
        with pytest.raises(OutsideSpace):
            adapter.encode(wrong)


@pytest.mark.parametrize(
    ("space", "value", "flat"),
    [
        (spaces.MultiDiscrete([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0]),
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), [1, 0, 1]),
        (spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 9, (2,)))), (0, np.array([7.0, 8.0])), [1, 0, 7, 8]),
        (
            spaces.Dict({"b": spaces.Box(0, 9, (1, 2)), "a": spaces.Dict({"c": spaces.Discrete(2)})}),
            {"b": np.array([[3.0, 4.0]]), "a": {"c": 1}},
            [0, 1, 3, 4],
        ),
    ],
)
def test_composite_observations_are_flattened(space: Any, value: Any, flat: list[float]) -> None:
    adapter = adapt_obs(space, "x")
    assert (adapter.shape, adapter.dtype) == ((len(flat),), "float32")
    encoded = adapter.encode(value)
    assert encoded.dtype == np.float32
    assert encoded.tolist() == flat


def test_observations_outside_their_space_are_refused() -> None:
    box = adapt_obs(spaces.Box(0, 255, (2,), np.uint8), "x")
    for wrong in (np.zeros(3, np.uint8), np.zeros(2, np.float32), None, [["a"]]):
        with pytest.raises(OutsideSpace):
            box.encode(wrong)
    composite = adapt_obs(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, (2,))}), "x")
    for value in ({"a": 1}, {"a": 1, "b": np.zeros(3)}, 7, {"a": 5, "b": np.zeros(2)}):
        with pytest.raises(OutsideSpace):
            composite.encode(value)


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2))])
def test_observations_without_a_fixed_shape_are_refused(space: Any) -> None:
    with pytest.raises(UsageError, match=rf"'x' has observations of type {type(space).__name__}"):
        adapt_obs(space, "x")


def test_discrete_actions_keep_their_start() -> None:
    adapter = adapt_actions(spaces.Discrete(3, start=5), None, "x")
    assert adapter.counts == (3,)
    assert [adapter.decode(i) for i in range(3)] == [5, 6, 7]


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiDiscrete(np.array([[2, 3], [1, 2]]), start=np.array([[1, 2], [3, 4]])),
        spaces.MultiBinary((2, 2)),
    ],
)
def test_joint_actions_reach_every_combination_once(space: Any) -> None:
    adapter = adapt_actions(space, None, "x")
    total = int(np.prod(adapter.counts))
    decoded = [adapter.decode(i) for i in range(total)]
    assert all(space.contains(action) for action in decoded)
    assert len({action.tobytes() for action in decoded}) == total


def test_box_actions_are_cut_into_bins_from_end_to_end() -> None:
    space = spaces.Box(np.array([-1, 0], np.float32), np.array([1, 4], np.float32))
    adapter = adapt_actions(space, 3, "x")
    assert adapter.counts == (3, 3)
    assert [adapter.decode(i).tolist() for i in (0, 1, 4, 8)] == [[-1, 0], [-1, 2], [0, 2], [1, 4]]
    assert all(space.contains(adapter.decode(i)) for i in range(9))
    assert adapt_actions(space, None, "x").counts == (5, 5)


def test_an_environment_that_writes_into_its_action_changes_nothing() -> None:
    adapter = adapt_actions(spaces.Box(-1, 1, (2,)), 3, "x")
    adapter.decode(0)[:] = 9
    assert adapter.decode(0).tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("space", "bins", "expected"),
    [
        (spaces.Discrete(3), 4, ["env.bins=4 has no effect", "Remove env.bins"]),
        (spaces.MultiDiscrete([3, 3]), 4, ["env.bins=4 has no effect"]),
        (spaces.Box(-1, 1, (30,)), None, ["env.bins=5", "9.3e+20", "5 x 5 x 5 x 5", "env.bins=4"]),
        (spaces.Box(-1, 1, (70,)), 2, ["env.bins=2", "1.2e+21", "fewer dimensions"]),
        (spaces.MultiDiscrete([60_000] * 4), None, ["1.3e+19", "60000 x 60000", "fewer joint actions"]),
        (spaces.MultiBinary(70), None, ["1.2e+21", "64 bits", "fewer joint actions"]),
        (spaces.Box(-np.inf, 1, (1,)), 3, ["without finite bounds"]),
        (spaces.Dict({"a": spaces.Discrete(2)}), None, ["actions of type Dict"]),
    ],
)
def test_unsupported_action_spaces_are_refused(space: Any, bins: int | None, expected: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        adapt_actions(space, bins, "x")
    assert all(text in str(caught.value) for text in expected), str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("shape", "dtype", "noted"),
    [
        ((96, 96, 3), np.uint8, True),
        ((3, 96, 96), np.uint8, False),
        ((7, 7, 3), np.uint8, False),  # too small for convolutions in any order
        ((96, 96, 3), np.float32, False),
    ],
)
def test_a_picture_with_its_channels_last_is_noted(shape: tuple[int, ...], dtype: Any, noted: bool) -> None:
    adapter = adapt_obs(spaces.Box(0, 255, shape, dtype), "Camera-v0")
    assert adapter.shape == shape
    assert ["channels last" in note for note in adapter.notes] == [True] * noted
