"""The parts of a composite observation space, and how each is encoded as an array of numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.data import Array
from qfleet.envs.bounds import OutsideSpace

_ENCODED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Text)
_FLATTENED_ALONE = (spaces.MultiDiscrete, spaces.MultiBinary)  # flattened even if they are the whole space
_ENCODE_ERRORS = (KeyError, IndexError, ValueError, TypeError, AttributeError, AssertionError)


@dataclass(frozen=True, slots=True)
class SpacePart:
    """A space within a Dict or Tuple that can be flattened; `path` holds the keys that lead to its value."""

    path: tuple[Any, ...]
    space: spaces.Space[Any]
    size: int

    @property
    def key(self) -> str:
        """`['camera'][0]`; empty for a space that is not part of another."""
        return _key(self.path)

    def encode(self, obs: Any) -> Array:
        """This part of an observation as a flat array of floats."""
        try:
            for key in self.path:
                obs = obs[key]
            array = np.asarray(spaces.flatten(self.space, obs), np.float32)
        except _ENCODE_ERRORS as error:
            raise self._refused(f"{type(obs).__name__} ({error!r})") from error
        if array.shape != (self.size,):
            raise OutsideSpace(f"observation{self.key} size when flattened", str(self.size), str(array.shape))
        # Flattening accepts a number out of range: it sets a wrong element.
        if not isinstance(self.space, spaces.Box) and not self.space.contains(_as_array(self.space, obs)):
            raise self._refused(repr(obs))
        return array

    def bounds(self) -> tuple[Array, Array]:
        """The lowest and highest values of the flat array."""
        if isinstance(self.space, spaces.Box):
            return self.space.low.ravel(), self.space.high.ravel()
        return np.full(self.size, -np.inf), np.full(self.size, np.inf)  # `encode` checks other spaces

    def _refused(self, got: str) -> OutsideSpace:
        return OutsideSpace(f"observation{self.key}", str(self.space), got)


def encodable(space: spaces.Space[Any]) -> tuple[list[SpacePart], list[str]]:
    """The leaves of a space that can be encoded, and a sentence for each leaf that is left out."""
    leaves = list[SpacePart]()
    left_out = list[str]()
    for path, part in _walk(space, ()):
        if isinstance(part, _ENCODED) and (path or isinstance(part, _FLATTENED_ALONE)):
            leaves.append(SpacePart(path, part, spaces.flatdim(part)))
        else:
            problem = f"observation{_key(path)} is of type {type(part).__name__}, which is no array of numbers"
            fix = "it is left out; to use it, wrap the environment (gymnasium.ObservationWrapper)"
            left_out.append(f"{problem}: {fix}")
    return leaves, left_out


def is_read(space: spaces.Space[Any]) -> bool:
    """Does a network read this part of a composite space, or anything in it?"""
    return any(isinstance(part, _ENCODED) for _, part in _walk(space, ()))


def _key(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _walk(space: spaces.Space[Any], path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], spaces.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _walk(part, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _walk(part, (*path, index))
    else:
        yield path, space


def _as_array(space: spaces.Space[Any], obs: Any) -> Any:
    """A list as an array, because flattening accepts lists but `contains` does not."""
    return np.asarray(obs, space.dtype) if isinstance(obs, list | tuple) else obs
