"""The one TD loss: every head, every rule, every view. Shapes: N items, A actions, M rows learned from."""

import torch
from torch import Tensor

from qfleet.data import split_actions
from qfleet.nets import Network
from qfleet.qlearn.heads import NO_ACTION, Decoupled, Head, Scalar
from qfleet.qlearn.rules import NextValues, Rule
from qfleet.qlearn.views import StepView, Tensors, View


def td_target(
    head: Head, rule: Rule, view: View, target: Network, batch: Tensors, online_next: Tensor | None
) -> Tensor:
    """The TD target y of every row, without gradient."""
    with torch.no_grad():
        out, next_out = view.forward(target, batch, current=rule.needs_current, bootstrap=True)
        if next_out is None:
            raise ValueError("the view returned no outputs to bootstrap from")
        values = view.add_masks(NextValues(head.values(next_out)), batch)
        if online_next is not None:
            values.online_next = head.values(online_next.detach())
        if out is not None:
            values.target_current = head.values(out)
            values.action = action_per_dimension(head, view.actions(batch))
        choice = rule(values)
        reward, discount = view.rewards_and_discounts(batch)
        if choice.bonus is not None:
            reward = reward + choice.bonus
        if choice.entropy is not None:
            reward = reward + discount * choice.entropy
        return head.target(next_out, choice.probs, reward, discount)


def td_loss(
    head: Head, rule: Rule | None, view: View, online: Network, target: Network, batch: Tensors
) -> tuple[Tensor, Tensor, Tensor]:
    """Importance-weighted mean loss [], priorities [N] and the online network's values [M, A].

    Without a rule the rewards are whole returns, used as targets: nothing is bootstrapped.
    """
    out, targets = outputs_and_targets(head, rule, view, online, target, batch)
    loss, priority = head.loss(out, view.actions(batch), targets)
    loss, priority = view.reduce(loss, priority, batch)
    return loss, priority, existing_values(head, out.detach())


def td_loss_and_gradient(
    head: Scalar, rule: Rule | None, view: StepView, online: Network, target: Network, batch: Tensors
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `td_loss`, and d loss / d outputs [N, A] without autograd, whose overhead dominates in small networks."""
    out, targets = outputs_and_targets(head, rule, view, online, target, batch)
    out = out.detach()
    loss, priority, gradient = head.loss_and_gradient(out, batch.action, targets, batch.weight * (1.0 / len(targets)))
    return *view.reduce(loss, priority, batch), head.values(out), gradient


def outputs_and_targets(
    head: Head, rule: Rule | None, view: View, online: Network, target: Network, batch: Tensors
) -> tuple[Tensor, Tensor]:
    """The online network's outputs [M, *out] and their targets."""
    needs_online = rule is not None and rule.needs_online
    out, online_next = view.forward(online, batch, current=True, bootstrap=needs_online)
    if out is None:
        raise ValueError("the view returned no outputs to learn from")
    if rule is None:
        return out, view.rewards_and_discounts(batch)[0]
    return out, td_target(head, rule, view, target, batch, online_next)


def existing_values(head: Head, out: Tensor) -> Tensor:  # [M, A], or flat where dimensions have different counts
    """The values without those of actions that a dimension does not have."""
    values = head.values(out)
    return values[values != NO_ACTION] if isinstance(head, Decoupled) else values


def action_per_dimension(head: Head, action: Tensor) -> Tensor:  # [M] -> [M] or [M, D]
    """The action as an index into the head's values: one per dimension if it is decoupled."""
    return torch.stack(split_actions(action, head.counts), 1) if isinstance(head, Decoupled) else action
