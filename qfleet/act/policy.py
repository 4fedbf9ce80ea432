"""The policy: observations in, actions out; shared by actors, evaluation and serving. Shapes: B lanes, A actions."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qfleet.data import Array
from qfleet.nets import QNet
from qfleet.qlearn import Head


class NonFiniteValues(Exception):
    """The network's weights have diverged: no action is chosen from them."""


def allowed(draw: Array, mask: Array) -> Array:  # [B] in [0, 1), [B, A] -> [B]
    """A uniformly random allowed action per lane, decided by one number each."""
    count = mask.sum(1)
    rank = np.minimum((draw * count).astype(np.int64), count - 1)
    chosen: Array = (np.cumsum(mask, 1) > rank[:, None]).argmax(1)
    return chosen


class Policy:
    """Greedy in the network's values, random with probability epsilon."""

    def __init__(self, net: QNet, head: Head, num_actions: int, device: torch.device | None = None) -> None:
        self.net, self.head, self.num_actions = net, head, num_actions
        self.device = device or torch.device("cpu")
        self.version = 0
        self.shared: Mapping[str, Tensor] | None = None

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Take newer weights; on one device they are shared, not copied."""
        if weights is not self.shared:
            self.net.load_state_dict(dict(weights), assign=True)
            self.shared = weights
        self.version = version

    def values(self, obs: Array) -> Array:  # [B, *input_shape] -> [B, A]
        """The value of every action."""
        with torch.inference_mode():
            out = self.net(torch.from_numpy(obs).to(self.device))
            values: Array = self.head.values(out).cpu().numpy()
        if not np.isfinite(values).all():
            raise NonFiniteValues("the network's values are not finite")
        return values

    def act(
        self,
        obs: Array,  # [B, *input_shape]
        state: Any = None,
        epsilon: float = 0.0,
        rng: np.random.Generator | None = None,
        mask: Array | None = None,  # [B, A] bool
    ) -> tuple[Array, Any, Array]:
        """Actions [B], the next recurrent state, and the values [B, A] they were chosen by."""
        values = self.values(obs)
        action = values.argmax(1) if mask is None else np.where(mask, values, -np.inf).argmax(1)
        if rng is not None:
            # Both numbers are drawn for every lane and step, so the stream does not depend on epsilon.
            explore, draw = rng.random((2, len(action)))
            anything = (draw * self.num_actions).astype(np.int64) if mask is None else allowed(draw, mask)
            action = np.where(explore < epsilon, anything, action)
        return action, state, values
