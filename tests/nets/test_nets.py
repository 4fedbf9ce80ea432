"""Networks: sizes, shapes, seeds, duelling, a torso of one's own, and normalisation that travels."""

import importlib
import importlib.util
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from qfleet.data import Spec
from qfleet.errors import UsageError
from qfleet.nets import NATURE, Normalize, QNet, draws_random_numbers, make_net
from qfleet.nets.heads import DuelingHead
from qfleet.nets.torso import Convolutions, Mlp
from qfleet.plan.schema import ImplicitHead, MlpTorso, NatureTorso, Net, OwnTorso

VECTOR = Spec((4,), "float32", (3,))
IMAGE = Spec((84, 84), "uint8", (6,), stack=4)


def make(spec: Spec, *, dueling: bool = False, seed: int = 1, normalize: str = "off", width: int = 512) -> QNet:
    torso = NatureTorso(width=width) if spec.stack > 1 else MlpTorso(sizes=(16, 8))
    return make_net(Net(torso=torso, dueling=dueling), spec, normalize=normalize, seed=seed)


def num_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def test_the_nature_network_has_its_1_687_million_parameters() -> None:
    convolutions = (8 * 8 * 4 + 1) * 32 + (4 * 4 * 32 + 1) * 64 + (3 * 3 * 64 + 1) * 64
    assert num_parameters(make(IMAGE)) == convolutions + (7 * 7 * 64 + 1) * 512 + (512 + 1) * 6 == 1_687_206


def test_draws_random_numbers_of_each_plan() -> None:
    torso = MlpTorso(sizes=(16,))
    drawing = (Net(noisy=True), Net(dropout=0.1), Net(torso=torso, head=ImplicitHead()), Net(torso=OwnTorso()))
    assert all(map(draws_random_numbers, drawing))
    assert not draws_random_numbers(Net(torso=torso, dueling=True))


def test_the_nature_network_on_small_images() -> None:
    assert num_parameters(make(Spec((42, 42), "uint8", (6,), stack=4))) == 114_342


def test_duelling_has_a_hidden_layer_per_stream() -> None:
    convolutions = num_parameters(Convolutions(IMAGE.input_shape, NATURE, 512))
    hidden = (7 * 7 * 64 + 1) * 512
    assert num_parameters(make(IMAGE, dueling=True)) == convolutions + 2 * hidden + 513 * 6 + 513


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("spec", [VECTOR, IMAGE, Spec((2, 3), "float32", (2, 4))], ids=["vector", "picture", "2-d"])
def test_one_value_per_action(spec: Spec, dueling: bool) -> None:
    net = make(spec, dueling=dueling, width=32)
    obs = torch.from_numpy(np.ones((5, *spec.input_shape), spec.dtype))
    out = net(obs)
    assert out.shape == (5, spec.num_actions)
    assert out.dtype == torch.float32


@pytest.mark.parametrize("sizes", [(), (7,), (7, 5), (7, 5, 3)])
def test_mlp_sizes_are_the_hidden_layers(sizes: tuple[int, ...]) -> None:
    net = make_net(Net(torso=MlpTorso(sizes=sizes)), VECTOR, normalize="off", seed=1)
    widths = [module.out_features for module in net.modules() if isinstance(module, nn.Linear)]
    assert widths == [*sizes, 3]


def test_bytes_are_divided_by_255() -> None:
    net = QNet(nn.Flatten(), nn.Identity())
    assert net(torch.tensor([[0, 51, 255]], dtype=torch.uint8)).tolist() == [[0.0, pytest.approx(0.2), 1.0]]


@pytest.mark.parametrize("spec", [VECTOR, IMAGE], ids=["vector", "picture"])
def test_the_seed_decides_the_weights_and_the_global_generator_is_untouched(spec: Spec) -> None:
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    first = make(spec, seed=7, width=16).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(10)
    again, other = make(spec, seed=7, width=16).state_dict(), make(spec, seed=8, width=16).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_a_flat_observation_is_refused_by_the_nature_torso() -> None:
    with pytest.raises(ValueError, match="images"):
        Convolutions((4,), NATURE, 512)


class TestDueling:
    def test_value_plus_advantage_less_its_mean(self) -> None:
        head = DuelingHead(2, 0, (3,))
        features = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
        with torch.no_grad():
            value, advantage = head.value(features).numpy(), head.advantage(features).numpy()
            out = head(features).numpy()
        assert out == pytest.approx(value + advantage - advantage.mean(1, keepdims=True))
        assert out.mean(1) == pytest.approx(value[:, 0], abs=1e-6)

    def test_the_gradient_into_the_trunk_is_scaled_by_one_over_root_two(self) -> None:
        head = DuelingHead(4, 8, (3,))
        plain = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        advantage = head.advantage(plain)
        unscaled = head.value(plain) + advantage - advantage.mean(1, keepdim=True)
        unscaled.square().sum().backward()
        expected = {name: parameter.grad for name, parameter in head.named_parameters()}
        head.zero_grad()
        features = plain.detach().clone().requires_grad_()
        head(features).square().sum().backward()
        assert plain.grad is not None
        assert torch.allclose(features.grad, plain.grad / math.sqrt(2))  # type: ignore[arg-type]
        for name, parameter in head.named_parameters():  # the streams' own gradients are not
            assert torch.allclose(parameter.grad, expected[name]), name  # type: ignore[arg-type]


class OwnNet(nn.Module):
    """A torso as a user would write it: nothing of ours but tensors in, features out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 11)

    def forward(self, obs: Tensor) -> Tensor:
        return torch.tanh(self.layer(obs))


@pytest.mark.parametrize("dueling", [False, True])
def test_a_users_torso_only_returns_features(dueling: bool) -> None:
    torso = OwnNet()
    net = make_net(Net(torso=OwnTorso(), dueling=dueling), VECTOR, normalize="off", seed=1, torso=torso)
    obs = torch.randn(6, 4)
    assert net(obs).shape == (6, 3)
    net(obs).sum().backward()
    assert torso.layer.weight.grad is not None
    assert torso.layer.weight.grad.abs().sum() > 0


def test_a_torso_that_does_not_return_features_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\(1, 2, 2\)"):
        make_net(Net(), VECTOR, normalize="off", seed=1, torso=nn.Unflatten(1, (2, 2)))


@pytest.mark.parametrize("torso", [OwnNet, lambda obs: obs], ids=["class", "function"])
def test_a_torso_that_is_no_module_is_refused(torso: Any) -> None:
    with pytest.raises(UsageError, match=r"not a torch\.nn\.Module") as caught:
        make_net(Net(), VECTOR, normalize="off", seed=1, torso=torso)
    assert "torso=MyTorso()" in caught.value.fix


def test_a_missing_users_torso_is_refused() -> None:
    with pytest.raises(UsageError, match=r"net\.torso\.type"):
        make_net(Net(torso=OwnTorso()), VECTOR, normalize="off", seed=1)


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed")
def test_a_keras_model_on_its_torch_backend_is_a_torso(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = importlib.import_module("keras")
    if keras.config.backend() != "torch":
        pytest.skip("keras was imported before with another backend")
    torso = keras.Sequential([keras.Input((4,)), keras.layers.Dense(11, activation="relu")])
    net = make_net(Net(torso=OwnTorso()), VECTOR, normalize="off", seed=1, torso=torso)
    net(torch.randn(6, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


class TestNormalize:
    @settings(max_examples=50)
    @given(st.lists(st.integers(0, 20), min_size=1, max_size=10), st.integers(0, 999), st.floats(-1e4, 1e4))
    def test_statistics_equal_numpys_over_the_whole_stream(self, sizes: list[int], seed: int, shift: float) -> None:
        rng = np.random.default_rng(seed)
        chunks = [(rng.normal(shift, 3.0, (size, 4))).astype(np.float32) for size in sizes]
        normalize = Normalize((4,))
        for chunk in chunks:
            normalize.observe(torch.from_numpy(chunk))
        everything = np.concatenate(chunks).astype(np.float64)
        assert normalize.count.item() == len(everything)
        if len(everything):
            assert normalize.mean.numpy() == pytest.approx(everything.mean(0), rel=1e-9, abs=1e-9)
            assert normalize.var.numpy() == pytest.approx(everything.var(0), rel=1e-6, abs=1e-9)

    def test_standardises_and_clips(self) -> None:
        normalize = Normalize((1,))
        normalize.observe(torch.tensor([[1.0], [3.0]]))  # mean 2, standard deviation 1
        out = normalize(torch.tensor([[2.0], [3.5], [1e6], [-1e6]]))
        assert out.flatten().tolist() == pytest.approx([0.0, 1.5, 10.0, -10.0])
        assert out.dtype == torch.float32
        assert normalize.scale() == pytest.approx(1.0)

    def test_statistics_are_in_the_state_dict(self) -> None:
        net = make(VECTOR, normalize="both")
        assert net.normalize is not None
        assert net.rewards is not None
        net.normalize.observe(torch.randn(50, 4) * 7 + 3)
        net.rewards.observe(torch.randn(50) * 5)
        other = make(VECTOR, normalize="both", seed=2)
        obs = torch.randn(6, 4)
        assert not torch.equal(net(obs), other(obs))
        other.load_state_dict(net.state_dict())
        assert torch.equal(net(obs), other(obs))
        assert other.rewards is not None
        assert other.rewards.scale() == net.rewards.scale() != 1.0

    def test_normalisation_exists_only_if_the_plan_has_it(self) -> None:
        assert [make(VECTOR, normalize=kind).normalize is not None for kind in ("off", "obs", "reward", "both")] == [
            False, True, False, True,
        ]  # fmt: skip
        assert [make(VECTOR, normalize=kind).rewards is not None for kind in ("off", "obs", "reward", "both")] == [
            False, False, True, True,
        ]  # fmt: skip


def test_mlp_flattens() -> None:
    assert Mlp((2, 3), (5, 4))(torch.zeros(7, 2, 3)).shape == (7, 5)
