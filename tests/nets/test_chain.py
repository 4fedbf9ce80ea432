"""Chains: the numbers of autograd bit by bit, for every network that is one, and for no other."""

import msgspec
import pytest
import torch
from torch import nn

from qfleet.data import Spec
from qfleet.nets import Chain, QNet, chain_of, gradients_of, keep_freed_memory, make_net
from qfleet.nets.chain import WIDE_ROWS, Linear
from qfleet.nets.torso import pixels_together
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
PICTURES: dict[str, tuple[MinatarTorso | NatureTorso | ConvTorso, Spec, str]] = {
    "minatar": (MinatarTorso(), Spec((4, 10, 10), "uint8", (3,)), "off"),
    "one channel": (MinatarTorso(), Spec((1, 10, 10), "uint8", (3,)), "off"),
    "nature": (NatureTorso(width=32), Spec((84, 84), "uint8", (3,), stack=4), "off"),
    "conv": (
        ConvTorso(channels=(8, 8), kernels=(4, 3), strides=(2, 1), width=16),
        Spec((3, 20, 20), "float32", (3,)),
        "obs",
    ),
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
    found = chain_of(net)
    assert found is not None
    return found


def unlike(net: QNet) -> None:
    """Give every parameter numbers of its own: scales and shifts begin as ones and zeros."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("normalize", ["off", "obs"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_and_gradients_are_autograds_own(sizes: tuple[int, ...], normalize: str, layer_norm: bool) -> None:
    net = network(Net(torso=MlpTorso(sizes=sizes), layer_norm=layer_norm), normalize=normalize)
    unlike(net)
    if net.normalize is not None:
        net.normalize.observe(torch.randn(20, 4) * 3 + 1)
    obs, weight = torch.randn(32, 4), torch.randn(32, 3)
    seen, short = net(obs), chain(net)
    assert torch.equal(short(obs), seen)
    expected = torch.autograd.grad((seen**2 * weight).mean(), list(net.parameters()), retain_graph=True)
    (slope,) = torch.autograd.grad((seen**2 * weight).mean(), [seen])
    found = short.gradients(slope)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(one.stride() == other.stride() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("num", [1, 32])
@pytest.mark.parametrize(("torso", "spec", "normalize"), PICTURES.values(), ids=PICTURES.keys())
def test_convolutions_are_autograds_own_too(
    torso: MinatarTorso | NatureTorso | ConvTorso, spec: Spec, normalize: str, num: int, layer_norm: bool
) -> None:
    net = make_net(Net(torso=torso, layer_norm=layer_norm), spec, normalize=normalize, seed=1)
    unlike(net)
    obs = torch.randint(0, 255, (num, *spec.input_shape)).to(getattr(torch, spec.dtype))
    seen, short = net(obs), chain(net)
    assert torch.equal(short(obs), seen)
    slope = torch.randn(num, 3)
    expected = torch.autograd.grad((seen * slope).sum(), list(net.parameters()))
    found = short.gradients(slope)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(one.stride() == other.stride() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("num", [WIDE_ROWS - 1, WIDE_ROWS])
def test_a_wide_layer_gives_autograds_numbers_either_way_round(num: int, layer_norm: bool) -> None:
    net = network(Net(torso=MlpTorso(sizes=(1024, 1024)), layer_norm=layer_norm))
    unlike(net)
    obs, slope = torch.randn(num, 4), torch.randn(num, 3)
    seen, short = net(obs), chain(net)
    wide = [layer.is_wide(obs) for layer, _ in short.links if isinstance(layer, Linear)]
    assert wide == [False, num == WIDE_ROWS, False]
    torch.testing.assert_close(short(obs), seen, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad((seen * slope).sum(), list(net.parameters()))
    found = short.gradients(slope)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
        assert one.stride() == other.stride()


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("laid", [torch.contiguous_format, torch.channels_last])
def test_pixels_come_together_however_pictures_lie(channels: int, laid: torch.memory_format) -> None:
    pictures = torch.randint(0, 256, (5, channels, 7, 6), dtype=torch.uint8).contiguous(memory_format=laid)
    for given in (pictures, pictures[::2], pictures[:, :, 1:]):
        found = pixels_together(given)
        assert torch.equal(found, given)
        assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("more", ["spectral_norm", "dueling"])
def test_convolutions_with_something_between_them_are_left_to_autograd(more: str) -> None:
    net = msgspec.structs.replace(Net(torso=MinatarTorso()), **{more: True})
    assert chain_of(make_net(net, PICTURES["minatar"][1], normalize="off", seed=1)) is None


def test_residual_blocks_are_left_to_autograd() -> None:
    net = Net(torso=ImpalaTorso())
    assert chain_of(make_net(net, PICTURES["nature"][1], normalize="off", seed=1)) is None


def test_a_look_without_gradients_does_not_disturb_those_to_come() -> None:
    net = network(Net(torso=MlpTorso(sizes=(16, 8))))
    short, obs = chain(net), torch.randn(8, 4)
    short(obs)
    with torch.no_grad():
        short(torch.randn(8, 4))
    slope = torch.randn(8, 3)
    expected = torch.autograd.grad((net(obs) * slope).sum(), list(net.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(short.gradients(slope), expected, strict=True))
    with pytest.raises(ValueError, match="no pass"):
        short.gradients(slope)


def test_weights_written_in_place_are_seen_at_once() -> None:
    net = network(Net(torso=MlpTorso(sizes=(16, 8))))
    short, obs = chain(net), torch.randn(8, 4)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
        assert torch.equal(short(obs), net(obs))


@pytest.mark.parametrize("net", NOT_CHAINS.values(), ids=NOT_CHAINS.keys())
def test_other_networks_are_left_to_autograd(net: Net) -> None:
    assert chain_of(network(net)) is None


def test_a_torso_of_ones_own_is_no_chain() -> None:
    assert chain_of(network(Net(), torso=nn.Sequential(nn.Linear(4, 8), nn.ReLU()))) is None


def test_a_network_that_is_frozen_in_part_is_no_chain() -> None:
    net = network(Net(torso=MlpTorso(sizes=(16, 8))))
    next(net.parameters()).requires_grad_(False)
    assert chain_of(net) is None
    net.requires_grad_(False)
    assert chain_of(net) is not None  # a target network: only looked at


def test_what_a_loss_does_not_depend_on_has_a_gradient_of_zero() -> None:
    used, unused = (nn.Parameter(torch.randn(3)) for _ in range(2))
    found = gradients_of(used.square().sum(), [used, unused])
    assert torch.equal(found[0], 2 * used.detach())
    assert found[1].tolist() == [0.0] * 3


def test_a_choice_of_the_users_about_memory_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert keep_freed_memory.__wrapped__() is False
