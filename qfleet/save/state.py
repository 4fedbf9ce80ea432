"""Trees of state as two files: `state.json` holds the shape and the small values, `state.safetensors` the arrays.

An array leaf becomes {"$array": pointer}; a key of the tree that begins with "$" gets one more "$" in front.
"""

import json
import math
import sys
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import safetensors
import safetensors.numpy

from qfleet.data.types import Array, State
from qfleet.save.damage import Damaged

JSON_NAME = "state.json"
ARRAYS_NAME = "state.safetensors"
_DTYPES = ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8")
_STORABLE = frozenset(np.dtype(name) for name in _DTYPES)
_SWAPPED: Final = ">" if sys.byteorder == "little" else "<"


def pack_tensors(tensors: Mapping[str, Array]) -> bytes:
    """Named arrays as safetensors bytes; the same arrays give the same bytes."""
    return safetensors.numpy.save({name: _plain(name, array) for name, array in tensors.items()})


def unpack_tensors(data: bytes) -> dict[str, Array]:
    """The arrays of `pack_tensors`, by sorted name, writable and in native byte order."""
    try:
        tensors = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise Damaged("A safetensors file", str(error)) from None
    return {name: tensors[name] for name in sorted(tensors)}


def pack_state(state: State) -> dict[str, bytes]:
    """A tree of state as files; a value that cannot be restored exactly is an error that names its path."""
    arrays: dict[str, Array] = {}
    tree = _pack(state, "", arrays)
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False)
    return {JSON_NAME: text.encode("ascii"), ARRAYS_NAME: pack_tensors(arrays)}


def unpack_state(files: Mapping[str, bytes]) -> State:
    """The tree given to `pack_state`: same values, types, dtypes and key order."""
    missing = {JSON_NAME, ARRAYS_NAME} - files.keys()
    if missing:
        raise Damaged("A saved state", f"{' and '.join(sorted(missing))} missing")
    arrays = unpack_tensors(files[ARRAYS_NAME])
    try:
        tree = _unpack(json.loads(files[JSON_NAME], parse_constant=_refuse_constant), arrays)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(JSON_NAME, f"it cannot be read ({type(error).__name__}: {error})") from None
    if arrays or not isinstance(tree, dict):
        raise Damaged(JSON_NAME, f"it does not fit {ARRAYS_NAME}")
    return tree


def _plain(name: str, array: Array) -> Array:
    """The array contiguous and in native byte order: safetensors copies its memory."""
    if array.dtype.newbyteorder("=") not in _STORABLE:
        raise TypeError(f"{name}: arrays of dtype {array.dtype} cannot be saved; use one of {', '.join(_DTYPES)}")
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")


def _pack(leaf: Any, path: str, arrays: dict[str, Array]) -> Any:
    if isinstance(leaf, np.ndarray):
        arrays[path] = leaf
        swapped = {"order": _SWAPPED} if leaf.dtype.byteorder == _SWAPPED else {}
        return {"$array": path, **swapped}
    if type(leaf) is dict:
        return {_escape(key, path): _pack(value, f"{path}/{_pointer(key)}", arrays) for key, value in leaf.items()}
    if type(leaf) is list:
        return [_pack(value, f"{path}/{index}", arrays) for index, value in enumerate(leaf)]
    if type(leaf) is float and not math.isfinite(leaf):
        raise ValueError(f"state{path}: {leaf} cannot be saved; only finite numbers can")
    if leaf is None or type(leaf) in (bool, int, float, str):
        return leaf
    raise TypeError(
        f"state{path}: a {type(leaf).__name__} cannot be saved; use JSON values, lists, dicts or NumPy arrays"
    )


def _escape(key: Any, path: str) -> str:
    if type(key) is not str:
        raise TypeError(f"state{path}: the key {key!r} is a {type(key).__name__}; keys are strings")
    return "$" + key if key.startswith("$") else key


def _pointer(key: str) -> str:
    """A key escaped as in a JSON pointer, so that no two paths are equal."""
    return key.replace("~", "~0").replace("/", "~1")


def _unpack(node: Any, arrays: dict[str, Array]) -> Any:
    """Put the arrays back into the tree; each is taken out of `arrays` once."""
    if isinstance(node, list):
        return [_unpack(value, arrays) for value in node]
    if not isinstance(node, dict):
        return node
    if "$array" not in node:
        return {key.removeprefix("$"): _unpack(value, arrays) for key, value in node.items()}
    array = arrays.pop(node["$array"])
    return array.astype(array.dtype.newbyteorder(_SWAPPED)) if node.get("order") == _SWAPPED else array


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")
