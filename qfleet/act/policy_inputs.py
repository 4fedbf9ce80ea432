"""What a policy is given: batches of observations, and rewards for its recurrent state. Shapes: B lanes."""

from typing import Any

import numpy as np

from qfleet.data import Array, Spec
from qfleet.errors import UsageError


def require_batch(obs: Any, spec: Spec) -> None:
    """Refuse anything but a batch of observations of the spec's shape and type."""
    wanted = f"[B, {', '.join(map(str, spec.input_shape))}] of {spec.dtype}"
    if not isinstance(obs, np.ndarray):
        given = f"a {type(obs).__name__}"
        fix = f"Write np.asarray(obs, np.{spec.dtype}) with one row per observation."
    elif obs.shape == spec.input_shape:
        given = "one observation without a batch axis"
        fix = "Write policy.act(obs[None])."
    elif obs.shape[1:] != spec.input_shape:
        given = f"an array of shape {obs.shape}"
        fix = "Pass observations of the environment it was trained in."
    elif obs.dtype != spec.dtype:
        given = f"numbers of type {obs.dtype}"
        fix = f"Write obs.astype(np.{spec.dtype})."
    else:
        return
    raise UsageError(f"policy.act was given {given}", f"It takes a batch of observations, an array {wanted}.", fix)


def add_reward(state: Array | None, reward: Array, new_episode: Array) -> Array | None:
    """Write the reward of the last action into a recurrent state; reset lanes that begin a new episode."""
    if state is None:
        return None
    state[:, -1] = reward
    state[new_episode] = 0.0
    return state
