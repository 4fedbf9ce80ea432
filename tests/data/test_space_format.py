"""Spaces as text: what is read is what was written, and a text that would cost much or means nothing is refused."""

import json
import time
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from qfleet.data.space_format import MAX_VALUES, EnvSpaces, SpacesNotKept, read_spaces, write_reason, write_spaces

TWO = spaces.Discrete(2)
NESTED = spaces.Dict(
    {
        "picture": spaces.Box(0, 255, (3, 8, 8), np.uint8),
        "word": spaces.Text(5, min_length=0, charset="zyx"),
        "both": spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiBinary([2, 2])]),
    }
)
KEPT = {
    "vector": spaces.Box(np.array([-1, -np.inf], np.float32), np.array([np.inf, 2.5], np.float32)),
    "doubles": spaces.Box(-1e300, 0.1, (2, 3), np.float64),
    "bytes": spaces.Box(0, 255, (84, 84, 3), np.uint8),
    "flags": spaces.Box(0, 1, (4, 10, 10), np.bool_),
    "integers": spaces.Box(-(2**40), 2**40, (2,), np.int64),
    "scalar": spaces.Box(0.0, 1.0, (), np.float32),
    "empty": spaces.Box(0.0, 1.0, (0,), np.float32),
    "discrete": spaces.Discrete(7, start=-3),
    "multi-discrete": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [2, 3]])),
    "small integers": spaces.MultiDiscrete([2, 3], dtype=np.int32),
    "multi-binary": spaces.MultiBinary(6),
    "nested": NESTED,
    "ordered": spaces.Dict([("b", TWO), ("a", TWO)]),
    "numbers as keys": spaces.Dict([(3, TWO), (1, TWO)]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_read_is_what_was_written(name: str) -> None:
    space = KEPT[name]
    stack = 4 if name == "flags" else 1
    text = write_spaces(EnvSpaces(space, spaces.Discrete(4, start=2), masked=True, stack=stack))
    back = read_spaces(text)
    assert back.observation == space
    assert (back.action, back.masked, back.stack) == (spaces.Discrete(4, start=2), True, stack)
    assert write_spaces(back) == text
    if isinstance(space, spaces.Dict):
        assert isinstance(back.observation, spaces.Dict)
        assert list(back.observation.spaces) == list(space.spaces)
    if isinstance(space, spaces.Box):
        assert isinstance(back.observation, spaces.Box)
        assert back.observation.low.tobytes() == space.low.tobytes()
        assert back.observation.dtype == space.dtype


def test_the_order_of_characters_is_kept() -> None:
    space = spaces.Dict({"word": spaces.Text(5, charset="zyx")})
    back = read_spaces(write_spaces(EnvSpaces(space, TWO))).observation
    assert spaces.flatten(back, {"word": "yz"}).tolist() == spaces.flatten(space, {"word": "yz"}).tolist()


def test_parts_that_no_network_reads_keep_their_names() -> None:
    space = spaces.Dict({"graph": spaces.Graph(spaces.Discrete(2), None), "place": spaces.Box(0, 1, (2,))})
    text = write_spaces(EnvSpaces(space, TWO))
    assert "Graph" in str(read_spaces(text).observation)
    assert write_spaces(read_spaces(text)) == text


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (spaces.Dict([((1, 2), TWO)]), "neither text nor a whole number"),  # type: ignore[list-item]
        (spaces.Box(0, 1, (MAX_VALUES + 1,), np.uint8), "8388608"),
        (spaces.Box(0, 1, (2, MAX_VALUES), np.uint8), "16,777,216 values"),
        (spaces.Box(np.arange(600_000, dtype=np.float64) / 7, np.inf, dtype=np.float64), "bytes"),
        (spaces.Tuple([TWO] * 5_000), "4096"),
    ],
)
def test_spaces_that_cannot_be_kept_say_why(space: Any, reason: str) -> None:
    with pytest.raises(SpacesNotKept, match=reason):
        write_spaces(EnvSpaces(space, TWO))


def test_a_reason_takes_the_place_of_the_spaces() -> None:
    with pytest.raises(SpacesNotKept, match=r"because of \?"):
        read_spaces(write_reason("because of \ud800"))


BOX = {"type": "Box", "shape": [2], "dtype": "float32", "low": 0, "high": 1}
DEEP: dict[str, Any] = {"type": "Discrete", "n": 2, "start": 0}
for _ in range(18):
    DEEP = {"type": "Tuple", "parts": [DEEP]}


def text_of(observation: Any, action: Any = None, **more: Any) -> bytes:
    action = {"type": "Discrete", "n": 2, "start": 0} if action is None else action
    return json.dumps({"format": 1, "observation": observation, "action": action, **more}).encode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b"\xff\xfe", "malformed"),
        (b'{"format": 1}', "lacks the observation space"),
        (text_of(BOX, format=2), "its format is 2"),
        (text_of(BOX, format="1"), "Expected `int`"),
        (text_of(BOX, other=1), "unknown field"),
        (text_of(BOX, stack=0), "stack"),
        (text_of(BOX, stack=10**6), "stack"),
        (text_of(BOX, stack=2), "no stack of 2 frames"),
        (text_of({**BOX, "shape": [4, 2]}, stack=2), "no stack of 2 frames"),
        (text_of({"type": "MultiBinary", "shape": [2, 2]}, stack=2), "no stack of 2 frames"),
        (text_of(BOX, masked="yes"), "Expected `bool`"),
        (text_of({**BOX, "type": "Evil"}), "Evil"),
        (text_of({**BOX, "shape": [2**20, 2**20]}), "1,099,511,627,776 values"),
        (text_of({**BOX, "shape": [2**20] * 33}), "length"),
        (text_of({**BOX, "shape": [-1]}), ">= 0"),
        (text_of({**BOX, "shape": [1.5]}), "Expected `int`"),
        (text_of({**BOX, "dtype": "object"}), "object"),
        (text_of({**BOX, "dtype": "complex64"}), "complex64"),
        (text_of({**BOX, "low": [0, 0, 0]}), "has 3 bounds"),
        (text_of({**BOX, "low": 2}), "no such space"),
        (text_of({**BOX, "low": "nan"}), "nan"),
        (text_of({**BOX, "low": None}), "null"),
        (text_of({**BOX, "dtype": "int8", "high": 10**30}), "no such space"),
        (text_of({**BOX, "dtype": "int8", "high": 300}), "no such space"),
        (text_of({**BOX, "dtype": "uint8", "high": "inf"}), "no such space"),
        (text_of({"type": "Discrete", "n": 0, "start": 0}), ">= 1"),
        (text_of({"type": "Discrete", "n": 10**12, "start": 0}), "<="),
        (text_of({"type": "Discrete", "n": 2, "start": 10**30}), "start"),
        (
            text_of({"type": "MultiDiscrete", "shape": [2], "dtype": "int64", "nvec": [2], "start": [0]}),
            "no such space",
        ),
        (text_of({"type": "MultiDiscrete", "shape": [1], "dtype": "float32", "nvec": [2], "start": [0]}), "float32"),
        (text_of({"type": "Text", "min_length": 5, "max_length": 2, "characters": "a"}), "no such space"),
        (text_of({"type": "Tuple", "parts": [{"type": "Box"}]}), "missing required field"),
        (text_of({"type": "Tuple", "parts": [{"type": "Discrete", "n": 2**22, "start": 0}] * 3}), "12,582,912 values"),
        (text_of({"type": "Dict", "parts": [[None, BOX]]}), "null"),
        (text_of(DEEP), "nested more than 16 levels"),
        (b'{"format":1,"observation":' + b'{"type":"Tuple","parts":[' * 100_000, "recursion"),
        (text_of(BOX, {"type": "MultiBinary", "shape": [2_000]}), "1,024 dimensions"),
        (text_of(BOX, {**BOX, "shape": [50, 50]}), "1,024 dimensions"),
        (b" " * (4 << 20) + b"{}", "4,194,304 are the most"),
    ],
)
def test_a_wrong_text_is_refused_at_once(text: bytes, reason: str) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match=reason):
        read_spaces(text)
    assert time.monotonic() - start < 5
