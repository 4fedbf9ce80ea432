"""Heads: what a network's output means. Shapes: N items, A actions, K atoms, quantiles or fractions, D dimensions.

`probs` is a rule's distribution over next actions; where it is not one-hot the next values are averaged by it.

Values are always returns, in the units of the reward. With `rescale` the outputs are h(values) (`nets/rescale.py`):
h^-1 turns outputs into returns before they are averaged or added; targets, losses and priorities are on the scale of h.

A new head needs four places: its settings in `plan/schema.py` (a class, listed in `Net.head`), its layers in
`nets/heads.py` (`make_output_head`), its meaning in this file (`make_head`), and its name in `HEADS` of
`plan/naming.py`. Settings that do not go with it are refused by `plan/validate/pairs.py`.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from qfleet.data import Spec, split_actions
from qfleet.nets import signed_hyperbolic, signed_parabolic
from qfleet.plan.schema import CategoricalHead, ImplicitHead, Plan, QuantileHead

NO_ACTION = -1e9  # the value of an action that a dimension does not have


class Head(Protocol):
    """From outputs to values, targets and losses."""

    def values(self, out: Tensor) -> Tensor:
        """Expected value per action [N, A], or per action of each dimension [N, D, A]."""

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """The target for the output of the action taken."""

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Loss per item [N] and priority per item [N] (detached)."""


def to_returns(out: Tensor, rescale: bool) -> Tensor:
    """Outputs as returns: h^-1(out) if they are rescaled."""
    return signed_parabolic(out) if rescale else out


def bootstrap(values: Tensor, reward: Tensor, discount: Tensor, rescale: bool) -> Tensor:
    """R + discount * values, on the scale of the outputs."""
    target = reward + discount * values
    return signed_hyperbolic(target) if rescale else target


def select_action(out: Tensor, action: Tensor) -> Tensor:  # [N, A, K], [N] -> [N, K]
    """The outputs of the actions taken."""
    return out.gather(1, action.view(-1, 1, 1).expand(-1, 1, out.shape[2])).squeeze(1)


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


@dataclass(frozen=True)
class Categorical:
    """Logits of K fixed returns from `low` to `high` (Bellemare et al. 2017), evenly spaced on the outputs' scale."""

    low: float = -10.0
    high: float = 10.0
    rescale: bool = False

    def support(self, like: Tensor) -> Tensor:  # [K]
        """The atoms on the outputs' scale."""
        low, high = (signed_hyperbolic(bound) if self.rescale else bound for bound in (self.low, self.high))
        return torch.linspace(low, high, like.shape[-1], device=like.device, dtype=like.dtype)

    def values(self, out: Tensor) -> Tensor:
        """Mean of each action's distribution."""
        return out.softmax(2) @ to_returns(self.support(out), self.rescale)

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """The shifted and scaled distribution, projected back onto the atoms (algorithm 1)."""
        next_probs = (probs.unsqueeze(2) * next_out.softmax(2)).sum(1)
        support = self.support(next_out)
        atoms = to_returns(support, self.rescale).unsqueeze(0)
        target_atoms = bootstrap(atoms, reward.unsqueeze(1), discount.unsqueeze(1), self.rescale)
        return categorical_projection(target_atoms, next_probs, support)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy; the priority is the Kullback-Leibler divergence, zero for a perfect prediction."""
        cross_entropy = -(target * functional.log_softmax(select_action(out, action), 1)).sum(1)
        return cross_entropy, (cross_entropy.detach() + torch.special.xlogy(target, target).sum(1)).clamp(min=0.0)


def categorical_projection(atoms: Tensor, probs: Tensor, support: Tensor) -> Tensor:  # [N, K], [N, K], [K] -> [N, K]
    """Split each atom's probability between the two atoms of `support` on either side of it."""
    low = support[0]
    high = support[-1]
    last = len(support) - 1
    position = (atoms.clamp(low, high) - low) / (high - low) * last
    lower = position.floor().clamp(max=last)
    upper_share = position - lower  # zero when the position is an atom's: it keeps all probability
    out = torch.zeros_like(probs)
    out.scatter_add_(1, lower.long(), probs * (1.0 - upper_share))
    return out.scatter_add_(1, (lower + 1).clamp(max=last).long(), probs * upper_share)


def quantile_huber_loss(
    predicted: Tensor, target: Tensor, fractions: Tensor
) -> Tensor:  # [N, I], [N, J], [N, I] -> [N]
    """sum_i mean_j |tau_i - 1{u_ij < 0}| Huber_1(u_ij), u_ij = target_j - predicted_i (Dabney et al. 2018, eq. 10)."""
    error = target.unsqueeze(1) - predicted.unsqueeze(2)
    huber = functional.smooth_l1_loss(error, torch.zeros_like(error), reduction="none")
    weight = (fractions.unsqueeze(2) - (error.detach() < 0).to(error.dtype)).abs()
    return (weight * huber).mean(2).sum(1)


@dataclass(frozen=True)
class Quantile:
    """K quantiles at evenly spaced fractions (QR-DQN)."""

    rescale: bool = False

    def values(self, out: Tensor) -> Tensor:
        """Mean over quantiles."""
        return to_returns(out, self.rescale).mean(2)

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """R + discount * quantile, for every quantile."""
        next_quantiles = (probs.unsqueeze(2) * to_returns(next_out, self.rescale)).sum(1)
        return bootstrap(next_quantiles, reward.unsqueeze(1), discount.unsqueeze(1), self.rescale)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Quantile Huber loss; the priority is the error of the mean."""
        predicted = select_action(out, action)
        num = out.shape[2]
        fractions = (torch.arange(num, device=out.device, dtype=out.dtype) + 0.5) / num
        error = (target.mean(1) - predicted.detach().mean(1)).abs()
        return quantile_huber_loss(predicted, target, fractions.expand_as(predicted)), error


@dataclass(frozen=True)
class ImplicitQuantiles:
    """Quantiles at the fractions in the output's last row (IQN)."""

    rescale: bool = False

    def values(self, out: Tensor) -> Tensor:
        """Mean over fractions."""
        return to_returns(out[:, :-1], self.rescale).mean(2)

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """R + discount * quantile, for every sampled quantile."""
        return Quantile(self.rescale).target(next_out[:, :-1], probs, reward, discount)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Quantile Huber loss at the sampled fractions; the priority is the error of the mean."""
        predicted = select_action(out, action)
        error = (target.mean(1) - predicted.detach().mean(1)).abs()
        return quantile_huber_loss(predicted, target, out[:, -1]), error


def make_head(plan: Plan, spec: Spec) -> Head:
    """The plan's head: the meaning of its network's outputs."""
    rescale = plan.algo.rescale
    match plan.net.head:
        case CategoricalHead(low=low, high=high):
            return Categorical(low, high, rescale)
        case QuantileHead():
            return Quantile(rescale)
        case ImplicitHead():
            return ImplicitQuantiles(rescale)
        case _:
            loss = plan.algo.loss
            return Decoupled(spec.actions, loss, rescale) if plan.net.decoupled else Scalar(loss, rescale)
