"""Torsos by their published sizes: shapes, parameters, and multiplications per observation."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qfleet.data import Spec
from qfleet.nets import NATURE, QNet, make_net
from qfleet.nets.torso import Convolutions, Impala
from qfleet.plan.schema import ConvTorso, ImpalaTorso, MinatarTorso, NatureTorso, Net

ATARI = Spec((84, 84), "uint8", (6,), stack=4)
SMALL = Spec((42, 42), "uint8", (6,), stack=4)
GRID = Spec((4, 10, 10), "uint8", (6,))


def make(spec: Spec, torso: Any, **settings: Any) -> QNet:
    return make_net(Net(torso=torso, **settings), spec, normalize="off", seed=1)


def num_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def multiplications(net: QNet, spec: Spec) -> int:
    """Of one forward pass with one observation, counted layer by layer."""
    total = 0

    def linear(layer: nn.Linear, width: int) -> None:
        nonlocal total
        total += layer.weight.numel() * width

    def convolution(layer: nn.Module, inputs: Any, out: Tensor) -> None:
        nonlocal total
        assert isinstance(layer, nn.Conv2d)
        total += layer.weight.numel() * out.shape[2] * out.shape[3]

    hooks = [part.register_forward_hook(convolution) for part in net.modules() if isinstance(part, nn.Conv2d)]
    net(torch.from_numpy(np.zeros((1, *spec.input_shape), spec.dtype)))
    for hook in hooks:
        hook.remove()
    for part in net.modules():
        if isinstance(part, nn.Linear):
            linear(part, 1)
    return total


@pytest.mark.parametrize(
    ("spec", "torso", "millions", "parameters"),
    [
        (ATARI, NatureTorso(), 9.346, 1_687_206),
        (SMALL, NatureTorso(), 1.031, 114_342),
        # 16 maps of 20x20, 32 of 9x9, 32 of 4x4.
        (SMALL, ConvTorso(), 1.353, 16 * 65 + 32 * 257 + 32 * 289 + 256 * 513 + 257 * 6),
        (GRID, MinatarTorso(), 0.169, (3 * 3 * 4 + 1) * 16 + (8 * 8 * 16 + 1) * 128 + 129 * 6),
    ],
    ids=["nature", "nature on 42x42", "conv on 42x42", "minatar"],
)
def test_published_costs(spec: Spec, torso: Any, millions: float, parameters: int) -> None:
    net = make(spec, torso)
    assert num_parameters(net) == parameters
    assert multiplications(net, spec) / 1e6 == pytest.approx(millions, abs=5e-4)


def impala_parameters(channels: int, factor: int, pool: int, width: int, actions: int) -> int:
    """Three sections: a convolution and two blocks of two more each; then two dense layers."""
    total, depth = 0, channels
    for wide in (16 * factor, 32 * factor, 32 * factor):
        total += (9 * depth + 1) * wide + 4 * (9 * wide + 1) * wide
        depth = wide
    return total + (depth * pool * pool + 1) * width + (width + 1) * actions


@pytest.mark.parametrize(("factor", "pool", "width"), [(1, 6, 256), (2, 6, 256), (1, 8, 32)])
def test_impala_has_its_parameters(factor: int, pool: int, width: int) -> None:
    net = make(ATARI, ImpalaTorso(factor=factor, pool=pool, width=width))
    assert num_parameters(net) == impala_parameters(4, factor, pool, width, 6)


@pytest.mark.parametrize("size", [8, 42, 84, 96])
def test_impala_has_as_many_features_for_any_image_size(size: int) -> None:
    torso = Impala((3, size, size), 1, 6, 16)
    assert torso.features == 32 * 6 * 6
    assert torso(torch.zeros(2, 3, size, size)).shape == (2, 32 * 6 * 6)


def test_an_impala_block_has_a_skip_connection() -> None:
    torso = Impala((1, 16, 16), 1, 2, 16)
    block, maps = torso.layers[2], torch.randn(2, 16, 8, 8)
    with torch.no_grad():
        inner = block.first(maps.clamp(min=0))  # type: ignore[operator]
        expected = maps + block.second(inner.clamp(min=0))  # type: ignore[operator]
        assert torch.allclose(block(maps), expected, atol=1e-6)
        for convolution in (block.first, block.second):
            convolution.weight.zero_()  # type: ignore[union-attr, operator]
            convolution.bias.zero_()  # type: ignore[union-attr, operator]
        assert torch.equal(block(maps), maps)


def test_minatar_grids_of_any_depth() -> None:
    for channels in (4, 6, 7, 10):
        torso = Convolutions((channels, 10, 10), [(16, 3, 1)], 128)
        assert (torso.features, torso.hidden) == (16 * 8 * 8, 128)
        assert torso(torch.zeros(2, channels, 10, 10)).shape == (2, 1024)


@pytest.mark.parametrize("torso", [Impala, partial(Convolutions, stack=NATURE, width=512)])
def test_a_flat_observation_is_refused(torso: Any) -> None:
    with pytest.raises(ValueError, match="images"):
        torso((4,))


@pytest.mark.parametrize(
    "torso", [NatureTorso(width=8), ImpalaTorso(width=8), MinatarTorso(), ConvTorso(width=8)], ids=repr
)
@pytest.mark.parametrize("dueling", [False, True])
def test_every_parameter_of_an_image_network_is_trained(torso: Any, dueling: bool) -> None:
    net = make(Spec((36, 36), "uint8", (3,), stack=4), torso, dueling=dueling)
    pictures = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (6, 4, 36, 36), np.uint8))
    net(pictures).square().sum().backward()
    assert [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()] == []
