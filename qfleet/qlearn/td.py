"""The one TD loss: every head, every rule, every view. Shapes: N items, A actions, M rows learned from."""

import torch
from torch import Tensor

from qfleet.data import split_actions
from qfleet.nets import Network
from qfleet.qlearn.heads import HUGE, Decoupled, Head, Scalar
from qfleet.qlearn.rules import NextValues, Rule
from qfleet.qlearn.views import StepView, Tensors, View


def td_target(
    head: Head, rule: Rule, view: View, target: Network, batch: Tensors, online_next: Tensor | None
) -> Tensor:
    """y of every row, without gradient."""
    with torch.no_grad():
        now, after = view.see(target, batch, now=rule.needs_now, after=True)
        if after is None:
            raise ValueError("the view showed nothing to bootstrap from")
        seen = view.masks(NextValues(head.values(after)), batch)
        if online_next is not None:
            seen.online_next = head.values(online_next.detach())
        if now is not None:
            seen.target_now = head.values(now)
            seen.action = choices(head, view.actions(batch))
        choice = rule(seen)
        reward, discount = view.gains(batch)
        if choice.bonus is not None:
            reward = reward + choice.bonus
        if choice.entropy is not None:
            reward = reward + discount * choice.entropy
        return head.target(after, choice.probs, reward, discount)


def td_loss(
    head: Head, rule: Rule | None, view: View, online: Network, target: Network, batch: Tensors
) -> tuple[Tensor, Tensor, Tensor]:
    """Importance-weighted mean loss [], priorities [N] and the values [M, A] it saw.

    Without a rule the rewards are whole returns: they are what is learned, and nothing is bootstrapped.
    """
    now, goal = outlook(head, rule, view, online, target, batch)
    loss, priority = head.loss(now, view.actions(batch), goal)
    loss, priority = view.settle(loss, priority, batch)
    return loss, priority, real_values(head, now.detach())


def td_slope(
    head: Scalar, rule: Rule | None, view: StepView, online: Network, target: Network, batch: Tensors
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `td_loss`, and d loss / d outputs [N, A] by hand: for networks so small that autograd's own way is longer."""
    now, goal = outlook(head, rule, view, online, target, batch)
    now = now.detach()
    loss, priority, slope = head.slope(now, batch.action, goal, batch.weight * (1.0 / len(goal)))
    return *view.settle(loss, priority, batch), head.values(now), slope


def outlook(
    head: Head, rule: Rule | None, view: View, online: Network, target: Network, batch: Tensors
) -> tuple[Tensor, Tensor]:
    """The outputs to be learned from [M, *out], and what they should become."""
    needs_online = rule is not None and rule.needs_online
    now, online_next = view.see(online, batch, now=True, after=needs_online)
    if now is None:
        raise ValueError("the view showed nothing to learn from")
    return now, view.gains(batch)[0] if rule is None else td_target(head, rule, view, target, batch, online_next)


def real_values(head: Head, out: Tensor) -> Tensor:  # [M, A], or flat where dimensions have different counts
    """The values of actions that there are."""
    values = head.values(out)
    return values[values != -HUGE] if isinstance(head, Decoupled) else values


def choices(head: Head, action: Tensor) -> Tensor:  # [M] -> [M] or [M, D]
    """The action as the head's values count it."""
    return torch.stack(split_actions(action, head.counts), 1) if isinstance(head, Decoupled) else action
