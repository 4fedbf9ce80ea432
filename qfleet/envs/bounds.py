"""Checking observations against the bounds of their space. N values."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from gymnasium import spaces

from qfleet.data import Array

_TOLERANCE = 1e-5  # relative to the bound, absolute below 1: float32 and float64 round differently


class OutsideSpace(Exception):
    """An environment returned a value that its own space does not contain."""

    def __init__(self, field: str, expected: str, got: str, fix: str = "") -> None:
        super().__init__(field, expected, got, fix)
        self.field = field
        self.expected = expected
        self.got = got
        self.fix = fix


class Bounds:
    """The lowest and highest value of every element, with the names of the parts of a composite space."""

    def __init__(self, low: Array, high: Array, parts: Sequence[tuple[str, int]] = ()) -> None:
        self._declared = (low, high)
        self._parts = tuple(parts)
        is_float = low.dtype.kind == "f"
        self.low = _widened(low, -1) if is_float else low
        self.high = _widened(high, 1) if is_float else high
        self.finite = bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    @classmethod
    def of(cls, space: spaces.Box) -> Self | None:
        """The bounds of a Box; None if it has none, or if its dtype cannot exceed them."""
        low = space.low.reshape(space.shape or (1,))
        high = space.high.reshape(space.shape or (1,))
        if space.dtype == np.uint8:
            return None if (low == 0).all() and (high == 255).all() else cls(low, high)
        low = np.asarray(low, np.float64)
        high = np.asarray(high, np.float64)
        return None if np.isinf(low).all() and np.isinf(high).all() else cls(low, high)

    @classmethod
    def joined(cls, parts: Sequence[tuple[Array, Array]], keys: Sequence[str]) -> Self | None:
        """The bounds of several flat parts, concatenated."""
        low = np.concatenate([np.asarray(part[0], np.float64) for part in parts])
        high = np.concatenate([np.asarray(part[1], np.float64) for part in parts])
        sizes = [(key, len(part[0])) for key, part in zip(keys, parts, strict=True)]
        return None if np.isinf(low).all() and np.isinf(high).all() else cls(low, high, sizes)

    def contain(self, values: Array) -> bool:
        """Are all values [..., N] within the bounds?"""
        return bool((values >= self.low).all() and (values <= self.high).all())

    def check(self, values: Array) -> None:
        """Refuse values out of bounds; the error names the first by index and value."""
        wrong = np.argwhere((values < self.low) | (values > self.high))
        if len(wrong):
            at = tuple(int(index) for index in wrong[0])
            low, high = (bound[at] for bound in self._declared)
            expected = f"a value from {low:g} to {high:g}"
            fix = "Mend the environment or the bounds of its space; env.check_bounds=false accepts any finite value."
            raise OutsideSpace(self._name(at), expected, f"{values[at]:.6g}", fix)

    def _name(self, at: tuple[int, ...]) -> str:
        index = at[0]
        for key, size in self._parts:
            if index < size:
                return f"observation{key}[{index}]"
            index -= size
        return f"observation[{', '.join(map(str, at))}]"


def _widened(bound: Any, sign: int) -> Array:
    """A bound as float32, widened by the tolerance."""
    wide = np.asarray(bound, np.float64)
    with np.errstate(over="ignore"):  # the largest floats mean "no bound"
        return (wide + sign * _TOLERANCE * np.maximum(1.0, np.abs(wide))).astype(np.float32)
