"""Rules choose how the next state is valued. A rule returns the distribution over next actions and what it adds to
reward and next value, so that every head works with every rule. Shapes: N items, A actions; values are [N, A], or
[N, D, A] for D action dimensions, each treated alike.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class NextValues:
    """What a rule may look at: values where the target is read and where the action was taken."""

    target_next: Tensor
    online_next: Tensor | None = None  # if the rule `needs_online`
    target_now: Tensor | None = None  # if the rule `needs_now`
    action: Tensor | None = None  # choices [N] or [N, D], with target_now
    next_mask: Tensor | None = None
    mask: Tensor | None = None


@dataclass(slots=True)
class ActionChoice:
    """How the next state is valued."""

    probs: Tensor  # like the values
    bonus: Tensor | None = None  # [N], added to the reward
    entropy: Tensor | None = None  # [N], added to the next value


class Rule(Protocol):
    """How the next action is chosen."""

    @property
    def needs_online(self) -> bool:
        """Must the online network look at the next observations too?"""
        ...

    @property
    def needs_now(self) -> bool:
        """Must the target network look at the present observations too?"""
        ...

    def __call__(self, seen: NextValues) -> ActionChoice:
        """Next-action probabilities and what is added."""
        ...


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Minus infinity where an action is not allowed; where none is, nothing is taken away."""
    if mask is None:
        return values
    return values.masked_fill(~(mask | ~mask.any(-1, keepdim=True)), -torch.inf)


def greedy(values: Tensor, mask: Tensor | None) -> Tensor:
    """All probability on the best allowed action."""
    # Not functional.one_hot: it looks for the largest class first, which costs as much as a layer.
    return torch.zeros_like(values).scatter_(-1, masked(values, mask).argmax(-1, keepdim=True), 1.0)


@dataclass(frozen=True)
class Max:
    """The target network's own best action (Mnih et al. 2015, eq. 2)."""

    needs_online: bool = False
    needs_now: bool = False

    def __call__(self, seen: NextValues) -> ActionChoice:
        """One-hot of argmax over the target's values."""
        return ActionChoice(greedy(seen.target_next, seen.next_mask))


@dataclass(frozen=True)
class Double:
    """Chosen by the online network, valued by the target network (van Hasselt et al. 2016, eq. 4)."""

    needs_online: bool = True
    needs_now: bool = False

    def __call__(self, seen: NextValues) -> ActionChoice:
        """One-hot of argmax over the online network's values."""
        if seen.online_next is None:
            raise ValueError("the double rule needs the online network's values of the next observations")
        return ActionChoice(greedy(seen.online_next, seen.next_mask))


@dataclass(frozen=True)
class Munchausen:
    """Soft values plus a bonus for what the policy was sure of (Vieillard et al. 2020, eq. 4).

    y = R + alpha [tau log pi(a|s)] clipped to [floor, 0] + discount * sum_a pi(a|s') (Q(s', a) - tau log pi(a|s')),
    pi = softmax(Q / tau) of the target network. Of an n-step return only the first reward gets the bonus.
    """

    alpha: float = 0.9
    temperature: float = 0.03
    floor: float = -1.0
    needs_online: bool = False
    needs_now: bool = True

    def __call__(self, seen: NextValues) -> ActionChoice:
        """The soft policy, its scaled log-probability of the action taken, and its scaled entropy."""
        if seen.target_now is None or seen.action is None:
            raise ValueError("the munchausen rule needs the target network's values of the present observations")
        log_next = self.log_policy(seen.target_next, seen.next_mask)
        probs = (log_next / self.temperature).exp()
        entropy = -(probs * log_next.masked_fill(probs == 0, 0.0)).sum(-1)
        log_now = self.log_policy(seen.target_now, seen.mask)
        taken = log_now.gather(-1, seen.action.unsqueeze(-1)).squeeze(-1)
        bonus = self.alpha * taken.clamp(self.floor, 0.0)
        return ActionChoice(probs, over_dimensions(bonus), over_dimensions(entropy))

    def log_policy(self, values: Tensor, mask: Tensor | None) -> Tensor:
        """tau log pi, through the maximum so that no exponential overflows."""
        values = masked(values, mask)
        centred = values - values.amax(-1, keepdim=True)
        return centred - self.temperature * torch.logsumexp(centred / self.temperature, -1, keepdim=True)


def over_dimensions(amount: Tensor) -> Tensor:  # [N] or [N, D] -> [N]
    """The mean over action dimensions, if there are several."""
    return amount if amount.ndim == 1 else amount.mean(1)
