"""Chains: outputs and gradients equal autograd's bit for bit; other networks are left to autograd."""

from typing import Any

import pytest
import torch
from torch import nn

from qfleet.data import Spec
from qfleet.nets import Chain, QNet, gradients_of, keep_freed_memory, make_chain, make_net
from qfleet.nets.chain_layers import WIDE_ROWS, Linear
from qfleet.nets.torso import bytes_channels_last
from qfleet.plan.schema import (
    ConvTorso,
    GruMemory,
    ImpalaTorso,
    ImplicitHead,
    MinatarTorso,
    MlpTorso,
    NatureTorso,
    Net,
    QuantileHead,
)

SPEC = Spec((4,), "float32", (3,))
SIZES = [(), (16,), (16, 8), (120, 84), (8, 8, 8)]
CONV = ConvTorso(channels=(8, 8), kernels=(4, 3), strides=(2, 1), width=16)
IMAGES: dict[str, tuple[MinatarTorso | NatureTorso | ConvTorso, Spec, str]] = {
    "minatar": (MinatarTorso(), Spec((4, 10, 10), "uint8", (3,)), "off"),
    "one channel": (MinatarTorso(), Spec((1, 10, 10), "uint8", (3,)), "off"),
    "nature": (NatureTorso(width=32), Spec((84, 84), "uint8", (3,), stack=4), "off"),
    "conv": (
        ConvTorso(channels=(8, 8), kernels=(4, 3), strides=(2, 1), width=16),
        Spec((3, 20, 20), "float32", (3,)),
        "obs",
    ),
}
TAILS: dict[str, dict[str, Any]] = {
    "duelling": {"dueling": True},
    "noisy": {"noisy": True},
    "quantiles": {"head": QuantileHead(quantiles=7)},
    "implicit": {"head": ImplicitHead()},
}
NOT_CHAINS = {
    "duelling": Net(torso=MlpTorso(), dueling=True),
    "noisy": Net(torso=MlpTorso(), noisy=True),
    "spectral norm": Net(torso=MlpTorso(), spectral_norm=True),
    "dropout": Net(torso=MlpTorso(), dropout=0.5),
    "memory": Net(torso=MlpTorso(), memory=GruMemory()),
    "quantiles": Net(torso=MlpTorso(), head=QuantileHead()),
    "implicit": Net(torso=MlpTorso(), head=ImplicitHead()),
}


def network(net: Net, *, normalize: str = "off", torso: nn.Module | None = None) -> QNet:
    return make_net(net, SPEC, normalize=normalize, seed=1, torso=torso)


def chain(net: QNet) -> Chain:
    found = make_chain(net)
    assert found is not None
    return found


def perturb(net: QNet) -> None:
    """Change every parameter: scales and shifts begin as ones and zeros."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("normalize", ["off", "obs"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_and_gradients_equal_autograds(sizes: tuple[int, ...], normalize: str, layer_norm: bool) -> None:
    net = network(Net(torso=MlpTorso(sizes=sizes), layer_norm=layer_norm), normalize=normalize)
    perturb(net)
    if net.normalize is not None:
        net.normalize.observe(torch.randn(20, 4) * 3 + 1)
    obs, weight = torch.randn(32, 4), torch.randn(32, 3)
    out, fast = net(obs), chain(net)
    assert torch.equal(fast(obs), out)
    expected = torch.autograd.grad((out**2 * weight).mean(), list(net.parameters()), retain_graph=True)
    (grad,) = torch.autograd.grad((out**2 * weight).mean(), [out])
    found = fast.gradients(grad)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(one.stride() == other.stride() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("num", [1, 32])
@pytest.mark.parametrize(("torso", "spec", "normalize"), IMAGES.values(), ids=IMAGES.keys())
def test_convolutions_equal_autograds(
    torso: MinatarTorso | NatureTorso | ConvTorso, spec: Spec, normalize: str, num: int, layer_norm: bool
) -> None:
    net = make_net(Net(torso=torso, layer_norm=layer_norm), spec, normalize=normalize, seed=1)
    perturb(net)
    obs = torch.randint(0, 255, (num, *spec.input_shape)).to(getattr(torch, spec.dtype))
    out, fast = net(obs), chain(net)
    assert torch.equal(fast(obs), out)
    grad = torch.randn(num, 3)
    expected = torch.autograd.grad((out * grad).sum(), list(net.parameters()))
    found = fast.gradients(grad)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(one.stride() == other.stride() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("num", [WIDE_ROWS - 1, WIDE_ROWS])
def test_a_wide_layer_equals_autograds_in_either_order(num: int, layer_norm: bool) -> None:
    net = network(Net(torso=MlpTorso(sizes=(1024, 1024)), layer_norm=layer_norm))
    perturb(net)
    obs, grad = torch.randn(num, 4), torch.randn(num, 3)
    out, fast = net(obs), chain(net)
    wide = [layer.is_wide(obs) for layer, _ in fast.layers if isinstance(layer, Linear)]
    assert wide == [False, num == WIDE_ROWS, False]
    torch.testing.assert_close(fast(obs), out, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad((out * grad).sum(), list(net.parameters()))
    found = fast.gradients(grad)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
        assert one.stride() == other.stride()


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_pixels_come_together_however_images_lie(channels: int, memory_format: torch.memory_format) -> None:
    images = torch.randint(0, 256, (5, channels, 7, 6), dtype=torch.uint8).contiguous(memory_format=memory_format)
    for given in (images, images[::2], images[:, :, 1:]):
        found = bytes_channels_last(given)
        assert torch.equal(found, given)
        assert found.is_contiguous(memory_format=torch.channels_last)


def test_convolutions_with_spectral_norm_are_no_chain() -> None:
    net = Net(torso=MinatarTorso(), spectral_norm=True)
    assert make_chain(make_net(net, IMAGES["minatar"][1], normalize="off", seed=1)) is None


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("torso", ["minatar", "nature"])
def test_a_tail_behind_convolutions_equals_autograd(torso: str, name: str, layer_norm: bool) -> None:
    size, spec, normalize = IMAGES[torso]
    settings = Net(torso=size, layer_norm=layer_norm, **TAILS[name])
    net = make_net(settings, spec, normalize=normalize, seed=1)
    perturb(net)
    fast = chain(net)
    assert fast.tail is net.head
    obs = torch.randint(0, 255, (8, *spec.input_shape)).to(torch.uint8)
    losses = []
    for forward in (net, fast):
        torch.manual_seed(3)  # noise
        losses.append((forward(obs) ** 2).mean())
    assert torch.equal(*losses)
    expected = torch.autograd.grad(losses[0], list(net.parameters()))
    reported: dict[int, torch.Tensor] = {}
    found = fast.loss_gradients(losses[1], reported.__setitem__)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert [reported[at] is one for at, one in enumerate(found)] == [True] * len(found)
    with pytest.raises(ValueError, match="no forward pass"):
        fast.loss_gradients(losses[1])


def test_residual_blocks_are_no_chain() -> None:
    net = Net(torso=ImpalaTorso())
    assert make_chain(make_net(net, IMAGES["nature"][1], normalize="off", seed=1)) is None


def test_a_pass_without_gradients_keeps_the_pending_ones() -> None:
    net = network(Net(torso=MlpTorso(sizes=(16, 8))))
    fast, obs = chain(net), torch.randn(8, 4)
    fast(obs)
    with torch.no_grad():
        fast(torch.randn(8, 4))
    grad = torch.randn(8, 3)
    expected = torch.autograd.grad((net(obs) * grad).sum(), list(net.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(fast.gradients(grad), expected, strict=True))
    with pytest.raises(ValueError, match="no forward pass"):
        fast.gradients(grad)


def test_weights_written_in_place_are_used_at_once() -> None:
    net = network(Net(torso=MlpTorso(sizes=(16, 8))))
    fast, obs = chain(net), torch.randn(8, 4)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
        assert torch.equal(fast(obs), net(obs))


@pytest.mark.parametrize("net", NOT_CHAINS.values(), ids=NOT_CHAINS.keys())
def test_other_networks_are_no_chain(net: Net) -> None:
    assert make_chain(network(net)) is None


def test_a_users_torso_is_no_chain() -> None:
    assert make_chain(network(Net(), torso=nn.Sequential(nn.Linear(4, 8), nn.ReLU()))) is None


def test_a_network_that_is_frozen_in_part_is_no_chain() -> None:
    net = network(Net(torso=MlpTorso(sizes=(16, 8))))
    next(net.parameters()).requires_grad_(False)
    assert make_chain(net) is None
    net.requires_grad_(False)
    assert make_chain(net) is not None  # a target network is never trained


def test_an_unused_parameter_has_a_gradient_of_zero() -> None:
    used, unused = (nn.Parameter(torch.randn(3)) for _ in range(2))
    found = gradients_of(used.square().sum(), [used, unused])
    assert torch.equal(found[0], 2 * used.detach())
    assert found[1].tolist() == [0.0] * 3


def test_the_users_malloc_settings_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert keep_freed_memory.__wrapped__() is False
