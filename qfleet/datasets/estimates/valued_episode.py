"""A recorded episode beside what a policy thinks of it. Shapes: T steps, A actions."""

from dataclasses import dataclass

import numpy as np

from qfleet.data import Array


@dataclass(frozen=True, slots=True, eq=False)
class ValuedEpisode:
    """T recorded steps, and in all T + 1 states the values and the action probabilities of another policy."""

    id: str
    obs: Array  # [T + 1, *input_shape], or the first one only if nothing is fitted on this episode
    action: Array  # [T] int64, by the policy that was recorded
    reward: Array  # [T] float64
    terminated: bool
    values: Array  # [T + 1, A] of the policy that is evaluated; -inf where an action is not allowed
    target: Array  # [T + 1, A] its probabilities
    probability: Array | None = None  # [T] of the recorded actions, by the policy that was recorded

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.action)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        arrays = (self.obs, self.action, self.reward, self.values, self.target, self.probability)
        return sum(each.nbytes for each in arrays if each is not None)

    @property
    def bootstrap(self) -> Array:  # [T]
        """1 where the value of the next state counts; 0 in a terminating step."""
        found = np.ones(self.num_steps)
        found[-1] = not self.terminated
        return found

    def returns(self, gamma: float) -> Array:  # [T]
        """The discounted return from every step to the end of the recording: G_t = r_t + gamma G_(t+1)."""
        found = np.zeros(self.num_steps)
        following = 0.0
        for at in range(self.num_steps - 1, -1, -1):
            following = float(self.reward[at]) + gamma * following
            found[at] = following
        return found


def epsilon_greedy_probabilities(values: Array, epsilon: float) -> Array:  # [N, A] -> [N, A]
    """The probability of each action; an action of value -inf is not allowed, and has none."""
    allowed = np.isfinite(values)
    chance = epsilon * allowed / np.maximum(allowed.sum(1, keepdims=True), 1)
    chance[np.arange(len(values)), values.argmax(1)] += 1.0 - epsilon
    found: Array = chance
    return found
