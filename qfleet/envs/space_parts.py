"""The parts of a composite observation space: which can be made into numbers, and how."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.data import Array
from qfleet.envs.bounds import OutsideSpace

_ENCODED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Text)
_WHOLE = (spaces.MultiDiscrete, spaces.MultiBinary)  # that are flattened also when they are all there is
_ERRORS = (KeyError, IndexError, ValueError, TypeError, AttributeError, AssertionError)


@dataclass(frozen=True, slots=True)
class SpacePart:
    """A space within a Dict or Tuple that can be flattened; `path` leads to its value, `key` names it."""

    path: tuple[Any, ...]
    space: spaces.Space[Any]
    size: int

    @property
    def key(self) -> str:
        """`['camera'][0]`; empty for a space that is no part of another."""
        return "".join(f"[{step!r}]" for step in self.path)

    def encode(self, obs: Any) -> Array:
        """Its value in an observation as a flat array of floats."""
        try:
            for step in self.path:
                obs = obs[step]
            array = np.asarray(spaces.flatten(self.space, obs), np.float32)
        except _ERRORS as error:
            raise self._refused(f"{type(obs).__name__} ({error!r})") from error
        if array.shape != (self.size,):
            raise OutsideSpace(f"observation{self.key} size when flattened", str(self.size), str(array.shape))
        # A number out of range would only set another element.
        if not isinstance(self.space, spaces.Box) and not self.space.contains(_plain(self.space, obs)):
            raise self._refused(repr(obs))
        return array

    def bounds(self) -> tuple[Array, Array]:
        """The lowest and highest values of its flat array."""
        if isinstance(self.space, spaces.Box):
            return self.space.low.ravel(), self.space.high.ravel()
        return np.full(self.size, -np.inf), np.full(self.size, np.inf)  # looked at when it was encoded

    def _refused(self, got: str) -> OutsideSpace:
        return OutsideSpace(f"observation{self.key}", str(self.space), got)


def encodable(space: spaces.Space[Any]) -> tuple[list[SpacePart], list[str]]:
    """The leaves of a space that can be encoded, and a sentence for each that cannot and is left out."""
    leaves = list[SpacePart]()
    left_out = list[str]()
    for path, part in _walk(space, ()):
        if isinstance(part, _ENCODED) and (path or isinstance(part, _WHOLE)):
            leaves.append(SpacePart(path, part, spaces.flatdim(part)))
        else:
            key = "".join(f"[{step!r}]" for step in path)
            what = f"observation{key} is of type {type(part).__name__}, which is no array of numbers"
            left_out.append(f"{what}: it is left out; to use it, wrap the environment (gymnasium.ObservationWrapper)")
    return leaves, left_out


def _walk(space: spaces.Space[Any], path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], spaces.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _walk(part, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _walk(part, (*path, index))
    else:
        yield path, space


def _plain(space: spaces.Space[Any], obs: Any) -> Any:
    """Lists as arrays, as flattening takes them too."""
    return np.asarray(obs, space.dtype) if isinstance(obs, list | tuple) else obs
