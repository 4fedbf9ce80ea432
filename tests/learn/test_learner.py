"""The learner: target updates, clipping, updates that are not finite, and exact resume."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qfleet.data import Spec
from qfleet.learn import Learner, NonFiniteUpdate, make_learner
from qfleet.learn.optimizer import clip_gradients, gradient_norm
from qfleet.nets import make_net
from qfleet.plan.schema import (
    Adam,
    Algo,
    AverageTarget,
    CopyTarget,
    DoubleRule,
    Env,
    Net,
    OwnTorso,
    Plan,
    Radam,
    Rmsprop,
    Sgd,
)
from tests.learn.parts import IMAGE, VECTOR, batch, make, same

OPTIMISERS = {
    "adam": Adam(),
    "adamw": Adam(weight_decay=0.01),
    "radam": Radam(weight_decay=0.01),
    "rmsprop": Rmsprop(),
    "rmsprop not centred": Rmsprop(centered=False),
    "sgd": Sgd(),
    "sgd with momentum": Sgd(momentum=0.9),
}


def weights(net: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_target_is_copied_periodically() -> None:
    learner = make(algo=Algo(target=CopyTarget(every_updates=3)))
    old = weights(learner.target)
    assert equal(old, weights(learner.net))
    for update in range(1, 8):
        learner.update(batch(seed=update))
        if update % 3 == 0:
            old = weights(learner.net)
        assert equal(weights(learner.target), old), update
        assert equal(weights(learner.target), weights(learner.net)) == (update % 3 == 0)
    assert learner.updates == 7


def test_the_target_is_averaged_by_tau() -> None:
    learner = make(algo=Algo(target=AverageTarget(tau=0.25)))
    expected = weights(learner.target)
    for update in range(4):
        learner.update(batch(seed=update))
        expected = [0.75 * t + 0.25 * w for t, w in zip(expected, weights(learner.net), strict=True)]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights(learner.target), expected, strict=True))
    assert not equal(weights(learner.target), weights(learner.net))


def test_updates_fit_the_batch() -> None:
    learner, same_again = make(optim=Adam(learning_rate=1e-2)), batch()
    same_again.discount[:] = 0.0
    first = learner.update(same_again)
    assert first.priority.shape == (8,)
    assert first.loss == pytest.approx(np.where(first.priority < 1, first.priority**2 / 2, first.priority - 0.5).mean())
    for _ in range(300):
        report = learner.update(same_again)
    assert report.loss < first.loss / 100
    with torch.no_grad():
        seen = learner.net(torch.from_numpy(same_again.obs)).mean().item()
    assert report.stats["value_mean"] == pytest.approx(seen, rel=0.05)


def test_importance_weights_reach_the_update() -> None:
    weighted, plain = make(optim=Sgd(clip_norm=None)), make(optim=Sgd(clip_norm=None))
    items = batch()
    begin = weights(plain.net)
    loss = plain.update(items).loss
    items.weight[:] = 0.5
    assert weighted.update(items).loss == pytest.approx(loss / 2)
    for start, full, half in zip(begin, weights(plain.net), weights(weighted.net), strict=True):
        assert torch.allclose(half - start, (full - start) / 2, atol=1e-7)


@pytest.mark.parametrize("limit", [0.1, 5.0, 1e9])
@pytest.mark.parametrize("seed", range(5))
def test_clipping_equals_torchs_own(limit: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(shape, generator=generator) for shape in [(3, 4), (7,), (2, 2, 3)]]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(parameters, limit)
    norm = gradient_norm(gradients).item()
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    clip_gradients(gradients, norm, limit)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(gradient, parameter.grad, rtol=1e-6, atol=0)


def test_clipping_can_be_off() -> None:
    gradients = [torch.full((4,), 50.0)]
    clip_gradients(gradients, gradient_norm(gradients).item(), None)
    assert gradients[0].tolist() == [50.0] * 4


def test_the_plans_limit_is_applied_to_the_update() -> None:
    learner = make(optim=Sgd(learning_rate=1.0, clip_norm=0.01))
    begin = weights(learner.net)
    norm = learner.update(batch()).stats["gradient_norm"]
    moved = torch.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(begin, weights(learner.net), strict=True)))  # type: ignore[arg-type]
    assert norm > 0.01
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("optim", OPTIMISERS.values(), ids=OPTIMISERS.keys())
def test_an_update_that_is_not_finite_changes_nothing(bad: float, optim: Adam | Radam | Rmsprop | Sgd) -> None:
    learner = make(optim=optim, algo=Algo(target=AverageTarget(tau=0.1)))
    learner.update(batch())
    model, moments = learner.model_arrays(), learner.optim_arrays()
    with pytest.raises(NonFiniteUpdate, match="loss"):
        learner.update(batch(reward=bad))
    assert learner.updates == 1
    assert same(learner.model_arrays(), model)
    assert same(learner.optim_arrays(), moments)
    assert learner.is_finite()
    learner.update(batch(seed=2))  # and the next one is as if nothing had been
    other = make(optim=optim, algo=Algo(target=AverageTarget(tau=0.1)))
    other.update(batch())
    other.update(batch(seed=2))
    assert same(learner.model_arrays(), other.model_arrays())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_shared_step_is_skipped_if_it_is_not_finite(bad: float) -> None:
    learner = make()
    learner.update(batch())
    model, moments = learner.model_arrays(), learner.optim_arrays()
    gradients = learner.prepare_shared_update(batch(seed=2)).gradients
    gradients[-1].fill_(bad)
    assert not np.isfinite(learner.step(gradients))
    assert same(learner.model_arrays(), model)
    assert same(learner.optim_arrays(), moments)


def test_is_finite_detects_bad_weights() -> None:
    learner = make()
    assert learner.is_finite()
    with torch.no_grad():
        next(learner.net.parameters())[0, 0] = torch.nan
    assert not learner.is_finite()


@pytest.mark.parametrize("spec", [VECTOR, IMAGE], ids=["vector", "picture"])
@pytest.mark.parametrize("optim", OPTIMISERS.values(), ids=OPTIMISERS.keys())
def test_a_restored_learner_continues_bit_for_bit(spec: Spec, optim: Adam | Radam | Rmsprop | Sgd) -> None:
    algo = Algo(target=CopyTarget(every_updates=4))
    learner, restored = make(spec, optim, algo), make(spec, optim, algo, seed=2)
    for seed in range(6):
        learner.update(batch(spec, seed=seed))
    model, moments, updates = learner.model_arrays(), learner.optim_arrays(), learner.updates
    for seed in range(6, 12):
        learner.update(batch(spec, seed=seed))
    restored.update(batch(spec, seed=99))  # moments of its own, to be replaced
    restored.load_model_arrays(model)
    restored.load_optim_arrays(moments)
    restored.updates = updates
    for seed in range(6, 12):
        restored.update(batch(spec, seed=seed))
    assert same(restored.model_arrays(), learner.model_arrays())
    assert same(restored.optim_arrays(), learner.optim_arrays())
    assert not same(model, learner.model_arrays())


def test_convolutions_keep_their_memory_format_through_a_restore() -> None:
    learner, restored = make(IMAGE), make(IMAGE, seed=2)
    learner.update(batch(IMAGE))
    restored.load_model_arrays(learner.model_arrays())
    restored.load_optim_arrays(learner.optim_arrays())
    for name, moments in learner.optimizer.moments.items():
        pairs = zip(moments, restored.optimizer.moments[name], strict=True)
        assert all(one.stride() == other.stride() for one, other in pairs)
    for a, b in zip(learner.net.parameters(), restored.net.parameters(), strict=True):
        assert a.stride() == b.stride()
    convolution = next(restored.net.parameters())
    assert convolution.is_contiguous(memory_format=torch.channels_last)


class Confusing(nn.Module):
    """A torso whose parts are named like those of the whole network."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.ModuleDict({"actions": nn.Sequential(nn.Linear(4, 4))})

    def forward(self, obs: Tensor) -> Tensor:
        features: Tensor = self.head["actions"](obs)
        return features


def test_moments_find_their_parameter_whatever_its_name() -> None:
    spec, plan = Spec((4,), "float32", (4,)), Plan(env=Env(id="none"), net=Net(torso=OwnTorso()))

    def fresh() -> Learner:
        net = make_net(plan.net, spec, normalize="off", seed=1, torso=Confusing())
        return make_learner(plan, spec, net, torch.device("cpu"))

    learner, restored = fresh(), fresh()
    learner.update(batch(spec))
    restored.load_model_arrays(learner.model_arrays())
    restored.load_optim_arrays(learner.optim_arrays())
    for one in (learner, restored):
        one.update(batch(spec, seed=1))
    assert same(restored.optim_arrays(), learner.optim_arrays())


@pytest.mark.parametrize("optim", OPTIMISERS.values(), ids=OPTIMISERS.keys())
def test_frozen_parts_of_a_torso_stay_as_they_are(optim: Adam | Radam | Rmsprop | Sgd) -> None:
    plan = Plan(env=Env(id="none"), optim=optim, net=Net(torso=OwnTorso()))
    torso = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    torso[0].requires_grad_(False)
    net = make_net(plan.net, VECTOR, normalize="off", seed=1, torso=torso)
    learner = make_learner(plan, VECTOR, net, torch.device("cpu"))
    before = learner.model_arrays()
    learner.update(batch())
    after = learner.model_arrays()
    still = {name for name in before if np.array_equal(before[name], after[name])}
    assert still == {"torso.0.weight", "torso.0.bias"}
    learner.load_optim_arrays(learner.optim_arrays())


def test_returned_arrays_do_not_change_later() -> None:
    learner = make()
    learner.update(batch())
    model, moments = learner.model_arrays(), learner.optim_arrays()
    then = [{name: value.copy() for name, value in arrays.items()} for arrays in (model, moments)]
    learner.update(batch(seed=1))
    assert same(model, then[0])
    assert same(moments, then[1])


def test_weights_of_another_shape_are_refused() -> None:
    arrays = make().model_arrays()
    arrays["head.extra"] = arrays.pop("head.actions.out.weight")
    with pytest.raises(KeyError, match=r"head\.extra"):
        make().load_model_arrays(arrays)


def test_next_observations_used_by_both_networks_are_scaled_once() -> None:
    items = batch(IMAGE)
    learner = make(IMAGE, algo=Algo(rule=DoubleRule()))
    shown = learner.to_tensors(items).next_obs
    assert shown is not None
    assert torch.equal(shown, torch.from_numpy(items.next_obs) / 255.0)
    other = make(IMAGE, algo=Algo(rule=DoubleRule()))
    raw = replace(learner.to_tensors(items), next_obs=torch.from_numpy(items.next_obs))
    assert torch.equal(other.gradients.compute(raw)[0], learner.gradients.compute(learner.to_tensors(items))[0])


def test_both_networks_use_one_normalisation_and_rewards_are_scaled() -> None:
    learner = make(normalize="both")
    assert learner.net.normalize is not None
    assert learner.net.rewards is not None
    learner.net.normalize.observe(torch.randn(50, 4) * 9)
    learner.net.rewards.observe(torch.tensor([-4.0, 4.0]))  # standard deviation 4
    assert learner.target.normalize is learner.net.normalize
    items = batch()
    assert learner.to_tensors(items).reward.tolist() == pytest.approx((items.reward / 4).tolist())
