"""Compiled updates: equal to eager ones up to rounding, all or nothing, exact resume, refused where impossible."""

import warnings
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from qfleet.data import Spec
from qfleet.learn import Learner, NonFiniteUpdate, make_learner
from qfleet.learn.compiled_update import UpdateFunction, small_convolutions, why_not_compilable
from qfleet.nets import make_net
from qfleet.plan.schema import (
    Adam,
    Algo,
    AverageTarget,
    CategoricalHead,
    CopyTarget,
    DoubleRule,
    Env,
    FreshReplay,
    GrowingBatch,
    GruMemory,
    ImplicitHead,
    InlineRuntime,
    MaxRule,
    MinatarTorso,
    MlpTorso,
    MunchausenRule,
    NatureTorso,
    Net,
    OwnTorso,
    Plan,
    Population,
    QuantileHead,
    Rmsprop,
    SequencesView,
    Steer,
)
from tests.learn.parts import IMAGE, VECTOR, batch, same

GRID = Spec((4, 10, 10), "uint8", (6,))
SMALL = Net(torso=MlpTorso(sizes=(16, 16)))
CAN = {
    "max, copied target": {"algo": Algo(rule=MaxRule(), target=CopyTarget(every_updates=3))},
    "double, averaged target": {"algo": Algo(rule=DoubleRule(), target=AverageTarget(tau=0.1))},
    "munchausen": {"algo": Algo(rule=MunchausenRule())},
    "duelling": {"net": Net(torso=MlpTorso(sizes=(16, 16)), dueling=True)},
    "layer norm": {"net": Net(torso=MlpTorso(sizes=(16, 16)), layer_norm=True)},
    "categorical": {"net": Net(torso=MlpTorso(sizes=(16, 16)), head=CategoricalHead(atoms=11))},
    "quantiles": {"net": Net(torso=MlpTorso(sizes=(16, 16)), head=QuantileHead(quantiles=5))},
    "weight decay": {"optim": Adam(weight_decay=0.1)},
    "clipped": {"optim": Adam(clip_norm=0.01)},
    "never clipped": {"optim": Adam(clip_norm=None)},
}
CANNOT = {
    "own torso": {"net": Net(torso=OwnTorso())},
    "memory": {"net": Net(torso=MlpTorso(), memory=GruMemory())},
    "sequences": {"algo": Algo(view=SequencesView())},
    "noisy": {"net": Net(torso=MlpTorso(), noisy=True)},
    "dropout": {"net": Net(torso=MlpTorso(), dropout=0.1)},
    "implicit": {"net": Net(torso=MlpTorso(), head=ImplicitHead())},
    "spectral norm": {"net": Net(torso=MlpTorso(), spectral_norm=True)},
    "decoupled": {"net": Net(torso=MlpTorso(), decoupled=True)},
    "rmsprop": {"optim": Rmsprop()},
    "fresh": {"replay": FreshReplay()},
    "growing batch": {"steer": Steer(batch=GrowingBatch())},
    "population": {"population": Population(num=2)},
    "half precision": {"runtime": InlineRuntime(precision="bfloat16")},
}


def plan_of(**parts: Any) -> Plan:
    return Plan(env=Env(id="none"), **{"net": SMALL, "runtime": InlineRuntime(compile=True), **parts})


def learner_of(plan: Plan, spec: Spec = VECTOR, *, compiled: bool, seed: int = 1, normalize: str = "off") -> Learner:
    runtime = msgspec.structs.replace(plan.runtime, compile=compiled)
    net = make_net(plan.net, spec, normalize=normalize, seed=seed)
    return make_learner(msgspec.structs.replace(plan, runtime=runtime), spec, net, torch.device("cpu"))


def not_compiled(function: UpdateFunction, inputs: Any, num_changing: int) -> UpdateFunction:
    """A compiler that returns the function as it is."""
    return function


def without_compiler(learner: Learner) -> Learner:
    assert learner.compiled_update is not None
    learner.compiled_update.compiler = not_compiled
    return learner


def close(one: Learner, other: Learner) -> bool:
    pairs = [(one.model_arrays(), other.model_arrays()), (one.optim_arrays(), other.optim_arrays())]
    return all(np.allclose(a[name], b[name], rtol=1e-4, atol=1e-6) for a, b in pairs for name in a)


@pytest.mark.parametrize("parts", CAN.values(), ids=CAN.keys())
def test_a_compiled_update_equals_an_eager_one(parts: dict[str, Any]) -> None:
    plan = plan_of(**parts)
    compiled, eager = without_compiler(learner_of(plan, compiled=True)), learner_of(plan, compiled=False)
    assert eager.compiled_update is None
    for seed in range(5):
        one, other = compiled.update(batch(seed=seed)), eager.update(batch(seed=seed))
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.stats == pytest.approx(other.stats, rel=1e-4)
        assert one.priority == pytest.approx(other.priority, rel=1e-3, abs=1e-5)
    assert compiled.updates == eager.updates == 5
    assert close(compiled, eager)


def test_running_normalisation_is_read_in_every_update() -> None:
    compiled, eager = (learner_of(plan_of(), compiled=how, normalize="both") for how in (True, False))
    without_compiler(compiled)
    for seed in range(4):
        for learner in (compiled, eager):
            assert learner.net.normalize is not None
            learner.net.normalize.observe(torch.full((8, 4), float(seed)))
        assert compiled.update(batch(seed=seed)).loss == pytest.approx(eager.update(batch(seed=seed)).loss, rel=1e-4)
    assert close(compiled, eager)


def test_the_learning_rate_is_an_input() -> None:
    plan = plan_of(optim=Adam(decay_updates=4))
    compiled, eager = without_compiler(learner_of(plan, compiled=True)), learner_of(plan, compiled=False)
    for seed in range(5):
        before = compiled.model_arrays()
        compiled.update(batch(seed=seed))
        eager.update(batch(seed=seed))
    assert close(compiled, eager)
    assert same(before, compiled.model_arrays())  # the last rate was zero


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_update_that_is_not_finite_changes_nothing(bad: float) -> None:
    learner = without_compiler(learner_of(plan_of(algo=Algo(target=AverageTarget(tau=0.1))), compiled=True))
    learner.update(batch())
    model, moments = learner.model_arrays(), learner.optim_arrays()
    with pytest.raises(NonFiniteUpdate, match="loss"):
        learner.update(batch(reward=bad))
    assert learner.updates == 1
    assert same(learner.model_arrays(), model)
    assert same(learner.optim_arrays(), moments)


@pytest.mark.parametrize("parts", CANNOT.values(), ids=CANNOT.keys())
def test_plans_that_cannot_be_compiled_have_a_reason(parts: dict[str, Any]) -> None:
    plan = plan_of(**parts)
    assert why_not_compilable(plan)
    assert why_not_compilable(plan_of()) is None


@pytest.mark.parametrize("name", ["noisy", "rmsprop", "spectral norm"])
def test_plans_that_cannot_be_compiled_update_eagerly(name: str) -> None:
    learner = learner_of(plan_of(**CANNOT[name]), compiled=True)
    assert learner.compiled_update is None
    learner.update(batch())


def test_a_failing_compiler_warns_once_and_updates_go_on_eagerly() -> None:
    def fails(function: UpdateFunction, inputs: Any, num_changing: int) -> UpdateFunction:
        raise OSError("no compiler found\nand a long story")

    learner, eager = learner_of(plan_of(), compiled=True), learner_of(plan_of(), compiled=False)
    assert learner.compiled_update is not None
    learner.compiled_update.compiler = fails
    with pytest.warns(RuntimeWarning, match="OSError: no compiler found") as caught:
        learner.update(batch())
    assert "story" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.update(batch(seed=1))
    eager.update(batch())
    eager.update(batch(seed=1))
    assert learner.updates == 2
    assert same(learner.model_arrays(), eager.model_arrays())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["double, averaged target", "categorical", "munchausen"])
def test_compiled_updates_equal_eager_ones_and_resume_bit_for_bit(name: str) -> None:
    plan = plan_of(**CAN[name])
    compiled, again, eager = (
        learner_of(plan, compiled=how, seed=seed) for how, seed in ((True, 1), (True, 2), (False, 1))
    )
    for seed in range(4):
        assert compiled.update(batch(seed=seed)).loss == pytest.approx(eager.update(batch(seed=seed)).loss, rel=1e-4)
    assert compiled.compiled_update is not None  # it was compiled
    assert close(compiled, eager)
    again.update(batch(seed=99))
    again.load_model_arrays(compiled.model_arrays())
    again.load_optim_arrays(compiled.optim_arrays())
    again.updates = compiled.updates
    for seed in range(4, 8):
        assert again.update(batch(seed=seed)).loss == compiled.update(batch(seed=seed)).loss
    assert same(again.model_arrays(), compiled.model_arrays())
    assert same(again.optim_arrays(), compiled.optim_arrays())


CONVOLUTIONS = {
    "3x3": (nn.Conv2d(4, 6, 3), True),
    "no bias": (nn.Conv2d(4, 6, 3, bias=False), True),
    "stride": (nn.Conv2d(3, 5, 4, stride=2), True),
    "oblong": (nn.Conv2d(2, 3, (2, 5), stride=(1, 3)), True),
    "padded": (nn.Conv2d(4, 6, 3, padding=1), False),
    "dilated": (nn.Conv2d(4, 6, 3, dilation=2), False),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), False),
    "large": (nn.Conv2d(4, 6, 5), False),
}


@pytest.mark.parametrize(("layer", "small"), CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_small_convolutions_are_patches_times_a_matrix(layer: nn.Conv2d, small: bool) -> None:
    layer = layer.double()
    x = torch.rand(3, layer.in_channels, 9, 10, dtype=torch.float64)
    weights = list(layer.parameters())

    def gradients(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [weight.detach().requires_grad_() for weight in weights]
        out = torch.func.functional_call(layer, dict(zip(dict(layer.named_parameters()), leaves, strict=True)), (x,))
        return out, *torch.autograd.grad((out * out).sum(), leaves)

    graph = make_fx(gradients, decomposition_table=small_convolutions())(x, *weights)
    for found, expected in zip(graph(x, *weights), gradients(x, *weights), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert any("convolution" in str(node.target) for node in graph.graph.nodes) is not small


def test_a_second_convolution_keeps_its_gradient() -> None:
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)

    def gradients(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((layers(x) ** 2).sum(), list(layers.parameters()))

    graph = make_fx(gradients, decomposition_table=small_convolutions())(x)
    for found, expected in zip(graph(x), gradients(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("torso", "spec"), [(NatureTorso(width=16), IMAGE), (MinatarTorso(), GRID)], ids=["nature", "minatar"]
)
def test_convolutions_can_be_compiled_too(torso: NatureTorso | MinatarTorso, spec: Spec) -> None:
    plan = plan_of(net=Net(torso=torso))
    compiled, eager = learner_of(plan, spec, compiled=True), learner_of(plan, spec, compiled=False)
    for seed in range(3):
        one, other = compiled.update(batch(spec, seed=seed)), eager.update(batch(spec, seed=seed))
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
    assert compiled.compiled_update is not None
