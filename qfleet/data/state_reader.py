"""Checked reading of saved state: a field with the wrong type, shape or range is a ValueError that names it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from qfleet.data.types import Array, State
from qfleet.errors import UsageError

INTEGERS = "iu"
FLOATS = "f"
FLAGS = "b"
MAX_NUMBER = 1e300
_PHILOX_BUFFER = 4  # numbers


def saved_array(state: State, name: str, kinds: str, shape: tuple[int | None, ...]) -> Array:
    """One array of these dtype kinds and this shape (None: any length); floats must be finite."""
    array = saved_value(state, name)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds:
        raise ValueError(f"{name}: expected an array of kind {kinds!r}, got {_described(array)}")
    fits = len(shape) == array.ndim and all(want in (None, got) for want, got in zip(shape, array.shape, strict=True))
    if not fits:
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name}: expected finite numbers")
    return array


def saved_numbers(state: State, name: str, shape: tuple[int | None, ...], low: int, high: int) -> Array:
    """An array of integers from `low` to `high`."""
    array = saved_array(state, name, INTEGERS, shape)
    if array.size and not (low <= int(array.min()) and int(array.max()) <= high):
        raise ValueError(f"{name}: expected {low} to {high}, got {int(array.min())} to {int(array.max())}")
    return array


def saved_count(state: State, name: str, high: int = 2**53, *, low: int = 0) -> int:
    """One integer from `low` to `high`."""
    value = saved_value(state, name)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"{name}: expected an integer from {low} to {high}, got {_described(value)}")
    return int(value)


def saved_number(state: State, name: str) -> float:
    """One finite number."""
    value = saved_value(state, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
        raise ValueError(f"{name}: expected a number, got {_described(value)}")
    return float(value)


def saved_tree(state: State, name: str) -> dict[str, Any]:
    """A field that holds other fields."""
    value = saved_value(state, name)
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected named values, got {_described(value)}")
    return value


def saved_value(state: State, name: str) -> Any:
    """A field of any type, which must be present."""
    if not isinstance(state, Mapping) or name not in state:
        raise ValueError(f"{name} is missing")
    return state[name]


def restore_generator(generator: np.random.Generator, state: State) -> None:
    """Restore a generator's state."""
    # NumPy accepts any position and would read outside the buffer.
    if isinstance(generator.bit_generator, np.random.Philox):
        saved_count(state, "buffer_pos", _PHILOX_BUFFER)
    try:
        generator.bit_generator.state = state
    except (KeyError, TypeError, IndexError, OverflowError, ValueError) as error:
        raise ValueError(f"the generator's state does not fit: {error!r}") from error


def check_lanes(saved: int, num: int) -> None:
    """Refuse a saved world with another number of lanes."""
    if saved != num:
        raise UsageError(
            f"env.num={num}, but the checkpoint holds {saved} environments.",
            "An environment's episode can only be continued in a lane of its own.",
            f"Resume with env.num={saved}.",
        )


def _described(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else repr(value)[:60]
