"""Torsos turn observations into features. Shapes: N items, C channels, F features.

A torso names two sizes: `features`, the width of what it returns, and `hidden`, the width of the layer that each
stream of the head puts on top (0: the head is linear). The hidden layer belongs to the head because a duelling
network has one per stream (Wang et al. 2016).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class Mlp(nn.Module):
    """Fully connected layers with ReLU; the last size becomes the head's hidden layer."""

    def __init__(self, shape: tuple[int, ...], sizes: Sequence[int]) -> None:
        super().__init__()
        widths = [math.prod(shape), *sizes[:-1]]
        self.layers = nn.ModuleList(nn.Linear(width_in, width_out) for width_in, width_out in pairwise(widths))
        self.features = widths[-1]
        self.hidden = sizes[-1] if sizes else 0

    def forward(self, obs: Tensor) -> Tensor:  # [N, ...] -> [N, F]
        """Features of a batch of observations."""
        # Calling a layer costs as much as a small matrix product: the functions under it are called instead.
        features = obs.flatten(1)
        for layer in cast("list[nn.Linear]", self.layers):
            features = functional.relu(functional.linear(features, layer.weight, layer.bias))
        return features


class Nature(nn.Module):
    """The convolutions of Mnih et al. 2015: 32@8x8/4, 64@4x4/2, 64@3x3/1, without padding."""

    def __init__(self, shape: tuple[int, ...], width: int = 512) -> None:
        super().__init__()
        if len(shape) != 3:
            raise ValueError(f"the nature torso wants pictures [C, H, W], not {shape}")
        self.layers = nn.Sequential(
            nn.Conv2d(shape[0], 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            self.features = self.layers(torch.zeros(1, *shape)).shape[1]
        self.hidden = width

    def forward(self, obs: Tensor) -> Tensor:  # [N, C, H, W] -> [N, F]
        """Features of a batch of pictures."""
        # conv backward is twice as fast channels_last on CPUs (docs/decisions); the weights are laid out so too.
        features: Tensor = self.layers(obs.contiguous(memory_format=torch.channels_last))
        return features
