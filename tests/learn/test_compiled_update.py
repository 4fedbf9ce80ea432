"""The whole update as one piece: the same learning, all or nothing, exact continuation, and when it is not done."""

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
from qfleet.learn.compiled_update import Piece, not_whole, small_convolutions
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
from tests.learn.parts import PICTURE, VECTOR, batch, same

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


def learner_of(plan: Plan, spec: Spec = VECTOR, *, whole: bool, seed: int = 1, normalize: str = "off") -> Learner:
    runtime = msgspec.structs.replace(plan.runtime, compile=whole)
    net = make_net(plan.net, spec, normalize=normalize, seed=seed)
    return make_learner(msgspec.structs.replace(plan, runtime=runtime), spec, net, torch.device("cpu"))


def as_it_is(piece: Piece, inputs: Any, moving: int) -> Piece:
    """An engine that changes nothing: the piece itself, without a compiler."""
    return piece


def plain(learner: Learner) -> Learner:
    assert learner.whole is not None
    learner.whole.engine = as_it_is
    return learner


def close(one: Learner, other: Learner) -> bool:
    pairs = [(one.model_arrays(), other.model_arrays()), (one.optim_arrays(), other.optim_arrays())]
    return all(np.allclose(a[name], b[name], rtol=1e-4, atol=1e-6) for a, b in pairs for name in a)


@pytest.mark.parametrize("parts", CAN.values(), ids=CAN.keys())
def test_one_piece_learns_as_step_by_step(parts: dict[str, Any]) -> None:
    plan = plan_of(**parts)
    whole, steps = plain(learner_of(plan, whole=True)), learner_of(plan, whole=False)
    assert steps.whole is None
    for seed in range(5):
        one, other = whole.update(batch(seed=seed)), steps.update(batch(seed=seed))
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.stats == pytest.approx(other.stats, rel=1e-4)
        assert one.priority == pytest.approx(other.priority, rel=1e-3, abs=1e-5)
    assert whole.updates == steps.updates == 5
    assert close(whole, steps)


def test_running_normalisation_is_read_anew_in_every_update() -> None:
    whole, steps = (learner_of(plan_of(), whole=how, normalize="both") for how in (True, False))
    plain(whole)
    for seed in range(4):
        for learner in (whole, steps):
            assert learner.net.normalize is not None
            learner.net.normalize.observe(torch.full((8, 4), float(seed)))
        assert whole.update(batch(seed=seed)).loss == pytest.approx(steps.update(batch(seed=seed)).loss, rel=1e-4)
    assert close(whole, steps)


def test_the_learning_rate_is_not_frozen() -> None:
    plan = plan_of(optim=Adam(decay_updates=4))
    whole, steps = plain(learner_of(plan, whole=True)), learner_of(plan, whole=False)
    for seed in range(5):
        before = whole.model_arrays()
        whole.update(batch(seed=seed))
        steps.update(batch(seed=seed))
    assert close(whole, steps)
    assert same(before, whole.model_arrays())  # the last rate was zero


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_leaves_everything_untouched(bad: float) -> None:
    learner = plain(learner_of(plan_of(algo=Algo(target=AverageTarget(tau=0.1))), whole=True))
    learner.update(batch())
    model, moments = learner.model_arrays(), learner.optim_arrays()
    with pytest.raises(NonFiniteUpdate, match="loss"):
        learner.update(batch(reward=bad))
    assert learner.updates == 1
    assert same(learner.model_arrays(), model)
    assert same(learner.optim_arrays(), moments)


@pytest.mark.parametrize("parts", CANNOT.values(), ids=CANNOT.keys())
def test_what_cannot_be_one_piece_is_named(parts: dict[str, Any]) -> None:
    plan = plan_of(**parts)
    assert not_whole(plan)
    assert not_whole(plan_of()) is None


@pytest.mark.parametrize("name", ["noisy", "rmsprop", "spectral norm"])
def test_what_cannot_be_one_piece_is_done_step_by_step(name: str) -> None:
    learner = learner_of(plan_of(**CANNOT[name]), whole=True)
    assert learner.whole is None
    learner.update(batch())


def test_without_a_compiler_there_is_one_warning_and_the_run_goes_on() -> None:
    def fails(piece: Piece, inputs: Any, moving: int) -> Piece:
        raise OSError("no compiler found\nand a long story")

    learner, steps = learner_of(plan_of(), whole=True), learner_of(plan_of(), whole=False)
    assert learner.whole is not None
    learner.whole.engine = fails
    with pytest.warns(RuntimeWarning, match="OSError: no compiler found") as told:
        learner.update(batch())
    assert "story" not in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.update(batch(seed=1))
    steps.update(batch())
    steps.update(batch(seed=1))
    assert learner.updates == 2
    assert same(learner.model_arrays(), steps.model_arrays())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["double, averaged target", "categorical", "munchausen"])
def test_the_compiled_piece_learns_the_same_and_goes_on_bit_by_bit(name: str) -> None:
    plan = plan_of(**CAN[name])
    whole, again, steps = (learner_of(plan, whole=how, seed=seed) for how, seed in ((True, 1), (True, 2), (False, 1)))
    for seed in range(4):
        assert whole.update(batch(seed=seed)).loss == pytest.approx(steps.update(batch(seed=seed)).loss, rel=1e-4)
    assert whole.whole is not None  # it was compiled
    assert close(whole, steps)
    again.update(batch(seed=99))
    again.load_model_arrays(whole.model_arrays())
    again.load_optim_arrays(whole.optim_arrays())
    again.updates = whole.updates
    for seed in range(4, 8):
        assert again.update(batch(seed=seed)).loss == whole.update(batch(seed=seed)).loss
    assert same(again.model_arrays(), whole.model_arrays())
    assert same(again.optim_arrays(), whole.optim_arrays())


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

    def piece(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [weight.detach().requires_grad_() for weight in weights]
        out = torch.func.functional_call(layer, dict(zip(dict(layer.named_parameters()), leaves, strict=True)), (x,))
        return out, *torch.autograd.grad((out * out).sum(), leaves)

    graph = make_fx(piece, decomposition_table=small_convolutions())(x, *weights)
    for found, expected in zip(graph(x, *weights), piece(x, *weights), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert any("convolution" in str(node.target) for node in graph.graph.nodes) is not small


def test_a_convolution_behind_another_keeps_its_gradient() -> None:
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)

    def piece(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad((layers(x) ** 2).sum(), list(layers.parameters()))

    graph = make_fx(piece, decomposition_table=small_convolutions())(x)
    for found, expected in zip(graph(x), piece(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("torso", "spec"), [(NatureTorso(width=16), PICTURE), (MinatarTorso(), GRID)], ids=["nature", "minatar"]
)
def test_convolutions_can_be_compiled_too(torso: NatureTorso | MinatarTorso, spec: Spec) -> None:
    plan = plan_of(net=Net(torso=torso))
    whole, steps = learner_of(plan, spec, whole=True), learner_of(plan, spec, whole=False)
    for seed in range(3):
        one, other = whole.update(batch(spec, seed=seed)), steps.update(batch(spec, seed=seed))
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
    assert whole.whole is not None
