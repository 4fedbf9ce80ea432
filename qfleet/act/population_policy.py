"""The policies of a population in one world. Shapes: B lanes, P members, A actions, S state size."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from qfleet.act.explore import Choose
from qfleet.act.policy import Policy
from qfleet.data import Array


class PopulationPolicy:
    """Lane k is member k mod P's, so that each has rungs of every height on a ladder of epsilons."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.policies = list(policies)
        self.actions = self.policies[0].actions
        self.version = 0

    def load(self, version: int, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Take newer weights, one member's after the other's."""
        for policy, own in zip(self.policies, weights, strict=True):
            policy.load(version, own)
        self.version = version

    def blank(self, lanes: int) -> Array | None:  # [B, S]
        """The state at the beginning of episodes; None without memory."""
        return self.policies[0].blank(lanes)

    def decide(
        self, obs: Array, state: Array | None, choose: Choose, *, noisy: bool
    ) -> tuple[Array, Array | None, Array]:
        """Actions [B], the next state and the values; each lane's are those of its member."""
        num = len(self.policies)
        state = self.blank(len(obs)) if state is None else state
        looks = []
        for at, policy in enumerate(self.policies):
            policy.make_noisy(noisy)
            own = None if state is None else np.ascontiguousarray(state[at::num])
            looks.append(policy.look(np.ascontiguousarray(obs[at::num]), own))
        values = woven([values for values, _ in looks])
        action = choose(values)
        if state is None:
            return action, None, values
        held = woven([held for _, held in looks if held is not None])
        return action, self.policies[0].remember(held, action), values


def woven(parts: list[Array]) -> Array:  # P x [B / P, ...] -> [B, ...]
    """One row of each part after the other."""
    together: Array = np.stack(parts, 1)
    return together.reshape(-1, *parts[0].shape[1:])
