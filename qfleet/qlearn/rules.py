"""Rules choose how the next state is valued. A rule returns the distribution over next actions and a reward bonus,
so that every head works with every rule. Shapes: N items, A actions.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Rule(Protocol):
    """How the next action is chosen."""

    @property
    def needs_online(self) -> bool:
        """Must the online network look at the next observations too?"""
        ...

    def __call__(self, online: Tensor | None, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Next-action probabilities [N, A] and a bonus [N] added to the reward (None: none)."""
        ...


def greedy(values: Tensor, mask: Tensor | None) -> Tensor:  # [N, A] -> [N, A]
    """All probability on the best allowed action."""
    if mask is not None:
        values = values.masked_fill(~mask, -torch.inf)
    return functional.one_hot(values.argmax(1), values.shape[1]).to(values.dtype)


@dataclass(frozen=True)
class Max:
    """The target network's own best action (Mnih et al. 2015, eq. 2)."""

    needs_online: bool = False

    def __call__(self, online: Tensor | None, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One-hot of argmax over the target's values."""
        return greedy(target, mask), None


@dataclass(frozen=True)
class Double:
    """Chosen by the online network, valued by the target network (van Hasselt et al. 2016, eq. 4)."""

    needs_online: bool = True

    def __call__(self, online: Tensor | None, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One-hot of argmax over the online network's values."""
        if online is None:
            raise ValueError("the double rule needs the online network's values of the next observations")
        return greedy(online, mask), None
