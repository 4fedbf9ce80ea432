"""The columns of observations, and how they follow from a spec or from an environment's own spaces."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from gymnasium import spaces
from msgspec import Meta

from qfleet.data import Array, Spec
from qfleet.data.space_format import MAX_PARTS, MAX_VALUES, NumberType, Shape
from qfleet.errors import UsageError

WHOLE = "obs"  # the only column of observations as qfleet's worlds give them, and the beginning of all other names
ColumnName: TypeAlias = Annotated[str, Meta(max_length=300, pattern=r"\Aobs(?:/[^\x00-\x1f\x7f/]+)*\Z")]


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array per row: its bytes in C order, little-endian."""

    name: ColumnName
    dtype: NumberType
    shape: Shape

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def require_fit(self) -> None:
        """Refuse a column that no reader could hold; ValueError."""
        if not 0 < math.prod(self.shape) <= MAX_VALUES:
            raise ValueError(
                f"{self.name} has {math.prod(self.shape):,} values per row, 1 to {MAX_VALUES:,} are allowed"
            )


Columns: TypeAlias = Annotated[tuple[Column, ...], Meta(min_length=1, max_length=MAX_PARTS)]


def spec_columns(spec: Spec) -> tuple[Column, ...]:
    """The one column of observations as qfleet's worlds give them: of a stack, the newest frame."""
    return (Column(WHOLE, spec.dtype, spec.obs),)  # type: ignore[arg-type]


def space_columns(space: spaces.Space[Any]) -> tuple[Column, ...]:
    """A column for each leaf of an environment's own space, in the space's own types."""
    return tuple(_columns(space, WHOLE))


def _columns(space: spaces.Space[Any], name: str) -> Iterator[Column]:
    parts = _parts(space)
    if parts is not None:
        for key, part in parts:
            yield from _columns(part, f"{name}/{key}")
    elif isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete | spaces.Discrete):
        shape = space.shape or ()
        yield Column(name, np.dtype(space.dtype).name, tuple(map(int, shape)))  # type: ignore[arg-type]
    else:
        raise UsageError(
            f"a data set cannot hold observations of type {type(space).__name__} ({name})",
            "Columns hold arrays of numbers of one shape.",
            "Record qfleet's own observations of that environment: qfleet data collect.",
        )


def discrete_ranges(space: spaces.Space[Any], name: str = WHOLE) -> dict[str, tuple[Array, Array]]:
    """The lowest and the highest number of every column that holds numbers of choices."""
    found: dict[str, tuple[Array, Array]] = {}
    for key, part in _parts(space) or []:
        found |= discrete_ranges(part, f"{name}/{key}")
    if isinstance(space, spaces.Discrete):
        low = np.asarray(space.start)
        found[name] = (low, low + space.n - 1)
    elif isinstance(space, spaces.MultiDiscrete):
        found[name] = (np.asarray(space.start), np.asarray(space.start + space.nvec - 1))
    elif isinstance(space, spaces.MultiBinary):
        found[name] = (np.zeros(space.shape), np.ones(space.shape))
    return found


def _parts(space: spaces.Space[Any]) -> list[tuple[str, spaces.Space[Any]]] | None:
    if isinstance(space, spaces.Dict):
        return [(str(key), part) for key, part in space.spaces.items()]
    if isinstance(space, spaces.Tuple):
        return [(str(number), part) for number, part in enumerate(space.spaces)]
    return None


def split_observation(space: spaces.Space[Any], value: Any, name: str = WHOLE) -> dict[str, Array]:
    """An observation of a space as arrays by the names of its columns."""
    if isinstance(space, spaces.Dict):
        found = [split_observation(part, value[key], f"{name}/{key}") for key, part in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        found = [split_observation(part, value[at], f"{name}/{at}") for at, part in enumerate(space.spaces)]
    else:
        return {name: np.asarray(value, space.dtype)}
    return {column: array for each in found for column, array in each.items()}


def join_observation(space: spaces.Space[Any], arrays: dict[str, Array], name: str = WHOLE) -> Any:
    """The observation that was split into these arrays."""
    if isinstance(space, spaces.Dict):
        return {key: join_observation(part, arrays, f"{name}/{key}") for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(join_observation(part, arrays, f"{name}/{at}") for at, part in enumerate(space.spaces))
    return arrays[name]
