"""Torsos turn observations into features. Shapes: N items, C channels, F features.

A torso has two sizes: `features`, the width of its output, and `hidden`, the width of the hidden layer in each stream
of the head (0: the head is linear). The hidden layer belongs to the head because a duelling
network has one per stream (Wang et al. 2016).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from qfleet.data import Spec
from qfleet.errors import UsageError
from qfleet.nets.layers import PLAIN, Dense, Relu, Style, relu, torso_dense
from qfleet.plan.schema import ConvTorso, ImpalaTorso, MinatarTorso, MlpTorso, NatureTorso, Net

Convolution: TypeAlias = tuple[int, int, int]  # channels, kernel, stride
NATURE: tuple[Convolution, ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # Mnih et al. 2015


class Mlp(nn.Module):
    """Fully connected layers with ReLU; the last size becomes the head's hidden layer."""

    def __init__(self, shape: tuple[int, ...], sizes: Sequence[int], style: Style = PLAIN) -> None:
        super().__init__()
        widths = [math.prod(shape), *sizes[:-1]]
        self.layers = nn.ModuleList(torso_dense(*pair, style) for pair in pairwise(widths))
        self.features = widths[-1]
        self.hidden = sizes[-1] if sizes else 0

    def forward(self, obs: Tensor) -> Tensor:  # [N, ...] -> [N, F]
        """Features of a batch of observations."""
        features = obs.flatten(1)
        for layer in cast("list[Dense]", self.layers):
            features = layer.forward(features)
        return features


class Convolutions(nn.Module):
    """Convolutions without padding, each `(channels, kernel, stride)`, with ReLU."""

    def __init__(self, shape: tuple[int, ...], stack: Sequence[Convolution], width: int, style: Style = PLAIN) -> None:
        super().__init__()
        require_image(shape)
        depths = [shape[0], *(channels for channels, _, _ in stack)]
        layers = [
            layer
            for (before, after), (_, kernel, stride) in zip(pairwise(depths), stack, strict=True)
            for layer in convolution(before, after, kernel, stride, style)
        ]
        self.layers = channels_last(nn.Sequential(*layers))
        self.features = count_features(self.layers, shape)
        self.hidden = width

    def forward(self, obs: Tensor) -> Tensor:  # [N, C, H, W] -> [N, F]
        """Features of a batch of images."""
        # conv backward is twice as fast channels_last on CPUs (docs/decisions); the weights are channels_last too.
        features: Tensor = self.layers(obs.contiguous(memory_format=torch.channels_last))
        return features.flatten(1)


class Residual(nn.Module):
    """Two 3x3 convolutions with a skip connection (He et al. 2016)."""

    def __init__(self, channels: int, style: Style) -> None:
        super().__init__()
        convs = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.first, self.second = [spectral_norm(conv) if style.spectral_norm else conv for conv in convs]
        self.norms = nn.ModuleList(channel_norm(channels, style) for _ in range(2))

    def forward(self, maps: Tensor) -> Tensor:
        """Feature maps of the same size."""
        inner = self.first(relu(self.norms[0](maps)))
        out: Tensor = maps + self.second(relu(self.norms[1](inner)))
        return out


class Impala(nn.Module):
    """The residual network of Espeholt et al. 2018, widened and pooled to a fixed size (Clark et al. 2024)."""

    def __init__(
        self, shape: tuple[int, ...], factor: int = 1, pool: int = 6, width: int = 256, style: Style = PLAIN
    ) -> None:
        super().__init__()
        require_image(shape)
        depths = [shape[0], 16 * factor, 32 * factor, 32 * factor]
        sections = [section for pair in pairwise(depths) for section in impala_section(*pair, style)]
        self.layers = channels_last(nn.Sequential(*sections, Relu(), nn.AdaptiveMaxPool2d(pool)))
        self.features = count_features(self.layers, shape)
        self.hidden = width

    def forward(self, obs: Tensor) -> Tensor:  # [N, C, H, W] -> [N, F]
        """Features of a batch of images."""
        features: Tensor = self.layers(obs.contiguous(memory_format=torch.channels_last))
        return features.flatten(1)


def impala_section(channels_in: int, channels_out: int, style: Style) -> list[nn.Module]:
    """A convolution, pooling that halves the image, two residual blocks."""
    conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return [conv, pool, Residual(channels_out, style), Residual(channels_out, style)]


def convolution(channels_in: int, channels_out: int, kernel: int, stride: int, style: Style) -> list[nn.Module]:
    """A convolution, normalisation if the style has it, and ReLU."""
    conv: nn.Module = nn.Conv2d(channels_in, channels_out, kernel, stride=stride)
    return [spectral_norm(conv) if style.spectral_norm else conv, channel_norm(channels_out, style), Relu()]


def channel_norm(channels: int, style: Style) -> nn.Module:
    """Layer normalisation of maps: statistics over channels and places, a scale and shift per channel."""
    return nn.GroupNorm(1, channels) if style.layer_norm else nn.Identity()


def channels_last(layers: nn.Sequential) -> nn.Sequential:
    """The same layers, their weights in channels-last format."""
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def bytes_channels_last(images: Tensor) -> Tensor:  # [N, C, H, W]
    """Bytes in channels-last format, faster than torch's own conversion on CPUs."""
    last = torch.channels_last
    if images.device.type != "cpu" or torch.compiler.is_compiling() or images.is_contiguous(memory_format=last):
        return images.contiguous(memory_format=last)
    return torch.stack(images.unbind(1), -1).movedim(-1, 1)


def count_features(layers: nn.Module, shape: tuple[int, ...]) -> int:
    """The number of outputs for one image."""
    with torch.no_grad():
        return int(layers(torch.zeros(1, *shape)).numel())


def require_image(shape: tuple[int, ...]) -> None:
    """Convolutions need channels, height and width."""
    if len(shape) != 3:
        raise ValueError(f"convolutions need images [C, H, W], not {shape}")


def make_torso(net: Net, spec: Spec, style: Style) -> nn.Module:
    """The plan's torso."""
    match net.torso:
        case NatureTorso(width=width):
            return Convolutions(spec.input_shape, NATURE, width, style)
        case ConvTorso(channels=channels, kernels=kernels, strides=strides, width=width):
            return Convolutions(spec.input_shape, list(zip(channels, kernels, strides, strict=True)), width, style)
        case ImpalaTorso(factor=factor, pool=pool, width=width):
            return Impala(spec.input_shape, factor, pool, width, style)
        case MinatarTorso(channels=channels, width=width):
            return Convolutions(spec.input_shape, [(channels, 3, 1)], width, style)
        case MlpTorso(sizes=sizes):
            return Mlp(spec.input_shape, sizes, style)
        case _:
            raise UsageError(
                "net.torso.type is `own`, but no torso was given",
                "A torso of your own is a Python object; a plan cannot hold it.",
                "Pass it from Python (torso=...), or choose net.torso.type=mlp or nature.",
            )
