"""Heads that learn the distribution of returns. Shapes: N items, A actions, K atoms, quantiles or fractions."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from qfleet.nets import signed_hyperbolic
from qfleet.qlearn.heads import bootstrap, to_returns


def select_action(out: Tensor, action: Tensor) -> Tensor:  # [N, A, K], [N] -> [N, K]
    """The outputs of the actions taken."""
    return out.gather(1, action.view(-1, 1, 1).expand(-1, 1, out.shape[2])).squeeze(1)


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
