"""The policies of a population in one world. Shapes: B lanes, P members, A actions, S state size."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from qfleet.act.explore import ChooseActions
from qfleet.act.policy import Policy
from qfleet.data import Array


class PopulationPolicy:
    """Lane k belongs to member k mod P, so that each member has small and large epsilons of a ladder."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.policies = list(policies)
        self.actions = self.policies[0].actions
        self.version = 0

    def load_weights(self, version: int, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Use these weights, one entry per member."""
        for policy, member_weights in zip(self.policies, weights, strict=True):
            policy.load_weights(version, member_weights)
        self.version = version

    def initial_state(self, lanes: int) -> Array | None:  # [B, S]
        """The state at the beginning of episodes; None without memory."""
        return self.policies[0].initial_state(lanes)

    def select_actions(
        self, obs: Array, state: Array | None, choose: ChooseActions, *, noisy: bool
    ) -> tuple[Array, Array | None, Array]:
        """Actions [B], the next state and the values, each lane by its member's policy."""
        num = len(self.policies)
        state = self.initial_state(len(obs)) if state is None else state
        outputs = []
        for at, policy in enumerate(self.policies):
            policy.set_noisy(noisy)
            member_state = None if state is None else np.ascontiguousarray(state[at::num])
            outputs.append(policy.forward(np.ascontiguousarray(obs[at::num]), member_state))
        values = interleave([values for values, _ in outputs])
        action = choose(values)
        if state is None:
            return action, None, values
        cell_state = interleave([cell_state for _, cell_state in outputs if cell_state is not None])
        return action, self.policies[0].next_state(cell_state, action), values


def interleave(parts: list[Array]) -> Array:  # P x [B / P, ...] -> [B, ...]
    """The parts' rows in turn: the first of each, then the second of each, and so on."""
    stacked: Array = np.stack(parts, 1)
    return stacked.reshape(-1, *parts[0].shape[1:])
