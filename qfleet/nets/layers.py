"""Layers: dense, with the options of a plan, and noisy. Shapes: N items, F features.

Layers are called through `forward`: a module's call costs as much as a small matrix product.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import is_parametrized

_recorded: ContextVar[list[Tensor] | None] = ContextVar("activations", default=None)


@dataclass(frozen=True)
class Style:
    """How layers are built throughout a network."""

    noisy: bool = False  # the head's layers draw noise (Fortunato et al. 2018)
    sigma: float = 0.5
    layer_norm: bool = False  # after every hidden layer, before its ReLU (Ba et al. 2016)
    spectral_norm: bool = False  # the torso's layers have a largest singular value of one (Miyato et al. 2018)
    dropout: float = 0.0  # after every fully connected hidden layer, while learning


PLAIN = Style()


@contextmanager
def record_activations() -> Iterator[list[Tensor]]:
    """Collect the activations of every ReLU inside the block."""
    seen: list[Tensor] = []
    token = _recorded.set(seen)
    try:
        yield seen
    finally:
        _recorded.reset(token)


def relu(values: Tensor) -> Tensor:
    """ReLU, recorded by `record_activations`."""
    out = functional.relu(values)
    if (seen := _recorded.get()) is not None:
        seen.append(out.detach())
    return out


class Relu(nn.Module):
    """`relu` as a module, for sequences of layers."""

    def forward(self, values: Tensor) -> Tensor:
        """ReLU."""
        return relu(values)


class Noisy(nn.Module):
    """A linear layer with factorised Gaussian noise on its weights (Fortunato et al. 2018, eq. 10-11).

    One noise sample per call, shared by the batch, from torch's generator; no noise while `active` is off.
    """

    def __init__(self, width_in: int, width_out: int, sigma: float = 0.5) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(width_in)
        spread = sigma / math.sqrt(width_in)
        self.weight = nn.Parameter(torch.empty(width_out, width_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(width_out).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((width_out, width_in), spread))
        self.bias_sigma = nn.Parameter(torch.full((width_out,), spread))
        self.active = True

    def forward(self, values: Tensor) -> Tensor:  # [N, in] -> [N, out]
        """The layer's output with one sample of noise."""
        if not self.active:
            return functional.linear(values, self.weight, self.bias)
        width_out, width_in = self.weight.shape
        noise = torch.randn(width_in + width_out, device=values.device)
        noise = noise.sign() * noise.abs().sqrt()
        noise_in = noise[:width_in]
        noise_out = noise[width_in:]
        weight = torch.addcmul(self.weight, self.weight_sigma, torch.outer(noise_out, noise_in))
        return functional.linear(values, weight, torch.addcmul(self.bias, self.bias_sigma, noise_out))


class Dense(nn.Module):
    """A fully connected hidden layer: linear, layer norm if the style has it, ReLU, dropout if the style has it."""

    def __init__(self, layer: nn.Module, width: int, style: Style = PLAIN) -> None:
        super().__init__()
        self.linear = layer
        self.norm = nn.LayerNorm(width) if style.layer_norm else None
        self.dropout = style.dropout

    def forward(self, values: Tensor) -> Tensor:  # [N, in] -> [N, out]
        """The layer's activations."""
        out: Tensor = self.linear.forward(values)
        if self.norm is not None:
            out = self.norm.forward(out)
        out = relu(out)
        return functional.dropout(out, self.dropout) if self.dropout and self.training else out


def torso_dense(width_in: int, width_out: int, style: Style) -> Dense:
    """A hidden layer of a torso."""
    layer: nn.Module = nn.Linear(width_in, width_out)
    return Dense(spectral_norm(layer) if style.spectral_norm else layer, width_out, style)


def head_linear(width_in: int, width_out: int, style: Style) -> nn.Module:
    """A linear layer of a head."""
    return Noisy(width_in, width_out, style.sigma) if style.noisy else nn.Linear(width_in, width_out)


def set_noise(net: nn.Module, active: bool) -> None:
    """Switch the noise of every noisy layer on or off."""
    for layer in net.modules():
        if isinstance(layer, Noisy):
            layer.active = active


def parametrized_layers(net: nn.Module) -> Iterator[tuple[nn.Module, nn.ModuleDict]]:
    """Every layer with parametrised weights, as by spectral norm, and its parametrisations."""
    for layer in net.modules():
        if is_parametrized(layer):
            yield layer, cast("nn.ModuleDict", layer.parametrizations)


@torch.no_grad()
def refresh_spectral_norms(net: nn.Module, iterations: int = 50) -> None:
    """Update the estimates of largest singular values after the weights were replaced.

    Spectral norm makes one power iteration whenever its weight is read while training.
    """
    for layer, parametrizations in parametrized_layers(net):
        was_training = parametrizations.training
        parametrizations.train()
        for name in parametrizations:
            for _ in range(iterations):
                getattr(layer, name)
        parametrizations.train(was_training)


def dormant_fraction(activations: list[Tensor], threshold: float = 0.025) -> float:
    """Share of units whose mean activation is at most `threshold` of their layer's mean (Sokar et al. 2023, def. 3.1).

    Activations are [N, units] or [N, channels, height, width]; a channel counts as one unit.
    """
    dormant = total = 0
    for layer in activations:
        score = layer.mean(dim=(0, *range(2, layer.ndim)))
        dormant += int((score <= threshold * score.mean()).sum())
        total += score.numel()
    return dormant / max(1, total)
