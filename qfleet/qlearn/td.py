"""The one TD loss: every head, every rule, every view. Shapes: N items, A actions."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from qfleet.qlearn.heads import Head
from qfleet.qlearn.rules import Rule


@dataclass(slots=True)
class Tensors:
    """A Batch as tensors on the learner's device."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_obs: Tensor
    weight: Tensor
    next_mask: Tensor | None = None


class View(Protocol):
    """How a batch is shown to a network."""

    def now(self, net: nn.Module, batch: Tensors) -> Tensor:
        """Outputs where the actions were taken."""
        ...

    def next(self, net: nn.Module, batch: Tensors) -> Tensor:
        """Outputs where the targets are read."""
        ...


@dataclass(frozen=True)
class Steps:
    """Each item stands alone: a feed-forward network sees one observation at a time."""

    def now(self, net: nn.Module, batch: Tensors) -> Tensor:
        """Outputs of the observations acted on."""
        out: Tensor = net(batch.obs)
        return out

    def next(self, net: nn.Module, batch: Tensors) -> Tensor:
        """Outputs of the observations n steps on."""
        out: Tensor = net(batch.next_obs)
        return out


def td_target(head: Head, rule: Rule, view: View, online: nn.Module, target: nn.Module, batch: Tensors) -> Tensor:
    """y of every item, without gradient."""
    with torch.no_grad():
        next_out = view.next(target, batch)
        online_values = head.values(view.next(online, batch)) if rule.needs_online else None
        probs, bonus = rule(online_values, head.values(next_out), batch.next_mask)
        reward = batch.reward if bonus is None else batch.reward + bonus
        return head.target(next_out, probs, reward, batch.discount)


def td_loss(
    head: Head, rule: Rule, view: View, online: nn.Module, target: nn.Module, batch: Tensors
) -> tuple[Tensor, Tensor, Tensor]:
    """Importance-weighted mean loss [], priorities [N] and the values [N, A] it saw."""
    goal = td_target(head, rule, view, online, target, batch)
    out = view.now(online, batch)
    loss, priority = head.loss(out, batch.action, goal)
    return (loss * batch.weight).mean(), priority, head.values(out.detach())
