"""What goes into a checkpoint comes out of it exactly."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qfleet.save.damage import Damaged
from qfleet.save.state import pack_state, pack_tensors, unpack_state, unpack_tensors

DTYPES = ["?", "u1", "i1", "f2", "c8"] + [
    order + kind for order in "<>" for kind in ("u2", "i4", "u8", "i8", "f4", "f8")
]
KEYS = st.text(max_size=6) | st.sampled_from(["$array", "$$x", "a/b", "~1", "__metadata__", ""])
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0)))
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
)
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS | ARRAYS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


def same(left: Any, right: Any) -> bool:
    """Equal with type, dtype, byte order, shape, bits and key order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return (left.dtype.str, left.shape, left.tobytes()) == (right.dtype.str, right.shape, right.tobytes())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right and (not isinstance(left, float) or math.copysign(1, left) == math.copysign(1, right)))


@given(TREES)
def test_a_tree_is_restored_exactly(tree: dict[str, Any]) -> None:
    files = pack_state(tree)
    assert same(unpack_state(files), tree)
    assert pack_state(tree) == files


def test_no_two_paths_share_a_name() -> None:
    tree = {"a/b": np.array(1), "a": {"b": np.array(2)}, "~1": np.array(3), "/": np.array(4), "~01": np.array(5)}
    assert same(unpack_state(pack_state(tree)), tree)


def test_generators_are_restored() -> None:
    for kind in (np.random.Philox, np.random.PCG64):
        rng = np.random.Generator(kind(7))
        rng.random(5)
        state = unpack_state(pack_state(rng.bit_generator.state))
        copy = np.random.Generator(kind(0))
        copy.bit_generator.state = state
        assert np.array_equal(copy.random(9), rng.random(9))


def test_views_are_saved_and_restored_writable() -> None:
    grid = np.arange(24, dtype=np.int32).reshape(4, 6)
    for view in (grid.T, grid[::2, ::-1], grid[:, 1], np.asfortranarray(grid), np.broadcast_to(grid[0], (3, 6))):
        back = unpack_state(pack_state({"x": view}))["x"]
        assert np.array_equal(back, view)
        back[...] = 0
        assert np.array_equal(unpack_tensors(pack_tensors({"x": view}))["x"], view)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (math.nan, "state/a/1: nan"),
        (-math.inf, "state/a/1: -inf"),
        ((1, 2), "state/a/1: a tuple"),
        (np.float64(1.0), "state/a/1: a float64"),
        (b"x", "state/a/1: a bytes"),
        ({1: 2}, "state/a/1: the key 1"),
        (np.array([None]), "/a/1: arrays of dtype object"),
        (np.zeros(2, "u1,f4"), "/a/1: arrays of dtype"),
        (np.array(["x"]), "/a/1: arrays of dtype <U1"),
    ],
)
def test_values_that_cannot_be_restored_exactly_are_refused_with_their_path(leaf: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message.replace("[", r"\[")):
        pack_state({"a": [0, leaf]})


@pytest.mark.parametrize(
    "change",
    [
        {"state.json": b"{"},
        {"state.json": b"[]"},
        {"state.json": b'{"x":NaN}'},
        {"state.json": b'{"x":{"$array":"/nowhere"}}'},
        {"state.json": b'{"x":{"$array":["/x"]}}'},
        {"state.json": b'{"x":1}'},
        {"state.json": b"[" * 100_000},
        {"state.json": b'{"x":' + b"9" * 10_000 + b"}"},
        {"state.json": b"\xff\xfe"},
        {"state.safetensors": b""},
        {"state.safetensors": b"\xff" * 8},
        {"state.safetensors": pack_tensors({"/x": np.zeros(2)})[:-1]},
        {"state.safetensors": pack_tensors({"/y": np.zeros(2)})},
    ],
)
def test_malformed_files_are_damage(change: dict[str, bytes]) -> None:
    with pytest.raises(Damaged):
        unpack_state(pack_state({"x": np.zeros(2)}) | change)


def test_a_missing_file_and_an_unknown_dtype_are_damage() -> None:
    with pytest.raises(Damaged, match=r"state\.safetensors missing"):
        unpack_state({"state.json": b"{}"})
    header = json.dumps({"x": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}).encode()
    with pytest.raises(Damaged):
        unpack_tensors(len(header).to_bytes(8, "little") + header)
