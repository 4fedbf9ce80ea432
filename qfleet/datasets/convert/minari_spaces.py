"""Spaces as Minari's `metadata.json` has them. They are read by way of qfleet's own texts, which have limits."""

import json
import math
from typing import Any

import msgspec
import numpy as np
from gymnasium import spaces

from qfleet.data.space_format import EnvSpaces, read_spaces

_MAX_LEVELS = 16


def read_minari_spaces(observation: str, action: str) -> EnvSpaces:
    """Both spaces of their texts; ValueError if there are no such spaces."""
    saved = {"observation": _saved(_parsed(observation), 0), "action": _saved(_parsed(action), 0)}
    return read_spaces(msgspec.json.encode({"format": 1, **saved}))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)  # it reads Infinity, which Minari writes
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a space is no JSON: {error}") from error


def _saved(found: Any, level: int) -> dict[str, Any]:
    """A space as qfleet saves it."""
    if not isinstance(found, dict) or level > _MAX_LEVELS:
        raise ValueError("a space is no JSON object, or it is nested too deeply")
    kind = found.get("type")
    match kind:
        case "Box":
            bounds = {name: [_bound(each) for each in _flat(found.get(name))] for name in ("low", "high")}
            return {"type": kind, "shape": found.get("shape"), "dtype": found.get("dtype"), **bounds}
        case "Discrete":
            return {"type": kind, "n": found.get("n"), "start": found.get("start", 0)}
        case "MultiDiscrete":
            counts = _flat(found.get("nvec"))
            start = _flat(found["start"]) if "start" in found else [0] * len(counts)
            shape = _shape(found.get("nvec"))
            return {"type": kind, "shape": shape, "dtype": found.get("dtype"), "nvec": counts, "start": start}
        case "MultiBinary":
            n = found.get("n")
            return {"type": kind, "shape": n if isinstance(n, list) else [n]}
        case "Dict":
            parts = _parts(found, dict).items()
            return {"type": kind, "parts": [(key, _saved(part, level + 1)) for key, part in parts]}
        case "Tuple":
            return {"type": kind, "parts": [_saved(part, level + 1) for part in _parts(found, list)]}
        case _:
            return {"type": "Other", "name": str(kind)[:200]}


def _parts(found: dict[str, Any], kind: type) -> Any:
    parts = found.get("subspaces")
    if not isinstance(parts, kind):
        raise ValueError("the parts of a space are missing")
    return parts


def _flat(values: Any) -> list[Any]:
    if not isinstance(values, list):
        return [values]
    return [number for each in values for number in (_flat(each) if isinstance(each, list) else [each])]


def _bound(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return int(value) if isinstance(value, bool) else value


def _shape(values: Any) -> list[int]:
    shape = []
    while isinstance(values, list):
        shape.append(len(values))
        values = values[0] if values else None
    return shape


def write_minari_space(space: spaces.Space[Any]) -> dict[str, Any]:
    """A space as Minari writes it, before it is JSON."""
    kind = type(space).__name__
    match space:
        case spaces.Box():
            bounds = {"low": space.low.tolist(), "high": space.high.tolist()}
            return {"type": kind, "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
        case spaces.Discrete():
            return {"type": kind, "dtype": "int64", "start": int(space.start), "n": int(space.n)}
        case spaces.MultiDiscrete():
            counts = {"nvec": space.nvec.tolist(), "start": np.asarray(space.start).tolist()}
            return {"type": kind, "dtype": str(space.dtype), **counts}
        case spaces.MultiBinary():
            return {"type": kind, "n": space.n if isinstance(space.n, int) else list(map(int, space.n))}
        case spaces.Dict():
            return {"type": kind, "subspaces": {key: write_minari_space(part) for key, part in space.spaces.items()}}
        case spaces.Tuple():
            return {"type": kind, "subspaces": [write_minari_space(part) for part in space.spaces]}
        case _:
            raise ValueError(f"Minari's format has no space {kind}")


def is_picture(space: spaces.Space[Any]) -> bool:
    """Does Minari store observations of this space as encoded pictures?"""
    return (
        isinstance(space, spaces.Box)
        and len(space.shape) in (2, 3)
        and min(space.shape[:2]) >= 32
        and space.dtype == np.uint8
        and bool((space.low == 0).all() and (space.high == 255).all())
    )
