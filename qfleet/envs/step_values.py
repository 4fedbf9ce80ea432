"""Steps of a world, and what environments return besides observations: reward, flags, info, action mask."""

import math
from numbers import Real
from typing import Any

import numpy as np

from qfleet.data import Array, Step
from qfleet.envs.bounds import OutsideSpace

_SHOWN_CHARACTERS = 80


def reset_step(obs: Array, mask: Array | None = None) -> Step:
    """A `Step` with these observations, rewards of 0, and no episode ended."""
    num = len(obs)
    return Step(obs, np.zeros(num, np.float32), np.zeros(num, bool), np.zeros(num, bool), mask)


def require_idle(sent: Array | None) -> None:
    """Refuse to save or abandon episodes between `send` and `receive`."""
    if sent is not None:
        raise RuntimeError("a step is under way: call receive() first")


def as_reward(value: Any) -> float:
    """A reward as a float: any real number, or an array of one."""
    if isinstance(value, Real):
        return float(value)
    array = _array(value)
    if array is None or array.size != 1 or array.dtype.kind not in "biuf":
        raise OutsideSpace("reward", "a number", shown(value))
    return float(array.reshape(()).item())


def as_flag(field: str, value: Any) -> bool:
    """`terminated` or `truncated` as a bool: True, False, 1 or 0, or an array of one."""
    array = _array(value)
    if array is None or array.size != 1 or array.dtype.kind not in "biu" or array.reshape(()).item() not in (0, 1):
        raise OutsideSpace(field, "True or False", shown(value))
    return bool(array.reshape(()).item())


def as_info(value: Any) -> dict[str, Any]:
    """The info of a reset or step, which must be a dict."""
    if not isinstance(value, dict):
        raise OutsideSpace("info", "a dict", shown(value))
    return value


def info_number(info: dict[str, Any], name: str) -> float:
    """The number of this name in an info: NaN if there is none, infinity if it is not a finite number.

    A name that is no key is a path with dots: `episode.r` is `info["episode"]["r"]`.
    """
    value = info[name] if name in info else _nested(info, name)
    if value is None:
        return math.nan
    if isinstance(value, Real):
        number = float(value)
    else:
        array = _array(value)
        if array is None or array.size != 1 or array.dtype.kind not in "biuf":
            return math.inf
        number = float(array.reshape(()).item())
    return number if math.isfinite(number) else math.inf


def as_mask(value: Any, num: int) -> Array:
    """The mask of allowed actions, bool [num]."""
    array = _array(value)
    if array is None or array.dtype.kind not in "biuf":
        raise OutsideSpace('info["action_mask"]', f"{num} flags", shown(value))
    if array.size != num:
        raise OutsideSpace('info["action_mask"] size', str(num), str(array.size))
    return array.astype(bool).ravel()


def shown(value: Any) -> str:
    """A value and its type, shortened."""
    try:
        text = repr(value)
    except Exception as error:  # a __repr__ of the user's
        text = f"(its repr raised {type(error).__name__})"
    short = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return f"{short} of type {type(value).__name__}"


def _nested(info: dict[str, Any], path: str) -> Any:
    value: Any = info
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value


def _array(value: Any) -> Array | None:
    try:
        return np.asarray(value)
    except Exception:  # ragged lists, or an __array__ of the user's
        return None
