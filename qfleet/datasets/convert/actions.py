"""Actions of other formats as the numbers of joint actions, and back."""

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.data import Array, split_actions
from qfleet.data.joint_actions import MAX_JOINT_ACTIONS, join_actions
from qfleet.errors import UsageError


def action_counts(space: spaces.Space[Any]) -> tuple[int, ...]:
    """The choices in each dimension of a discrete action space."""
    counts: tuple[int, ...]
    if isinstance(space, spaces.Discrete):
        counts = (int(space.n),)
    elif isinstance(space, spaces.MultiDiscrete):
        counts = tuple(np.ravel(space.nvec).tolist())
    elif isinstance(space, spaces.MultiBinary):
        counts = (2,) * math.prod(space.shape)
    else:
        raise UsageError(
            f"actions of type {type(space).__name__} cannot be imported",
            "A Q-network values each action of a finite set: Discrete, MultiDiscrete or MultiBinary.",
            "Choose a data set with such actions; numbers without levels cannot be turned into choices exactly.",
        )
    if math.prod(counts) > MAX_JOINT_ACTIONS:
        raise UsageError(
            f"its {len(counts)} action dimensions make more joint actions than 64 bits can number",
            "A data set holds one number per joint action.",
            "Choose a data set with fewer action dimensions.",
        )
    return counts


def joint_numbers(actions: Array, space: spaces.Space[Any]) -> Array:  # [T]
    """The number of the joint action of each step; ValueError if one is outside the space."""
    counts = action_counts(space)
    choices = actions.reshape(len(actions), -1).astype(np.int64) - _start(space)
    if choices.shape[1] != len(counts) or ((choices < 0) | (choices >= np.array(counts))).any():
        raise ValueError(f"an action is outside {space}")
    return np.asarray(join_actions(list(choices.T), counts), np.int64)


def own_actions(joint: Array, space: spaces.Space[Any]) -> Array:  # [T, *shape]
    """The actions of the environment's own space with these numbers."""
    counts = action_counts(space)
    choices = np.stack(split_actions(joint, counts), axis=1) + _start(space)
    return choices.reshape(len(joint), *(space.shape or ())).astype(space.dtype)


def _start(space: spaces.Space[Any]) -> Array:
    start = getattr(space, "start", 0)
    return np.ravel(np.asarray(start, np.int64))


def export_space(space: spaces.Space[Any] | None, counts: tuple[int, ...]) -> spaces.Space[Any]:
    """The space of exported actions: the environment's own, or the numbers of its choices if it has levels."""
    if (
        isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
        and action_counts(space) == counts
    ):
        return space
    return spaces.Discrete(counts[0]) if len(counts) == 1 else spaces.MultiDiscrete(list(counts))
