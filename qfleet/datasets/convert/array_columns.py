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
    if isinstance(array.type, arrow.BaseExtensionType):
        return _tensors(array, name)
    if array.null_count:
        raise ValueError(f"column {name!r} has {array.null_count:,} rows without a value")
    if types.is_fixed_size_list(array.type) or types.is_list(array.type) or types.is_large_list(array.type):
        inner = _plain(array.flatten(), name)
        if len(array) == 0 or len(inner) % len(array) or not _have_one_length(array):
            raise ValueError(f"the lists of column {name!r} do not have one length")
        return inner.reshape(len(array), len(inner) // len(array), *inner.shape[1:])
    if not (types.is_integer(array.type) or types.is_floating(array.type) or types.is_boolean(array.type)):
        raise ValueError(f"column {name!r} holds {array.type}, and no numbers")
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _have_one_length(array: Any) -> bool:
    import pyarrow.compute as compute

    found = compute.min_max(compute.list_value_length(array)).as_py()
    return bool(found["min"] == found["max"])


def _tensors(array: Any, name: str) -> Array:
    """Tensors of one shape, as Ray's types show them if somebody has registered these. No other type is known."""
    kind = array.type
    if not kind.extension_name.startswith("ray.data.arrow_tensor"):
        raise ValueError(f"column {name!r} holds {kind.extension_name}, and no numbers")
    found = _plain(array.storage, name)
    return found.reshape(len(found), *kind.shape)


def text_codes(table: Any, name: str) -> tuple[Array, list[str]]:  # [R]
    """The ids of episodes, whatever their type: the number of each row's id, and the ids in the order they begin."""
    if name not in table.column_names:
        raise ValueError(f"it has no column {name!r}, but {', '.join(table.column_names)[:300]}")
    arrow = require_arrow()
    column = table.column(name)
    if column.null_count:
        raise ValueError(f"column {name!r} has {column.null_count:,} rows without a value")
    if not arrow.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    joined = column.unify_dictionaries().combine_chunks()
    joined = arrow.concat_arrays(joined.chunks) if isinstance(joined, arrow.ChunkedArray) else joined
    ids = joined.dictionary.cast(arrow.string()).to_pylist()
    if any(id is None or len(id) > 500 for id in ids):
        raise ValueError(f"column {name!r} holds a name of more than 500 characters")
    codes: Array = joined.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    used, first = np.unique(codes, return_index=True)
    order = np.argsort(first, kind="stable")
    numbers = np.zeros(len(ids), np.int64)
    numbers[used[order]] = np.arange(len(used))
    return numbers[codes], [str(ids[at]) for at in used[order].tolist()]


def nested_lists(array: Array) -> Any:
    """An array [R, *shape] as a column of lists in lists; ready for `column_array`."""
    pa = require_arrow()
    found = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        found = pa.FixedSizeListArray.from_arrays(found, size)
    return found
