"""Heads: what a network's output means. Shapes: N items, A actions, K atoms, quantiles or fractions, D dimensions.

`probs` is a rule's distribution over next actions; where it is not one-hot the next values are averaged by it.

Values are always returns, in the units of the reward. With `rescale` the outputs are h(values) (`nets/rescale.py`):
outputs are stretched to returns before anything is averaged or added, and targets, losses and priorities are h's.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from qfleet.data import split_actions
from qfleet.nets import shrink, stretch

HUGE = 1e9


class Head(Protocol):
    """From outputs to values, targets and losses."""

    def values(self, out: Tensor) -> Tensor:
        """Expected value per action [N, A], or per action of each dimension [N, D, A]."""
        ...

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """What the chosen action's output should become."""
        ...

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Loss per item [N] and priority per item [N] (detached)."""
        ...


def worth(out: Tensor, rescale: bool) -> Tensor:
    """The returns that outputs stand for."""
    return stretch(out) if rescale else out


def bootstrap(values: Tensor, reward: Tensor, discount: Tensor, rescale: bool) -> Tensor:
    """R + discount * values, on the scale of the outputs."""
    goal = reward + discount * values
    return shrink(goal) if rescale else goal


def chosen(out: Tensor, action: Tensor) -> Tensor:  # [N, A, K], [N] -> [N, K]
    """The outputs of the actions taken."""
    return out.gather(1, action.view(-1, 1, 1).expand(-1, 1, out.shape[2])).squeeze(1)


def regression(predicted: Tensor, target: Tensor, kind: Literal["huber", "mse"]) -> tuple[Tensor, Tensor]:
    """Huber (kappa 1) or half the squared TD error; the priority is the error's size."""
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
        return worth(out, self.rescale)

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """y = R + discount * sum_a pi(a) Q(s', a): n-step and gamma are inside R and discount."""
        return bootstrap((probs * worth(next_out, self.rescale)).sum(1), reward, discount, self.rescale)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The TD error, squared or Huber."""
        return regression(out.gather(1, action.unsqueeze(1)).squeeze(1), target, self.kind)

    def slope(
        self, out: Tensor, action: Tensor, target: Tensor, share: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:  # -> [N], [N], [N, A]
        """As `loss`, and d (sum of share x loss) / d out, in the order autograd multiplies: the same bits."""
        place = action.unsqueeze(1)
        predicted = out.gather(1, place).squeeze(1)
        loss, priority = regression(predicted, target, self.kind)
        error = predicted.sub_(target)
        if self.kind == "huber":
            error.clamp_(-1.0, 1.0)
        return loss, priority, torch.zeros_like(out).scatter_(1, place, error.mul_(share).unsqueeze(1))


@dataclass(frozen=True)
class Decoupled:
    """A value per action of each dimension; a joint action is worth their mean (Seyde et al. 2023, eq. 2).

    Outputs are [N, D, A] with A the largest count; those past a dimension's own count mean nothing.
    """

    counts: tuple[int, ...]
    kind: Literal["huber", "mse"] = "huber"
    rescale: bool = False

    def values(self, out: Tensor) -> Tensor:
        """The outputs, very low where there is no such action."""
        out = worth(out, self.rescale)
        if min(self.counts) == out.shape[2]:
            return out
        counts = torch.tensor(self.counts, device=out.device).unsqueeze(1)
        return out.masked_fill(torch.arange(out.shape[2], device=out.device) >= counts, -HUGE)

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """y = R + discount * mean_d sum_a pi_d(a) U_d(s', a)."""
        mixed = (probs * worth(next_out, self.rescale)).sum(2).mean(1)
        return bootstrap(mixed, reward, discount, self.rescale)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The error of the mean over dimensions."""
        choices = torch.stack(split_actions(action, self.counts), 1)
        predicted = worth(out.gather(2, choices.unsqueeze(2)).squeeze(2), self.rescale).mean(1)
        return regression(shrink(predicted) if self.rescale else predicted, target, self.kind)


@dataclass(frozen=True)
class Categorical:
    """Logits of K fixed returns from `low` to `high` (Bellemare et al. 2017), evenly spaced on the outputs' scale."""

    low: float = -10.0
    high: float = 10.0
    rescale: bool = False

    def support(self, like: Tensor) -> Tensor:  # [K]
        """The places of the atoms on the outputs' scale."""
        low, high = (shrink(end) if self.rescale else end for end in (self.low, self.high))
        return torch.linspace(low, high, like.shape[-1], device=like.device, dtype=like.dtype)

    def values(self, out: Tensor) -> Tensor:
        """Mean of each action's distribution."""
        return out.softmax(2) @ worth(self.support(out), self.rescale)

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """The shifted and shrunken distribution, projected back onto the atoms (algorithm 1)."""
        mass = (probs.unsqueeze(2) * next_out.softmax(2)).sum(1)
        support = self.support(next_out)
        atoms = worth(support, self.rescale).unsqueeze(0)
        moved = bootstrap(atoms, reward.unsqueeze(1), discount.unsqueeze(1), self.rescale)
        return project(moved, mass, support)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy; the priority is the Kullback-Leibler divergence, which is zero for a perfect guess."""
        cross = -(target * functional.log_softmax(chosen(out, action), 1)).sum(1)
        return cross, (cross.detach() + torch.special.xlogy(target, target).sum(1)).clamp(min=0.0)


def project(moved: Tensor, mass: Tensor, support: Tensor) -> Tensor:  # [N, K], [N, K], [K] -> [N, K]
    """Share each atom's mass between the two atoms of `support` that it has moved between."""
    low = support[0]
    high = support[-1]
    last = len(support) - 1
    place = (moved.clamp(low, high) - low) / (high - low) * last
    below = place.floor().clamp(max=last)
    upper = place - below  # zero when the place is an atom's: all mass stays there
    out = torch.zeros_like(mass)
    out.scatter_add_(1, below.long(), mass * (1.0 - upper))
    return out.scatter_add_(1, (below + 1).clamp(max=last).long(), mass * upper)


def quantile_huber(predicted: Tensor, target: Tensor, fractions: Tensor) -> Tensor:  # [N, I], [N, J], [N, I] -> [N]
    """sum_i mean_j |tau_i - 1{u_ij < 0}| Huber_1(u_ij), u_ij = target_j - predicted_i (Dabney et al. 2018, eq. 10)."""
    error = target.unsqueeze(1) - predicted.unsqueeze(2)
    size = functional.smooth_l1_loss(error, torch.zeros_like(error), reduction="none")
    slope = (fractions.unsqueeze(2) - (error.detach() < 0).to(error.dtype)).abs()
    return (slope * size).mean(2).sum(1)


@dataclass(frozen=True)
class Quantile:
    """K quantiles at evenly spaced fractions (QR-DQN)."""

    rescale: bool = False

    def values(self, out: Tensor) -> Tensor:
        """Mean over quantiles."""
        return worth(out, self.rescale).mean(2)

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Every quantile shifted and shrunken."""
        mixed = (probs.unsqueeze(2) * worth(next_out, self.rescale)).sum(1)
        return bootstrap(mixed, reward.unsqueeze(1), discount.unsqueeze(1), self.rescale)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Quantile Huber loss; the priority is the error of the mean."""
        predicted = chosen(out, action)
        num = out.shape[2]
        fractions = (torch.arange(num, device=out.device, dtype=out.dtype) + 0.5) / num
        error = (target.mean(1) - predicted.detach().mean(1)).abs()
        return quantile_huber(predicted, target, fractions.expand_as(predicted)), error


@dataclass(frozen=True)
class ImplicitQuantiles:
    """Quantiles at the fractions that the output's last row names (IQN)."""

    rescale: bool = False

    def values(self, out: Tensor) -> Tensor:
        """Mean over fractions."""
        return worth(out[:, :-1], self.rescale).mean(2)

    def target(self, next_out: Tensor, probs: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Every sampled quantile shifted and shrunken."""
        return Quantile(self.rescale).target(next_out[:, :-1], probs, reward, discount)

    def loss(self, out: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Quantile Huber loss at the sampled fractions; the priority is the error of the mean."""
        predicted = chosen(out, action)
        error = (target.mean(1) - predicted.detach().mean(1)).abs()
        return quantile_huber(predicted, target, out[:, -1]), error
