"""Heads turn features into one output per action: a number, or K numbers that describe a distribution.

Shapes: N items, F features, A actions, K atoms, quantiles or fractions, D action dimensions. A head's `shape` is
that of its output for one item: (A,), (A, K), or (D, A) when decoupled. `qlearn/heads.py` says what
the outputs mean, and how to add a head.
"""

import math

import torch
from torch import Tensor, nn

from qfleet.data import Spec
from qfleet.nets.layers import PLAIN, Dense, Style, head_linear, relu
from qfleet.plan.schema import CategoricalHead, ImplicitHead, Net, QuantileHead, ScalarHead


class HeadStream(nn.Module):
    """One hidden layer (if any) and a linear output."""

    def __init__(self, features: int, hidden: int, outputs: int, style: Style = PLAIN) -> None:
        super().__init__()
        self.hidden = Dense(head_linear(features, hidden, style), hidden, style) if hidden else None
        self.out = head_linear(hidden or features, outputs, style)

    def forward(self, features: Tensor) -> Tensor:  # [N, F] -> [N, outputs]
        """The stream's outputs."""
        if self.hidden is not None:
            features = self.hidden.forward(features)
        out: Tensor = self.out.forward(features)
        return out


class PlainHead(nn.Module):
    """One stream from features to action outputs."""

    def __init__(self, features: int, hidden: int, shape: tuple[int, ...], style: Style = PLAIN) -> None:
        super().__init__()
        self.shape = shape
        self.actions = HeadStream(features, hidden, math.prod(shape), style)

    def forward(self, features: Tensor) -> Tensor:  # [N, F] -> [N, *shape]
        """Outputs per action."""
        out = self.actions.forward(features)
        return out if len(self.shape) == 1 else out.view(-1, *self.shape)


class DuelingHead(nn.Module):
    """Q = V + A - mean(A), in two streams (Wang et al. 2016, eq. 9); per atom, per action dimension."""

    action_exists: Tensor | None

    def __init__(
        self,
        features: int,
        hidden: int,
        shape: tuple[int, ...],
        style: Style = PLAIN,
        *,
        counts: tuple[int, ...] | None = None,  # how many actions each dimension has, when decoupled
    ) -> None:
        super().__init__()
        self.shape = shape
        self.action_axis = 1 if counts is None else 2
        self.value_shape = (1, *shape[1:]) if counts is None else (1, 1)
        self.register_buffer("action_exists", existing_actions(counts), persistent=False)
        self.value = HeadStream(features, hidden, math.prod(self.value_shape), style)
        self.advantage = HeadStream(features, hidden, math.prod(shape), style)

    def forward(self, features: Tensor) -> Tensor:  # [N, F] -> [N, *shape]
        """Outputs per action."""
        if features.requires_grad:
            # Both streams send gradient into the torso: scale it to the size of one.
            features.register_hook(lambda grad: grad / math.sqrt(2.0))  # type: ignore[no-untyped-call]
        advantage = self.advantage.forward(features).view(-1, *self.shape)
        value = self.value.forward(features).view(-1, *self.value_shape)
        return value + advantage - self.mean(advantage)

    def mean(self, advantage: Tensor) -> Tensor:
        """The mean over existing actions."""
        if self.action_exists is None:
            return advantage.mean(self.action_axis, keepdim=True)
        total = (advantage * self.action_exists).sum(self.action_axis, keepdim=True)
        return total / self.action_exists.sum(1, keepdim=True)


def existing_actions(counts: tuple[int, ...] | None) -> Tensor | None:  # [D, A]
    """One where a dimension has such an action, zero past its count; None if all counts are equal."""
    if counts is None or min(counts) == max(counts):
        return None
    return (torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1)).to(torch.float32)


class ImplicitQuantileHead(nn.Module):
    """Values at fractions of the return's distribution (IQN, Dabney et al. 2018, eq. 4).

    Its output has one row more than there are actions: the last row holds the fractions of the quantiles.
    """

    cosine_frequencies: Tensor

    def __init__(self, features: int, inner: nn.Module, *, fractions: int, cosines: int = 64) -> None:
        super().__init__()
        self.inner = inner
        self.fractions = fractions
        self.even = False  # evenly spaced instead of random fractions, for acting
        self.register_buffer(
            "cosine_frequencies", math.pi * torch.arange(cosines, dtype=torch.float32), persistent=False
        )
        self.embed = nn.Linear(cosines, features)

    def forward(self, features: Tensor) -> Tensor:  # [N, F] -> [N, A + 1, K]
        """Values per action at K fractions, then the fractions."""
        num, width = features.shape
        taus = self.sample_fractions(num, features.device)
        cosines = torch.cos(taus.unsqueeze(2) * self.cosine_frequencies)
        mixed = features.unsqueeze(1) * relu(self.embed.forward(cosines).flatten(0, 1)).view(num, -1, width)
        values = self.inner.forward(mixed.flatten(0, 1)).view(num, self.fractions, -1).transpose(1, 2)
        return torch.cat([values, taus.unsqueeze(1)], 1)

    def sample_fractions(self, num: int, device: torch.device) -> Tensor:  # [N, K]
        """K fractions for each item."""
        if self.even:
            return ((torch.arange(self.fractions, device=device) + 0.5) / self.fractions).expand(num, -1)
        return torch.rand(num, self.fractions, device=device)


def make_output_head(net: Net, spec: Spec, features: int, hidden: int, style: Style) -> nn.Module:
    """The plan's head."""

    def streams(*shape: int) -> nn.Module:
        if net.dueling:
            return DuelingHead(features, hidden, shape, style, counts=spec.actions if net.decoupled else None)
        return PlainHead(features, hidden, shape, style)

    match net.head:
        case CategoricalHead(atoms=atoms):
            return streams(spec.num_actions, atoms)
        case QuantileHead(quantiles=quantiles):
            return streams(spec.num_actions, quantiles)
        case ImplicitHead(fractions=fractions, cosines=cosines):
            return ImplicitQuantileHead(features, streams(spec.num_actions), fractions=fractions, cosines=cosines)
        case ScalarHead():
            return streams(len(spec.actions), max(spec.actions)) if net.decoupled else streams(spec.num_actions)
