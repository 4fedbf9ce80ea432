"""Minari's HDF5 storage: one file with a group per episode. Links out of the file are not followed."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gymnasium import spaces

from qfleet.data import Array
from qfleet.datasets.convert.foreign import MAX_EPISODE_BYTES, clear_errors, open_foreign, require_decoded_size
from qfleet.datasets.convert.pictures import decode_picture
from qfleet.datasets.format.columns import WHOLE
from qfleet.errors import UsageError
from qfleet.install import install_command

FILE = "main_data.hdf5"
MAX_MEMBERS = 10_000  # of a group
FILTERS = {1, 2, 3, 5, 6, 32_000}  # deflate, shuffle, fletcher32, n-bit, scale-offset, LZF: all within h5py


def require_hdf5() -> Any:
    """The module `h5py`."""
    try:
        import h5py
    except ImportError as error:
        raise UsageError(
            "HDF5 files need the package h5py",
            f"It cannot be imported: {error}.",
            f"Run: {install_command('minari')}",
        ) from error
    return h5py


class MinariHdf5:
    """Reads episodes by their numbers."""

    def __init__(self, folder: Path, see_picture: Callable[[str], object]) -> None:
        self.folder = folder
        self.see_picture = see_picture

    @contextmanager
    def _open(self, number: int) -> Iterator[Any]:
        h5py = require_hdf5()
        with clear_errors(self.folder / FILE), open_foreign(self.folder, FILE) as data, h5py.File(data, "r") as file:
            yield _member(file, f"episode_{number}")

    def metadata(self, number: int) -> bytes:
        """The attributes of an episode as JSON."""
        with self._open(number) as group:
            found = {str(name): _plain(value) for name, value in group.attrs.items()}
        return msgspec.json.encode(found)

    def episode(self, number: int) -> "Hdf5Episode":
        """The arrays of an episode."""
        with self._open(number) as group:
            return Hdf5Episode(_arrays(group, 0), self.see_picture)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value.tolist() if isinstance(value, np.ndarray) else value


def _member(group: Any, name: str) -> Any:
    """A member that is in the file itself."""
    h5py = require_hdf5()
    link = group.get(name, getlink=True)
    if not isinstance(link, h5py.HardLink):
        raise ValueError(f"{name} is missing, or a link to somewhere else")
    return group[name]


def _arrays(group: Any, level: int, room: list[int] | None = None) -> dict[str, Any]:
    """The arrays of a group, in dicts like its groups; `room` is what they may still take."""
    h5py = require_hdf5()
    room = room if room is not None else [MAX_EPISODE_BYTES]
    if level > 16 or len(group) > MAX_MEMBERS:
        raise ValueError("its groups are nested too deeply, or have too many members")
    found: dict[str, Any] = {}
    for name in group:
        member = _member(group, name)
        if isinstance(member, h5py.Group):
            found[name] = _arrays(member, level + 1, room)
        elif isinstance(member, h5py.Dataset):
            found[name] = _array(member, name, room)
        else:
            raise ValueError(f"{name} is neither a group nor an array")
    return found


def _array(dataset: Any, name: str, room: list[int]) -> Array:
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"{name} is stored in another file")
    if dataset.shape is None:
        raise ValueError(f"{name} is empty")
    _require_numbers(dataset, name)
    room[0] -= dataset.size * max(dataset.dtype.itemsize, 1)
    if room[0] < 0:
        raise ValueError(f"with {name} its episode would take more than {MAX_EPISODE_BYTES:,} bytes of memory")
    return np.asarray(dataset[()])


def _require_numbers(dataset: Any, name: str) -> None:
    """Refuse values that are no numbers, encoded pictures or texts, and filters that would be looked for elsewhere."""
    encoded = require_hdf5().check_vlen_dtype(dataset.dtype)
    if dataset.dtype.kind not in "biufS" and not (encoded is not None and np.dtype(encoded) == np.uint8):
        raise ValueError(f"{name} holds {dataset.dtype}, and no numbers")
    settings = dataset.id.get_create_plist()
    filters = {settings.get_filter(at)[0] for at in range(settings.get_nfilters())}
    if not filters <= FILTERS:
        raise ValueError(f"{name} is compressed by filter {max(filters - FILTERS)}, which is not read")


class Hdf5Episode:
    """One episode."""

    def __init__(self, arrays: dict[str, Any], see_picture: Callable[[str], object]) -> None:
        self.arrays = arrays
        self.see_picture = see_picture

    def observations(self, space: spaces.Space[Any]) -> dict[str, Array]:
        """T + 1 observations by columns."""
        return self._leaves(self.arrays["observations"], space, WHOLE)

    def actions(self, space: spaces.Space[Any]) -> Array:
        """T actions."""
        return self._leaves(self.arrays["actions"], space, WHOLE)[WHOLE]

    def numbers(self, name: str) -> Array:
        """T rewards or flags."""
        return np.asarray(self.arrays[name])

    def info(self, name: str) -> Array | None:
        """T + 1 values that came with the observations, if there are any of this name."""
        found = self.arrays.get("infos", {}).get(name)
        return found if isinstance(found, np.ndarray) else None

    def _leaves(self, found: Any, space: spaces.Space[Any], name: str) -> dict[str, Array]:
        if isinstance(space, spaces.Dict | spaces.Tuple):
            leaves: dict[str, Array] = {}
            in_tuple = isinstance(space, spaces.Tuple)
            parts: Any = enumerate(space.spaces) if in_tuple else space.spaces.items()  # type: ignore[union-attr]
            for key, part in parts:
                leaves |= self._leaves(found[f"_index_{key}" if in_tuple else str(key)], part, f"{name}/{key}")
            return leaves
        return {name: self._leaf(found, space)}

    def _leaf(self, array: Array, space: spaces.Space[Any]) -> Array:
        shape = space.shape or ()
        if array.shape[1:] == shape:
            return array
        if array.dtype == np.uint8 or array.dtype == object:  # encoded pictures, of different lengths or one
            require_decoded_size(len(array) * math.prod(shape), MAX_EPISODE_BYTES)
            return np.stack([self._picture(row, shape) for row in array])
        return array.reshape(len(array), *shape)

    def _picture(self, row: Array, shape: tuple[int, ...]) -> Array:
        pixels, kind = decode_picture(np.asarray(row, np.uint8).tobytes(), shape)
        self.see_picture(kind)
        return pixels
