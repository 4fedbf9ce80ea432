"""Columns of foreign tables as arrays. R rows."""

import json
from typing import Any

import numpy as np

from qfleet.data import Array
from qfleet.datasets.format import require_arrow

_TENSOR = b"ARROW:extension:name"
_SHAPE = b"ARROW:extension:metadata"


def column_array(table: Any, name: str) -> Array:  # [R, *shape]
    """A column of numbers, lists of one length, or Ray's tensors; ValueError if it is anything else."""
    head, *parts = name.split("/")
    if head not in table.column_names:
        raise ValueError(f"it has no column {head!r}, but {', '.join(table.column_names)[:300]}")
    array = table.column(head).combine_chunks()
    for part in parts:
        array = array.field(part)
    found = _plain(array, head)
    shape = _tensor_shape(table.schema.field(head)) if not parts else None
    return found if shape is None else found.reshape(len(found), *shape)


def _tensor_shape(field: Any) -> tuple[int, ...] | None:
    """The shape in the metadata of a tensor column that Ray wrote, which lists flat values."""
    known = field.metadata or {}
    if not known.get(_TENSOR, b"").startswith(b"ray.data.arrow_tensor"):
        return None
    shape = json.loads(known[_SHAPE])
    if not isinstance(shape, list) or not all(isinstance(each, int) and each >= 0 for each in shape):
        raise ValueError("the shape of a tensor column is no list of sizes")
    return tuple(shape)


def _plain(array: Any, name: str) -> Array:
    arrow = require_arrow()
    types = arrow.types
    if isinstance(array, arrow.ChunkedArray):
        array = arrow.concat_arrays(array.chunks)
    if array.null_count:
        raise ValueError(f"column {name!r} has {array.null_count:,} rows without a value")
    if types.is_fixed_size_list(array.type) or types.is_list(array.type) or types.is_large_list(array.type):
        inner = _plain(array.flatten(), name)
        if (
            len(array) == 0
            or len(inner) % len(array)
            or len(set(arrow.compute.list_value_length(array).to_pylist())) > 1
        ):
            raise ValueError(f"the lists of column {name!r} do not have one length")
        return inner.reshape(len(array), len(inner) // len(array), *inner.shape[1:])
    if not (types.is_integer(array.type) or types.is_floating(array.type) or types.is_boolean(array.type)):
        raise ValueError(f"column {name!r} holds {array.type}, and no numbers")
    return np.asarray(array.to_numpy(zero_copy_only=False))


def text_column(table: Any, name: str) -> list[str]:
    """The ids of episodes, whatever their type."""
    if name not in table.column_names:
        raise ValueError(f"it has no column {name!r}, but {', '.join(table.column_names)[:300]}")
    column = table.column(name)
    if column.null_count:
        raise ValueError(f"column {name!r} has {column.null_count:,} rows without a value")
    found = column.cast(require_arrow().string()).to_pylist()
    if any(len(id) > 500 for id in found):
        raise ValueError(f"column {name!r} holds a name of more than 500 characters")
    return [str(id) for id in found]


def nested_lists(array: Array) -> Any:
    """An array [R, *shape] as a column of lists in lists; ready for `column_array`."""
    pa = require_arrow()
    found = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        found = pa.FixedSizeListArray.from_arrays(found, size)
    return found
