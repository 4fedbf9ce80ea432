"""Minari's Arrow and Parquet storages: a folder per episode, T + 1 rows.

Columns of T values have padding at the end.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.data import Array
from qfleet.datasets.convert.foreign import (
    MAX_EPISODE_BYTES,
    MAX_JSON_BYTES,
    clear_errors,
    read_foreign,
    require_decoded_size,
)
from qfleet.datasets.convert.foreign_tables import read_table
from qfleet.datasets.convert.pictures import decode_picture
from qfleet.datasets.format import require_arrow
from qfleet.datasets.format.columns import WHOLE
from qfleet.files import list_inside

MAX_PARTS = 1_000  # files of one episode
SeePicture = Callable[[str], object]  # is told the format of every encoded picture


class MinariTables:
    """Reads episodes by their numbers."""

    def __init__(self, folder: Path, ending: str, see_picture: SeePicture) -> None:
        self.folder = folder
        self.ending = ending
        self.see_picture = see_picture

    def metadata(self, number: int) -> bytes:
        """The text of an episode's own metadata."""
        return read_foreign(self.folder, f"{number}/metadata.json", MAX_JSON_BYTES)

    def episode(self, number: int) -> "TableEpisode":
        """The columns of an episode."""
        place = self.folder / str(number)
        with clear_errors(place):
            names = sorted(name for name in list_inside(place) if name.endswith(f".{self.ending}"))
            if not names:
                raise ValueError(f"it has no file that ends in .{self.ending}")
            if len(names) > MAX_PARTS:
                raise ValueError(f"it has {len(names):,} files, and {MAX_PARTS:,} are the most")
            tables = [read_table(self.folder, f"{number}/{name}") for name in names]
            require_decoded_size(sum(table.nbytes for table in tables), MAX_EPISODE_BYTES)
            return TableEpisode(require_arrow().concat_tables(tables), self.see_picture)


class TableEpisode:
    """One episode; the padding of columns of T values is dropped."""

    def __init__(self, table: Any, see_picture: SeePicture) -> None:
        self.table = table.combine_chunks()
        self.see_picture = see_picture

    def _column(self, name: str) -> Any:
        return self.table.column(name).combine_chunks()

    def observations(self, space: spaces.Space[Any]) -> dict[str, Array]:
        """T + 1 observations by columns."""
        return self._leaves(self._column("observations"), space, WHOLE)

    def actions(self, space: spaces.Space[Any]) -> Array:
        """T actions."""
        return self._leaves(self._column("actions"), space, WHOLE)[WHOLE][:-1]

    def numbers(self, name: str) -> Array:
        """T rewards or flags."""
        return np.asarray(self._column(name).to_numpy(zero_copy_only=False))[:-1]

    def info(self, name: str) -> Array | None:
        """T + 1 values that came with the observations, if there are any of this name."""
        if "infos" not in self.table.column_names:
            return None
        infos = self._column("infos")
        if infos.type.get_field_index(name) < 0:
            return None
        found = infos.field(name)
        fixed = require_arrow().types.is_fixed_size_list(found.type)
        return _fixed(found, (found.type.list_size,)) if fixed else np.asarray(found.to_numpy(zero_copy_only=False))

    def _leaves(self, array: Any, space: spaces.Space[Any], name: str) -> dict[str, Array]:
        if isinstance(space, spaces.Dict | spaces.Tuple):
            found: dict[str, Array] = {}
            parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
            for key, part in parts:
                found |= self._leaves(array.field(str(key)), part, f"{name}/{key}")
            return found
        return {name: self._leaf(array, space)}

    def _leaf(self, array: Any, space: spaces.Space[Any]) -> Array:
        types = require_arrow().types
        shape = space.shape or ()
        if types.is_binary(array.type):
            return self._pictures(array, shape)
        if types.is_fixed_size_list(array.type):
            return _fixed(array, shape)
        return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(len(array), *shape)

    def _pictures(self, array: Any, shape: tuple[int, ...]) -> Array:
        require_decoded_size(len(array) * math.prod(shape), MAX_EPISODE_BYTES)
        found = np.empty((len(array), *shape), np.uint8)
        for at, data in enumerate(array):
            if not data.is_valid:
                raise ValueError("a picture is missing")
            found[at], kind = decode_picture(data.as_py(), shape)
            self.see_picture(kind)
        return found


def _fixed(array: Any, shape: tuple[int, ...]) -> Array:
    return np.asarray(array.flatten().to_numpy(zero_copy_only=False)).reshape(len(array), *shape)
