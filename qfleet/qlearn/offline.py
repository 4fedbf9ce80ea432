"""Losses for recorded experience, whose actions nobody can try again. Shapes: M rows, A actions, D dimensions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qfleet.data import split_actions
from qfleet.nets import Network
from qfleet.qlearn.heads import Decoupled, Head
from qfleet.qlearn.rules import NextValues, Rule, masked
from qfleet.qlearn.td import existing_values, outputs_and_targets
from qfleet.qlearn.views import Tensors, View


def recorded_action_loss(head: Head, out: Tensor, action: Tensor, mask: Tensor | None) -> Tensor:  # [M]
    """log sum_a exp Q(s, a) - Q(s, a_data): the cross-entropy of softmax(Q) and the recorded action.

    Q is the mean of a distribution. A sum over joint actions of a mean over D dimensions is a product of D sums.
    """
    values = head.values(out)
    if not isinstance(head, Decoupled):
        return masked(values, mask).logsumexp(1) - values.gather(1, action.unsqueeze(1)).squeeze(1)
    values = values / len(head.counts)
    choices = torch.stack(split_actions(action, head.counts), 1).unsqueeze(2)
    return (values.logsumexp(2) - values.gather(2, choices).squeeze(2)).sum(1)


def current_mask(view: View, batch: Tensors, out: Tensor) -> Tensor | None:  # [M, A]
    """The actions that were allowed in the rows learned from, if the environment has masks."""
    return view.add_masks(NextValues(out), batch).mask


@dataclass(frozen=True)
class ConservativeLoss:
    """As `td_loss`, plus alpha x `recorded_action_loss`: CQL(H) (Kumar et al. 2020, eq. 4).

    It lowers the values of actions that were not recorded, which no experience could correct.
    """

    alpha: float

    def __call__(
        self, head: Head, rule: Rule | None, view: View, online: Network, target: Network, batch: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Importance-weighted mean loss [], priorities [N] of the TD errors and the online network's values [M, A]."""
        out, targets = outputs_and_targets(head, rule, view, online, target, batch)
        action = view.actions(batch)
        loss, priority = head.loss(out, action, targets)
        gap = recorded_action_loss(head, out, action, current_mask(view, batch, out))
        loss, priority = view.reduce(loss + self.alpha * gap, priority, batch)
        return loss, priority, existing_values(head, out.detach())


@dataclass(frozen=True)
class CloningLoss:
    """Behaviour cloning: `recorded_action_loss` alone, so that the greedy action is the most likely recorded one."""

    def __call__(
        self, head: Head, rule: Rule | None, view: View, online: Network, target: Network, batch: Tensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Importance-weighted mean loss [], the same per item as priorities [N], and the outputs [M, A]."""
        out, _ = view.forward(online, batch, current=True, bootstrap=False)
        if out is None:
            raise ValueError("the view returned no outputs to learn from")
        loss = recorded_action_loss(head, out, view.actions(batch), current_mask(view, batch, out))
        loss, priority = view.reduce(loss, loss.detach(), batch)
        return loss, priority, existing_values(head, out.detach())
