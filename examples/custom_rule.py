"""A target rule of your own: Expected SARSA (van Seijen et al. 2009).

DQN bootstraps from the best next action. Expected SARSA bootstraps from what an epsilon-greedy policy would do: with
probability epsilon any allowed action, otherwise the best one. The target is more careful where exploring is costly.

    python examples/custom_rule.py
"""

from dataclasses import dataclass

import qfleet
from qfleet.custom import ActionChoice, NextValues, greedy_probs


@dataclass(frozen=True)
class ExpectedSarsa:
    """The distribution of an epsilon-greedy policy over the next actions."""

    epsilon: float = 0.05
    needs_online = False  # `values.online_next` is not used
    needs_current = False  # nor are the values of the current observations

    def __call__(self, values: NextValues) -> ActionChoice:
        """Probabilities [N, A], which the head averages the next values with."""
        best = greedy_probs(values.target_next, values.next_mask)
        allowed = best.new_ones(best.shape) if values.next_mask is None else values.next_mask.to(best.dtype)
        uniform = allowed / allowed.sum(-1, keepdim=True).clamp(min=1.0)
        return ActionChoice((1.0 - self.epsilon) * best + self.epsilon * uniform)


if __name__ == "__main__":
    run = qfleet.train("CartPole-v1", rule=ExpectedSarsa(0.1), overrides={"until.steps": 6_000})
    print(run, run.result())
