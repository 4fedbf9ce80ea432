"""Rules: how the next state is valued. A rule returns a distribution over next actions and the terms it adds to reward
and next value, so that every head works with every rule. Shapes: N items, A actions; values are [N, A], or [N, D, A]
for D action dimensions, each treated alike.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qfleet.errors import UsageError
from qfleet.plan.schema import Algo, DoubleRule, MunchausenRule


@dataclass(slots=True)
class NextValues:
    """The values a rule may use: of the next observations and of the current ones, where the action was taken."""

    target_next: Tensor
    online_next: Tensor | None = None  # if the rule `needs_online`
    target_current: Tensor | None = None  # if the rule `needs_current`
    action: Tensor | None = None  # choices [N] or [N, D], with target_current
    next_mask: Tensor | None = None
    mask: Tensor | None = None


@dataclass(slots=True)
class ActionChoice:
    """A rule's distribution over next actions, and the terms it adds."""

    probs: Tensor  # like the values
    bonus: Tensor | None = None  # [N], added to the reward
    entropy: Tensor | None = None  # [N], added to the next value


class Rule(Protocol):
    """How the next action is chosen."""

    needs_online: bool  # must `NextValues.online_next` be given?
    needs_current: bool  # must `NextValues.target_current` be given?

    def __call__(self, values: NextValues) -> ActionChoice:
        """Next-action probabilities and added terms."""


class CheckedRule:
    """A user's own rule, whose answers are checked."""

    def __init__(self, custom: Rule) -> None:
        self.custom = custom
        self.needs_online = custom.needs_online
        self.needs_current = custom.needs_current
        self.first = True

    def __call__(self, values: NextValues) -> ActionChoice:
        """The rule's answer, if its shapes are right."""
        choice = self.custom(values)
        shape = values.target_next.shape
        if not isinstance(choice, ActionChoice) or choice.probs.shape != shape:
            given = tuple(choice.probs.shape) if isinstance(choice, ActionChoice) else f"a {type(choice).__name__}"
            raise UsageError(
                f"the rule returned {given}",
                f"It returns ActionChoice(probs), with probabilities of shape {tuple(shape)}, like values.target_next.",
                "A one-hot choice is greedy_probs(values.target_next, values.next_mask).",
            )
        if self.first:
            self.first = False
            require_probabilities(choice.probs)
        for name in ("bonus", "entropy"):
            amount = getattr(choice, name)
            if amount is not None and amount.shape != shape[:1]:
                raise UsageError(
                    f"the rule returned a {name} of shape {tuple(amount.shape)}",
                    f"It is one number per item, of shape {tuple(shape[:1])}.",
                    "Sum or average it over the actions.",
                )
        return choice


def require_probabilities(probs: Tensor) -> None:
    """Refuse what are no probabilities over the actions."""
    sums = probs.sum(-1)
    if bool((probs < -1e-6).any()) or not bool(torch.allclose(sums, torch.ones_like(sums), atol=1e-3)):
        raise UsageError(
            "the rule returned numbers that are no probabilities",
            f"Each row must be positive and add up to 1; the first one adds up to {float(sums.flatten()[0]):.4g}.",
            "Return probabilities over the next actions, not their values.",
        )


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """Values, minus infinity where an action is not allowed; a row without any allowed action stays as it is."""
    if mask is None:
        return values
    return values.masked_fill(~(mask | ~mask.any(-1, keepdim=True)), -torch.inf)


def greedy_probs(values: Tensor, mask: Tensor | None) -> Tensor:
    """All probability on the best allowed action."""
    # Not functional.one_hot: it searches the largest class first, which costs as much as a layer.
    return torch.zeros_like(values).scatter_(-1, masked(values, mask).argmax(-1, keepdim=True), 1.0)


@dataclass(frozen=True)
class Max:
    """DQN: the target network's best action (Mnih et al. 2015, eq. 2)."""

    needs_online = False
    needs_current = False

    def __call__(self, values: NextValues) -> ActionChoice:
        """One-hot of argmax over the target's values."""
        return ActionChoice(greedy_probs(values.target_next, values.next_mask))


@dataclass(frozen=True)
class Double:
    """Double DQN: chosen by the online network, valued by the target network (van Hasselt et al. 2016, eq. 4)."""

    needs_online = True
    needs_current = False

    def __call__(self, values: NextValues) -> ActionChoice:
        """One-hot of argmax over the online network's values."""
        if values.online_next is None:
            raise ValueError("the double rule needs the online network's values of the next observations")
        return ActionChoice(greedy_probs(values.online_next, values.next_mask))


@dataclass(frozen=True)
class Munchausen:
    """Soft values plus the scaled log-probability of the action taken (Vieillard et al. 2020, eq. 4).

    y = R + alpha [tau log pi(a|s)] clipped to [floor, 0] + discount * sum_a pi(a|s') (Q(s', a) - tau log pi(a|s')),
    pi = softmax(Q / tau) of the target network. Of an n-step return only the first reward gets the bonus.
    """

    alpha: float = 0.9
    temperature: float = 0.03
    floor: float = -1.0
    needs_online = False
    needs_current = True

    def __call__(self, values: NextValues) -> ActionChoice:
        """The soft policy, its scaled log-probability of the action taken, and its scaled entropy."""
        if values.target_current is None or values.action is None:
            raise ValueError("the munchausen rule needs the target network's values of the current observations")
        log_next = self.log_policy(values.target_next, values.next_mask)
        probs = (log_next / self.temperature).exp()
        entropy = -(probs * log_next.masked_fill(probs == 0, 0.0)).sum(-1)
        log_current = self.log_policy(values.target_current, values.mask)
        taken = log_current.gather(-1, values.action.unsqueeze(-1)).squeeze(-1)
        bonus = self.alpha * taken.clamp(self.floor, 0.0)
        return ActionChoice(probs, mean_over_dimensions(bonus), mean_over_dimensions(entropy))

    def log_policy(self, values: Tensor, mask: Tensor | None) -> Tensor:
        """tau log pi; the maximum is subtracted so that no exponential overflows."""
        values = masked(values, mask)
        advantage = values - values.amax(-1, keepdim=True)
        return advantage - self.temperature * torch.logsumexp(advantage / self.temperature, -1, keepdim=True)


def mean_over_dimensions(amount: Tensor) -> Tensor:  # [N] or [N, D] -> [N]
    """The mean over action dimensions, if there are several."""
    return amount if amount.ndim == 1 else amount.mean(1)


def make_rule(algo: Algo) -> Rule:
    """The plan's rule."""
    match algo.rule:
        case DoubleRule():
            return Double()
        case MunchausenRule(alpha=alpha, temperature=temperature, floor=floor):
            return Munchausen(alpha, temperature, floor)
        case _:
            return Max()
