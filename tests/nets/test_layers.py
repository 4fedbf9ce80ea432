"""Layers: noise as published, normalisation, spectral norm, dropout, and units that sleep."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qfleet.act import Policy
from qfleet.data import Spec
from qfleet.learn import make_target
from qfleet.nets import QNet, dormant_fraction, make_net, record_activations, set_noise
from qfleet.nets.layers import Dense, Noisy, Style, relu, torso_dense
from qfleet.plan.schema import (
    CategoricalHead,
    Env,
    ImpalaTorso,
    ImplicitHead,
    LstmMemory,
    MinatarTorso,
    MlpTorso,
    NatureTorso,
    Net,
    Plan,
    QuantileHead,
)
from qfleet.qlearn import Scalar, make_head

VECTOR = Spec((4,), "float32", (3,))
IMAGE = Spec((36, 36), "uint8", (3,), stack=2)


def plan_of(net: Net) -> Plan:
    return Plan(env=Env(id="none"), net=net)


def fresh(net: Net, spec: Spec = VECTOR, seed: int = 1) -> QNet:
    return make_net(net, spec, normalize="off", seed=seed)


def look(spec: Spec = VECTOR, num: int = 5) -> Tensor:
    rng = np.random.default_rng(0)
    shape = (num, *spec.input_shape)
    values = rng.integers(0, 256, shape) if spec.dtype == "uint8" else rng.normal(size=shape)
    return torch.from_numpy(values.astype(spec.dtype))


def generator_state() -> Tensor:
    return torch.random.get_rng_state()


class TestNoisy:
    def test_the_factorised_formula(self) -> None:
        layer, inputs = Noisy(4, 3).requires_grad_(False), torch.randn(5, 4)
        torch.manual_seed(7)
        draws = [float(number) for number in torch.randn(4 + 3)]
        shaped = [math.copysign(math.sqrt(abs(number)), number) for number in draws]
        inward, outward = shaped[:4], shaped[4:]
        torch.manual_seed(7)
        found = layer(inputs)
        for item in range(5):
            for unit in range(3):
                total = float(layer.bias[unit]) + float(layer.bias_sigma[unit]) * outward[unit]
                for place in range(4):
                    noise = float(layer.weight_sigma[unit, place]) * outward[unit] * inward[place]
                    total += (float(layer.weight[unit, place]) + noise) * float(inputs[item, place])
                assert found[item, unit].item() == pytest.approx(total, abs=1e-5)

    @pytest.mark.parametrize(("width", "sigma"), [(4, 0.5), (100, 0.1)])
    def test_initial_weights_are_as_published(self, width: int, sigma: float) -> None:
        layer, bound = Noisy(width, 50, sigma), 1 / math.sqrt(width)
        for mean in (layer.weight, layer.bias):
            assert mean.abs().max() <= bound
            assert mean.abs().max() > 0.8 * bound
        for spread in (layer.weight_sigma, layer.bias_sigma):
            assert spread.detach().numpy() == pytest.approx(sigma * bound)

    def test_one_draw_per_call_shared_by_the_batch(self) -> None:
        layer, same = Noisy(4, 3), torch.ones(6, 4)
        first, second = layer(same), layer(same)
        assert torch.equal(first, first[:1].expand(6, -1))
        assert not torch.allclose(first, second)

    def test_without_noise_it_is_a_linear_layer_and_draws_nothing(self) -> None:
        layer, inputs = Noisy(4, 3), torch.randn(5, 4)
        layer.active = False
        before = generator_state()
        assert torch.equal(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))
        assert torch.equal(generator_state(), before)

    def test_the_mean_over_draws_is_the_mean_layer(self) -> None:
        torch.manual_seed(0)
        layer, inputs = Noisy(4, 3), torch.randn(2, 4)
        with torch.no_grad():
            mean = torch.stack([layer(inputs) for _ in range(4_000)]).mean(0)
            layer.active = False
            assert mean.numpy() == pytest.approx(layer(inputs).numpy(), abs=0.04)

    def test_sigmas_are_learned(self) -> None:
        layer = Noisy(4, 3)
        layer(torch.randn(5, 4)).square().sum().backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())

    @pytest.mark.parametrize("dueling", [False, True])
    def test_every_layer_of_a_noisy_head_is_noisy_and_none_of_its_torso(self, dueling: bool) -> None:
        net = fresh(Net(torso=MlpTorso(sizes=(8, 8)), noisy=True, noisy_sigma=0.25, dueling=dueling))
        noisy = [name for name, layer in net.named_modules() if isinstance(layer, Noisy)]
        assert len(noisy) == (4 if dueling else 2)
        assert all(name.startswith("head.") for name in noisy)
        linear = [name for name, layer in net.named_modules() if isinstance(layer, nn.Linear)]
        assert linear == ["torso.layers.0.linear"]
        spreads = [p.detach() for name, p in net.named_parameters() if name.endswith("sigma")]
        assert all(torch.unique(p).numel() == 1 for p in spreads)
        assert sorted({round(float(p.flatten()[0]), 6) for p in spreads}) == [round(0.25 / math.sqrt(8), 6)]

    def test_set_noise_switches_all_of_them(self) -> None:
        net, obs = fresh(Net(torso=MlpTorso(sizes=(8,)), noisy=True, dueling=True)), look()
        set_noise(net, active=False)
        assert torch.equal(net(obs), net(obs))
        set_noise(net, active=True)
        assert not torch.equal(net(obs), net(obs))

    def test_exploration_is_noisy_and_evaluation_is_not(self) -> None:
        net, obs = fresh(Net(torso=MlpTorso(sizes=(8,)), noisy=True, noisy_sigma=5.0)), look().numpy()
        policy, rng = Policy(net, Scalar(), (3,)), np.random.default_rng(0)
        explored = {policy.act(obs, epsilon=0.0, rng=rng)[0].tobytes() for _ in range(30)}
        assert len(explored) > 1
        before = generator_state()
        evaluated = {policy.act(obs)[0].tobytes() for _ in range(30)}
        assert len(evaluated) == 1
        assert torch.equal(generator_state(), before)
        assert not np.array_equal(policy.act(obs, rng=rng)[2], policy.act(obs)[2])  # and back again


def test_even_fractions_draw_no_random_numbers() -> None:
    net, obs = fresh(Net(torso=MlpTorso(sizes=(8,)), head=ImplicitHead(fractions=8))), look()
    before = generator_state()
    out = net(obs)
    assert not torch.equal(generator_state(), before)
    assert not torch.equal(out[0, -1], out[1, -1])  # every item has fractions of its own
    net.head.even = True  # type: ignore[assignment]
    before = generator_state()
    out = net(obs)
    assert torch.equal(generator_state(), before)
    assert out.shape == (5, 3 + 1, 8)
    assert out[:, -1].tolist() == [pytest.approx([(place + 0.5) / 8 for place in range(8)])] * 5


def test_an_implicit_head_embeds_fractions_by_cosines() -> None:
    net, obs = fresh(Net(torso=MlpTorso(sizes=(6, 5)), head=ImplicitHead(fractions=3, cosines=7))), look(num=2)
    with torch.no_grad():
        out, features = net(obs), net.features(obs)
        for item in range(2):
            for place in range(3):
                fraction = float(out[item, -1, place])
                waves = torch.tensor([math.cos(math.pi * wave * fraction) for wave in range(7)])
                mixed = features[item] * net.head.embed(waves).clamp(min=0)  # type: ignore[operator]
                expected = net.head.inner(mixed.unsqueeze(0))[0]  # type: ignore[operator]
                assert out[item, :-1, place].numpy() == pytest.approx(expected.numpy(), abs=1e-5)


class TestLayerNorm:
    def test_it_normalises_the_units_of_each_item_before_the_relu(self) -> None:
        layer = torso_dense(4, 6, Style(layer_norm=True))
        inputs = torch.randn(3, 4)
        with torch.no_grad():
            raw, found = layer.linear(inputs).numpy(), layer(inputs).numpy()
        for item in range(3):
            mean, var = raw[item].mean(), raw[item].var()
            assert found[item] == pytest.approx(np.maximum(0, (raw[item] - mean) / math.sqrt(var + 1e-5)), abs=1e-5)

    @pytest.mark.parametrize(
        ("torso", "spec", "dense", "maps"),
        [
            (MlpTorso(sizes=(8, 8, 8)), VECTOR, 3, 0),
            (NatureTorso(width=8), IMAGE, 1, 3),
            (MinatarTorso(), IMAGE, 1, 1),
            (ImpalaTorso(width=8), IMAGE, 1, 12),
        ],
        ids=["mlp", "nature", "minatar", "impala"],
    )
    def test_it_follows_every_hidden_layer(self, torso: object, spec: Spec, dense: int, maps: int) -> None:
        for on in (True, False):
            net = fresh(Net(torso=torso, layer_norm=on), spec)  # type: ignore[arg-type]
            assert sum(isinstance(layer, nn.LayerNorm) for layer in net.modules()) == dense * on
            assert sum(isinstance(layer, nn.GroupNorm) for layer in net.modules()) == maps * on
            assert net(look(spec)).shape == (5, 3)

    def test_statistics_of_maps_span_channels_and_pixels(self) -> None:
        net = fresh(Net(torso=MinatarTorso(channels=4), layer_norm=True), IMAGE)
        convolution, norm, _ = net.torso.layers  # type: ignore[misc]
        with torch.no_grad():
            raw = convolution(look(IMAGE).float() / 255)
            flat = norm(raw).flatten(1)
        assert flat.mean(1).numpy() == pytest.approx(0, abs=1e-5)
        assert flat.var(1, unbiased=False).numpy() == pytest.approx(1, abs=1e-2)


def largest_singular_values(net: nn.Module) -> list[float]:
    """Of every layer that is spectrally normalised, as it stands."""
    layers = [layer for layer in net.modules() if hasattr(layer, "parametrizations")]
    return [float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2)) for layer in layers]  # type: ignore[operator]


class TestSpectralNorm:
    @pytest.mark.parametrize(
        ("torso", "spec", "layers"),
        [
            (MlpTorso(sizes=(8, 8, 8)), VECTOR, 2),
            (NatureTorso(width=8), IMAGE, 3),
            (MinatarTorso(), IMAGE, 1),
            (ImpalaTorso(width=8), IMAGE, 12),
        ],
        ids=["mlp", "nature", "minatar", "impala"],
    )
    def test_the_largest_singular_value_becomes_one(self, torso: object, spec: Spec, layers: int) -> None:
        net = fresh(Net(torso=torso, spectral_norm=True), spec).train()  # type: ignore[arg-type]
        with torch.no_grad():
            for _ in range(60):
                net(look(spec, 1))
        found = largest_singular_values(net.eval())
        assert len(found) == layers
        assert found == pytest.approx([1.0] * layers, abs=0.02)

    def test_the_target_networks_singular_value_becomes_one(self) -> None:
        plan = plan_of(Net(torso=MlpTorso(sizes=(8, 8)), spectral_norm=True))
        target = make_target(plan, fresh(plan.net))
        with torch.no_grad():
            for parameter in target.torso.parameters():
                parameter.mul_(9.0).add_(torch.randn(parameter.shape))  # as if it had followed far
            for _ in range(60):
                target(look())
        assert largest_singular_values(target) == pytest.approx([1.0], abs=0.02)

    def test_a_forward_pass_in_eval_mode_changes_nothing(self) -> None:
        net = fresh(Net(torso=MlpTorso(sizes=(8, 8)), spectral_norm=True)).eval()
        before = {name: value.clone() for name, value in net.state_dict().items()}
        net(look())
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


class TestDropout:
    def test_dropout_is_active_and_scaled_only_in_training(self) -> None:
        torch.manual_seed(1)
        layer = Dense(nn.Linear(4, 1_000), 1_000, Style(dropout=0.25))
        inputs = torch.randn(1, 4)
        whole = layer.eval()(inputs)
        assert torch.equal(layer(inputs), whole)
        dropped = layer.train()(inputs)
        alive = whole > 0
        zeroed = (dropped == 0) & alive
        assert (zeroed.sum() / alive.sum()).item() == pytest.approx(0.25, abs=0.06)
        assert dropped[alive & ~zeroed].detach().numpy() == pytest.approx(
            (whole[alive & ~zeroed] / 0.75).detach().numpy()
        )

    @pytest.mark.parametrize(
        "torso", [MlpTorso(sizes=(16, 16)), NatureTorso(width=16), MinatarTorso(), ImpalaTorso(width=16)], ids=repr
    )
    def test_dropout_is_in_every_torso_but_not_in_target_or_policy(self, torso: object) -> None:
        spec = VECTOR if isinstance(torso, MlpTorso) else IMAGE
        plan = plan_of(Net(torso=torso, dropout=0.5))  # type: ignore[arg-type]
        net, obs = fresh(plan.net, spec).train(), look(spec)
        assert not torch.equal(net(obs), net(obs))
        target = make_target(plan, net)
        assert torch.equal(target(obs), target(obs))
        net.eval()
        assert torch.equal(net(obs), net(obs))


class TestDormant:
    def test_by_hand(self) -> None:
        # Means 0, 10, 0.3, 29.7: the layer's is 10, so 0 sleeps at the limit 0.025 and 0.3 does not.
        layer = torch.tensor([[0.0, 20.0, 0.6, 59.4], [0.0, 0.0, 0.0, 0.0]])
        assert dormant_fraction([layer]) == 1 / 4
        assert dormant_fraction([layer], threshold=0.0301) == 2 / 4
        assert dormant_fraction([layer, torch.zeros(2, 4)]) == 5 / 8  # a layer that is all silent sleeps whole
        assert dormant_fraction([]) == 0.0

    def test_a_channel_is_one_unit(self) -> None:
        maps = torch.zeros(2, 3, 4, 4)
        maps[0, 0, 1, 1] = 1.0
        maps[:, 1] = 1.0
        assert dormant_fraction([maps]) == 1 / 3  # 1/32 of (33/32)/3 is awake, barely
        assert dormant_fraction([maps], threshold=0.1) == 2 / 3

    @pytest.mark.parametrize(
        ("net", "spec", "layers"),
        [
            (Net(torso=MlpTorso(sizes=(8, 7, 6))), VECTOR, [(8,), (7,), (6,)]),
            (Net(torso=MlpTorso(sizes=(8, 7)), dueling=True), VECTOR, [(8,), (7,), (7,)]),
            (Net(torso=NatureTorso(width=9)), IMAGE, [(32, 8, 8), (64, 3, 3), (64, 1, 1), (9,)]),
        ],
        ids=["mlp", "dueling", "nature"],
    )
    def test_every_relu_is_recorded_inside_the_block_only(
        self, net: Net, spec: Spec, layers: list[tuple[int, ...]]
    ) -> None:
        made = fresh(net, spec)
        with record_activations() as seen:
            made(look(spec))
        assert [tuple(each.shape[1:]) for each in seen] == layers
        assert not any(each.requires_grad for each in seen)
        made(look(spec))
        relu(torch.zeros(1))
        assert len(seen) == len(layers)


@pytest.mark.parametrize("head", [CategoricalHead(atoms=5), QuantileHead(quantiles=6), ImplicitHead(fractions=7)])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("memory", [False, True])
def test_heads_of_distributions_have_their_shapes(head: object, dueling: bool, memory: bool) -> None:
    settings = {"torso": MlpTorso(sizes=(8, 8)), "head": head, "dueling": dueling, "noisy": True, "layer_norm": True}
    plan = plan_of(Net(**settings, **({"memory": LstmMemory(size=4)} if memory else {})))  # type: ignore[arg-type]
    net, obs = fresh(plan.net), look()
    out = net.step(obs, net.memory.initial_state(5))[0] if net.memory is not None else net(obs)
    numbers = {"CategoricalHead": (3, 5), "QuantileHead": (3, 6), "ImplicitHead": (4, 7)}
    assert out.shape == (5, *numbers[type(head).__name__])
    assert make_head(plan, VECTOR).values(out).shape == (5, 3)


def test_duelling_distributions_centre_each_atom_over_the_actions() -> None:
    net = fresh(Net(torso=MlpTorso(sizes=(8, 8)), head=CategoricalHead(atoms=5), dueling=True))
    with torch.no_grad():
        out, features = net(look()), net.features(look())
        value = net.head.value(features)  # type: ignore[operator]
    assert out.mean(1).numpy() == pytest.approx(value.numpy(), abs=1e-6)


@pytest.mark.parametrize("dueling", [False, True])
def test_a_decoupled_head_has_a_row_per_dimension(dueling: bool) -> None:
    net = fresh(Net(torso=MlpTorso(sizes=(8, 8)), dueling=dueling, decoupled=True), Spec((4,), "float32", (2, 4, 3)))
    with torch.no_grad():
        out, features = net(look()), net.features(look())
    assert out.shape == (5, 3, 4)
    if dueling:
        value = net.head.value(features).detach()  # type: ignore[operator]
        for dimension, count in enumerate((2, 4, 3)):  # outputs past a dimension's own count mean nothing
            assert out[:, dimension, :count].mean(1).numpy() == pytest.approx(value[:, 0].numpy(), abs=1e-6)


def test_a_duelling_decoupled_head_ignores_actions_past_a_count() -> None:
    spec, taken = Spec((4,), "float32", (2, 4, 3)), torch.tensor([1, 3, 2])
    net = fresh(Net(torso=MlpTorso(sizes=(8, 8)), dueling=True, decoupled=True), spec)
    net(look())[:, torch.arange(3), taken].sum().backward()
    grad = net.head.advantage.out.bias.grad.view(3, 4)  # type: ignore[union-attr, operator]
    real = torch.arange(4) < torch.tensor(spec.actions).unsqueeze(1)
    assert not grad[~real].any()
    assert grad[real].all()
