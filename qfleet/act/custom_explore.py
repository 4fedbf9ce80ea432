"""Exploration by a function of the user's own. Shapes: B lanes, A actions, D action dimensions."""

import math
from dataclasses import dataclass

import numpy as np

from qfleet.act.explore import Explore, to_joint_actions
from qfleet.data import Array
from qfleet.errors import UsageError


@dataclass(eq=False)
class OwnExplorer:
    """A user's own function, whose actions are checked."""

    function: Explore
    counts: tuple[int, ...]

    def choose(self, values: Array, step: int, rng: np.random.Generator, mask: Array | None) -> Array:
        """The function's actions, if they are allowed in every lane."""
        # Copies, so that the function cannot change the actor's arrays.
        returned = self.function(values.copy(), step, rng, None if mask is None else mask.copy())
        actions = require_actions(np.asarray(returned), values.shape, self.counts)
        if mask is not None and not (permitted := mask[np.arange(len(actions)), actions]).all():
            raise UsageError(
                f"the explore function chose action {actions[~permitted][0]} where it is not allowed",
                "The environment's mask forbids it at this step.",
                "Choose action a in lane b only where mask[b, a] is True.",
            )
        return to_joint_actions(actions, self.counts)

    def probability(self, action: Array, values: Array, step: int, mask: Array | None) -> Array | None:
        """That of a user's function is unknown."""
        return None

    def epsilon(self, step: int) -> float | None:
        """The epsilon of a user's function is unknown."""
        return None


def require_actions(actions: Array, shape: tuple[int, ...], counts: tuple[int, ...]) -> Array:
    """The actions of a user's function as int64, if there is a valid one for every lane."""
    lanes = shape[:-1]
    if actions.dtype.kind not in "iu" or actions.shape != lanes:
        raise UsageError(
            f"the explore function returned {actions.dtype} of shape {actions.shape}",
            f"It was given values of shape {shape} and must return whole numbers of shape {lanes}.",
            "Return an integer array with one action for each environment, such as values.argmax(-1).",
        )
    limit = np.array([math.prod(counts)] if len(lanes) == 1 else counts, object)
    if (wrong := (actions < 0) | (actions >= limit)).any():
        raise UsageError(
            f"the explore function chose action {actions[wrong][0]}",
            f"Actions are counted from 0; the last axis of the values, of shape {shape}, is that of the actions.",
            f"Return numbers from 0 to {shape[-1] - 1}.",
        )
    return actions.astype(np.int64)
