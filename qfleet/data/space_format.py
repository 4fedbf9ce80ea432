"""Gymnasium spaces as plain JSON: they travel between processes, and a policy is used without its environment.

The text may come from a stranger: every field has a type, and counts, sizes and nesting have limits, which are checked
before a space is made.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from gymnasium import spaces
from msgspec import Meta

from qfleet.data.types import Array

FORMAT = 1
MAX_BYTES = 4 << 20  # of the text
MAX_VALUES = 1 << 23  # of one observation when it is flat: three colours of 1920 x 1080 are 6.2 million
MAX_PARTS = 4_096
MAX_LEVELS = 16
MAX_ACTION_AXES = 1_024
_MAX_AXES = 32
_INT64 = 2**63
_BUILD_ERRORS = (AssertionError, ValueError, TypeError, OverflowError, RecursionError)

Count: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_VALUES)]
Integer: TypeAlias = Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)]
Shape: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_VALUES)], ...], Meta(max_length=_MAX_AXES)]
Number: TypeAlias = int | float | Literal["inf", "-inf"]
IntegerType: TypeAlias = Literal["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NumberType: TypeAlias = Literal["float16", "float32", "float64", "bool"] | IntegerType


class SpacesNotKept(ValueError):
    """These spaces cannot be written as plain JSON; the text says why."""


@dataclass(frozen=True, slots=True)
class EnvSpaces:
    """The original spaces of an environment; `stack` is the number of frames in one observation."""

    observation: spaces.Space[Any]
    action: spaces.Space[Any]
    masked: bool = False
    stack: int = 1


class LeftOutSpace(spaces.Space[Any]):
    """A part of a space that no network reads, for example a graph."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def contains(self, x: Any) -> bool:
        """Whatever the environment gives."""
        return True

    def __repr__(self) -> str:
        return f"{self.name} (not read)"


class SavedSpace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """What every saved space has: its type, and no unknown fields."""


class SavedBox(SavedSpace, frozen=True, tag="Box"):
    """A Box; a bound is one number for all elements, or one per element in C order."""

    shape: Shape
    dtype: NumberType
    low: Number | list[Number]
    high: Number | list[Number]


class SavedDiscrete(SavedSpace, frozen=True, tag="Discrete"):
    """A Discrete."""

    n: Count
    start: Integer


class SavedMultiDiscrete(SavedSpace, frozen=True, tag="MultiDiscrete"):
    """A MultiDiscrete; counts and starts are in C order."""

    shape: Shape
    dtype: IntegerType
    nvec: list[Count]
    start: list[Integer]


class SavedMultiBinary(SavedSpace, frozen=True, tag="MultiBinary"):
    """A MultiBinary."""

    shape: Shape


class SavedText(SavedSpace, frozen=True, tag="Text"):
    """A Text; the order of its characters decides how it is encoded."""

    min_length: Annotated[int, Meta(ge=0, le=MAX_VALUES)]
    max_length: Annotated[int, Meta(ge=0, le=MAX_VALUES)]
    characters: Annotated[str, Meta(max_length=1 << 17)]


class SavedDict(SavedSpace, frozen=True, tag="Dict"):
    """A Dict, in its own order."""

    parts: Annotated[list[tuple[str | Integer, "AnySaved"]], Meta(max_length=MAX_PARTS)]


class SavedTuple(SavedSpace, frozen=True, tag="Tuple"):
    """A Tuple."""

    parts: Annotated[list["AnySaved"], Meta(max_length=MAX_PARTS)]


class SavedOther(SavedSpace, frozen=True, tag="Other"):
    """A part that no network reads."""

    name: Annotated[str, Meta(max_length=200)]


AnySaved: TypeAlias = (
    SavedBox | SavedDiscrete | SavedMultiDiscrete | SavedMultiBinary | SavedText | SavedDict | SavedTuple | SavedOther
)


class SavedSpaces(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The whole text: both spaces, or why they are not there."""

    format: int
    observation: AnySaved | None = None
    action: AnySaved | None = None
    masked: bool = False
    stack: Annotated[int, Meta(ge=1, le=64)] = 1
    not_kept: str = ""


# --- writing ---


def write_spaces(kept: EnvSpaces) -> bytes:
    """Both spaces as JSON; SpacesNotKept if there is no such text or `read_spaces` would refuse it."""
    saved = SavedSpaces(FORMAT, _save(kept.observation), _save(kept.action), kept.masked, kept.stack)
    try:
        text = msgspec.json.encode(saved)
        read_spaces(text)
    except (UnicodeEncodeError, ValueError) as error:
        raise SpacesNotKept(str(error)) from error
    return text


def write_reason(reason: str) -> bytes:
    """A text that says why the spaces are not kept."""
    return msgspec.json.encode(SavedSpaces(FORMAT, not_kept=reason[:500].encode(errors="replace").decode()))


def _save(space: spaces.Space[Any]) -> AnySaved:
    match space:
        case spaces.Box():
            return SavedBox(space.shape, _dtype(space), _save_bound(space.low), _save_bound(space.high))
        case spaces.Discrete():
            return SavedDiscrete(int(space.n), int(space.start))
        case spaces.MultiDiscrete():
            nvec = np.ravel(space.nvec).tolist()
            return SavedMultiDiscrete(np.shape(space.nvec), _dtype(space), nvec, np.ravel(space.start).tolist())
        case spaces.MultiBinary():
            return SavedMultiBinary(tuple(space.shape))
        case spaces.Text():
            return SavedText(int(space.min_length), int(space.max_length), "".join(space.character_list))
        case spaces.Dict():
            return SavedDict([(_key(key), _save(part)) for key, part in space.spaces.items()])
        case spaces.Tuple():
            return SavedTuple([_save(part) for part in space.spaces])
        case LeftOutSpace():
            return SavedOther(space.name)
        case _:
            return SavedOther(type(space).__name__[:200])


def _dtype(space: spaces.Space[Any]) -> Any:
    return np.dtype(space.dtype or np.float32).name


def _save_bound(bound: Array) -> Any:
    flat = np.ravel(bound)
    if flat.size > 0 and (flat == flat[0]).all():
        return _save_number(flat[0].item())
    return [_save_number(each) for each in flat.tolist()]


def _save_number(value: float) -> Number:
    if math.isfinite(value):
        return int(value) if isinstance(value, bool) else value
    return "inf" if value > 0 else "-inf"


def _key(key: object) -> str | int:
    if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
        return key
    raise SpacesNotKept(f"a Dict has the key {key!r}, which is neither text nor a whole number")


# --- reading ---


def read_spaces(text: bytes) -> EnvSpaces:
    """The spaces of a text; ValueError if it is anything else, SpacesNotKept if it says why there are none."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has {len(text):,} bytes, and {MAX_BYTES:,} are the most")
    try:
        saved = msgspec.json.decode(text, type=SavedSpaces)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if saved.format != FORMAT:
        raise ValueError(f"its format is {saved.format}, and this version of qfleet reads format {FORMAT}")
    if saved.not_kept:
        raise SpacesNotKept(saved.not_kept)
    if saved.observation is None or saved.action is None:
        raise ValueError("it lacks the observation space or the action space")
    _require_small(saved.observation)
    _require_small(saved.action)
    if math.prod(getattr(saved.action, "shape", ())) > MAX_ACTION_AXES:
        raise ValueError(f"its actions have more than {MAX_ACTION_AXES:,} dimensions")
    _require_stack(saved.observation, saved.stack)
    try:
        observation = _make(saved.observation)
        action = _make(saved.action)
    except _BUILD_ERRORS as error:
        raise ValueError(f"there is no such space: {error}") from error
    return EnvSpaces(observation, action, saved.masked, saved.stack)


def _require_stack(space: AnySaved, stack: int) -> None:
    shape = space.shape if isinstance(space, SavedBox) else ()
    if stack > 1 and (len(shape) < 2 or shape[0] != stack):
        raise ValueError(f"its observation is no stack of {stack} frames")


def _require_small(space: AnySaved) -> None:
    """Refuse a space that would cost its reader much memory or time."""
    values = 0
    for number, part in enumerate(_walk(space, 0)):
        if number >= MAX_PARTS:
            raise ValueError(f"a space has more than {MAX_PARTS:,} parts")
        values += _num_values(part)
    if values > MAX_VALUES:
        raise ValueError(f"a space has {values:,} values, and {MAX_VALUES:,} are the most")


def _walk(space: AnySaved, level: int) -> Iterator[AnySaved]:
    if level > MAX_LEVELS:
        raise ValueError(f"a space is nested more than {MAX_LEVELS} levels deep")
    yield space
    if isinstance(space, SavedDict):
        for _, part in space.parts:
            yield from _walk(part, level + 1)
    elif isinstance(space, SavedTuple):
        for part in space.parts:
            yield from _walk(part, level + 1)


def _num_values(space: AnySaved) -> int:
    match space:
        case SavedBox() | SavedMultiBinary():
            return math.prod(space.shape)
        case SavedDiscrete():
            return space.n
        case SavedMultiDiscrete():
            return sum(space.nvec)
        case SavedText():
            return space.max_length
        case _:
            return 0


def _make(space: AnySaved) -> spaces.Space[Any]:
    match space:
        case SavedBox(dtype=dtype):
            low = _make_bound(space.low, space)
            return spaces.Box(low, _make_bound(space.high, space), space.shape, np.dtype(dtype).type)
        case SavedDiscrete():
            return spaces.Discrete(space.n, start=space.start)
        case SavedMultiDiscrete(dtype=dtype):
            nvec = np.array(space.nvec, dtype).reshape(space.shape)
            return spaces.MultiDiscrete(nvec, dtype, start=np.array(space.start, dtype).reshape(space.shape))
        case SavedMultiBinary():
            return spaces.MultiBinary(space.shape[0] if len(space.shape) == 1 else space.shape)
        case SavedText():
            return spaces.Text(space.max_length, min_length=space.min_length, charset=space.characters)
        case SavedDict():
            parts: Any = OrderedDict((key, _make(part)) for key, part in space.parts)  # other mappings are sorted
            return spaces.Dict(parts)
        case SavedTuple():
            return spaces.Tuple([_make(part) for part in space.parts])
        case SavedOther():
            return LeftOutSpace(space.name)


def _make_bound(bound: Any, box: SavedBox) -> Array:
    if not isinstance(bound, list):
        return np.full(box.shape, np.array(_make_number(bound, box), box.dtype), box.dtype)
    if len(bound) != math.prod(box.shape):
        raise ValueError(f"a Box of shape {box.shape} has {len(bound)} bounds")
    return np.array([_make_number(each, box) for each in bound], box.dtype).reshape(box.shape)


def _make_number(value: Number, box: SavedBox) -> int | float:
    if isinstance(value, str) and not box.dtype.startswith("float"):
        raise ValueError(f"{box.dtype} has no infinity")
    return float(value) if isinstance(value, str) else value
