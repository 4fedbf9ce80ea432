"""Heads: what a network's output means. Shapes: N items, A actions, D dimensions.

`probs` is a rule's distribution over next actions; where it is not one-hot the next values are averaged by it.

Values are always returns, in the units of the reward. With `rescale` the outputs are h(values) (`nets/rescale.py`):
h^-1 turns outputs into returns before they are averaged or added; targets, losses and priorities are on the scale of h.

A new head needs four places: its settings in `plan/schema.py` (a class, listed in `Net.head`), its layers in
`nets/heads.py` (`make_output_head`), its meaning in this file or, for distributions of returns, in
`distributional_heads.py` (chosen by `make_head`), and its name in `HEADS` of `plan/naming.py`. Settings that do not go
with it are refused by `plan/validate/pairs.py`.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional

from qfleet.data import Spec, split_actions
from qfleet.nets import signed_hyperbolic, signed_parabolic
from qfleet.plan.schema import CategoricalHead, ImplicitHead, Plan, QuantileHead, ScalarHead

NO_ACTION = -1e9  # the value of an action that a dimension does not have


class Head(Protocol):
    """From outputs to values, targets and losses."""

    def values(self, out: Tensor) -> Tensor:
        """Expected value per action [N, A], or per action of each dimension [N, D, A]."""

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """The target for the output of the action taken."""

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Loss per item [N] and priority per item [N] (detached)."""


class CustomHead(Head, Protocol):
    """A head of the user's own: its layers, and what their outputs mean."""

    def make_layers(self, features: int, hidden: int, actions: int) -> nn.Module:
        """Layers from features [N, features] to outputs [N, *out]; `hidden` is the width that the torso proposes."""


def to_returns(out: Tensor, rescale: bool) -> Tensor:
    """Outputs as returns: h^-1(out) if they are rescaled."""
    return signed_parabolic(out) if rescale else out


def bootstrap(values: Tensor, reward: Tensor, discount: Tensor, rescale: bool) -> Tensor:
    """R + discount * values, on the scale of the outputs."""
    target = reward + discount * values
    return signed_hyperbolic(target) if rescale else target


def regression_loss(predicted: Tensor, target: Tensor, kind: Literal["huber", "mse"]) -> tuple[Tensor, Tensor]:
    """Huber (kappa 1) or half the squared TD error; the priority is the absolute TD error."""
    error = (target - predicted.detach()).abs()
    if kind == "huber":
        return functional.smooth_l1_loss(predicted, target, reduction="none"), error
    return 0.5 * functional.mse_loss(predicted, target, reduction="none"), error


@dataclass(frozen=True)
class Scalar:
    """One expected value per action."""

    kind: Literal["huber", "mse"] = "huber"
    rescale: bool = False

    def values(self, out: Tensor) -> Tensor:
        """The outputs are the values."""
        return to_returns(out, self.rescale)

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """y = R + discount * sum_a pi(a) Q(s', a): n-step and gamma are inside R and discount."""
        return bootstrap((probs * to_returns(next_out, self.rescale)).sum(1), reward, discount, self.rescale)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The TD error, squared or Huber."""
        return regression_loss(out.gather(1, action.unsqueeze(1)).squeeze(1), target, self.kind)

    def loss_and_gradient(
        self, out: Tensor, action: Tensor, target: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:  # -> [N], [N], [N, A]
        """As `loss`, and d sum(weight x loss) / d out; multiplied in autograd's order, so the bits are equal."""
        index = action.unsqueeze(1)
        predicted = out.gather(1, index).squeeze(1)
        loss, priority = regression_loss(predicted, target, self.kind)
        error = predicted.sub_(target)
        if self.kind == "huber":
            error.clamp_(-1.0, 1.0)
        return loss, priority, torch.zeros_like(out).scatter_(1, index, error.mul_(weight).unsqueeze(1))


@dataclass(frozen=True)
class Decoupled:
    """A value per action of each dimension; a joint action's value is their mean (Seyde et al. 2023, eq. 2).

    Outputs are [N, D, A] with A the largest count; outputs past a dimension's own count are ignored.
    """

    counts: tuple[int, ...]
    kind: Literal["huber", "mse"] = "huber"
    rescale: bool = False

    def values(self, out: Tensor) -> Tensor:
        """The outputs, `NO_ACTION` past a dimension's own count."""
        out = to_returns(out, self.rescale)
        if min(self.counts) == out.shape[2]:
            return out
        counts = torch.tensor(self.counts, device=out.device).unsqueeze(1)
        return out.masked_fill(torch.arange(out.shape[2], device=out.device) >= counts, NO_ACTION)

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """y = R + discount * mean_d sum_a pi_d(a) U_d(s', a)."""
        next_value = (probs * to_returns(next_out, self.rescale)).sum(2).mean(1)
        return bootstrap(next_value, reward, discount, self.rescale)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The TD error of the mean over dimensions, squared or Huber."""
        choices = torch.stack(split_actions(action, self.counts), 1)
        predicted = to_returns(out.gather(2, choices.unsqueeze(2)).squeeze(2), self.rescale).mean(1)
        return regression_loss(signed_hyperbolic(predicted) if self.rescale else predicted, target, self.kind)


def make_head(plan: Plan, spec: Spec) -> Head:
    """The plan's head: the meaning of its network's outputs."""
    rescale = plan.algo.rescale
    if isinstance(plan.net.head, ScalarHead):
        loss = plan.algo.loss
        return Decoupled(spec.actions, loss, rescale) if plan.net.decoupled else Scalar(loss, rescale)
    from qfleet.qlearn.distributional_heads import Categorical, ImplicitQuantiles, Quantile

    match plan.net.head:
        case CategoricalHead(low=low, high=high):
            return Categorical(low, high, rescale)
        case QuantileHead():
            return Quantile(rescale)
        case ImplicitHead():
            return ImplicitQuantiles(rescale)
        case other:
            assert_never(other)
