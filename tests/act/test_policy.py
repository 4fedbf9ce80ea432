"""The policy: greedy, exploring within the mask, with a fixed use of random numbers, and never on NaN."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qfleet.act import Policy, make_epsilon
from qfleet.act.policy import NonFiniteValues
from qfleet.data import Spec
from qfleet.errors import UsageError
from qfleet.nets import QNet, make_net
from qfleet.plan.schema import Algo, ConstantEpsilon, ExponentialEpsilon, LinearEpsilon, MlpTorso, Net
from qfleet.qlearn import Scalar

CHI_SQUARE_2 = 13.82  # 99.9 % quantiles for 2 and 3 degrees of freedom
CHI_SQUARE_3 = 16.27


def identity_policy(num_actions: int = 4) -> Policy:
    """A policy whose values are the observation."""
    return Policy(QNet(nn.Identity(), nn.Identity()), Scalar(), (num_actions,))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def test_epsilon_falls_linearly_then_stays() -> None:
    epsilon = make_epsilon(Algo(explore=LinearEpsilon(start=1.0, end=0.1, steps=1_000)))
    assert [epsilon(step) for step in (0, 250, 500, 1_000, 10**9)] == pytest.approx([1.0, 0.775, 0.55, 0.1, 0.1])


def test_epsilon_halves_its_distance() -> None:
    epsilon = make_epsilon(Algo(explore=ExponentialEpsilon(start=1.0, end=0.2, half_life_steps=100)))
    assert [epsilon(step) for step in (0, 100, 200, 10**9)] == pytest.approx([1.0, 0.6, 0.4, 0.2])


def test_epsilon_may_be_constant() -> None:
    epsilon = make_epsilon(Algo(explore=ConstantEpsilon(epsilon=0.3)))
    assert {epsilon(step) for step in (0, 1, 10**9)} == {0.3}


@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "duelling"])
def test_newer_weights_are_used_in_any_network(dueling: bool) -> None:
    kind, spec = Net(torso=MlpTorso(sizes=(8, 8)), dueling=dueling), Spec((4,), "float32", (3,))
    nets = [make_net(kind, spec, normalize="off", seed=seed) for seed in range(3)]
    policy, obs = Policy(nets[0], Scalar(), (3,)), rng().normal(size=(5, 4)).astype(np.float32)
    for version, net in enumerate(nets[1:], start=1):
        policy.load_weights(version, weights := net.state_dict())
        with torch.no_grad():
            assert policy.forward(obs)[0].tolist() == net(torch.from_numpy(obs)).tolist()
            next(iter(weights.values())).mul_(2.0)  # shared: what is written there is seen at once
            assert policy.forward(obs)[0].tolist() == net(torch.from_numpy(obs)).tolist()


class KeepsReferences(nn.Module):
    """Keeps further references to its weights: the parameters in a list, or views of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        own = [self.layer.weight, self.layer.bias]
        self.kept = own if kind == "list" else [value.detach() for value in own]

    def forward(self, obs: Tensor) -> Tensor:
        weight, bias = self.kept
        return obs @ weight.T + bias


@pytest.mark.parametrize("kind", ["list", "views"])
def test_newer_weights_are_used_by_modules_that_keep_references(kind: str) -> None:
    nets = [QNet(KeepsReferences(kind), nn.Identity()) for _ in range(3)]
    policy, obs = Policy(nets[0], Scalar(), (3,)), rng().normal(size=(5, 4)).astype(np.float32)
    for version, net in enumerate(nets[1:], start=1):
        policy.load_weights(version, weights := net.state_dict())
        with torch.no_grad():
            assert policy.forward(obs)[0].tolist() == net(torch.from_numpy(obs)).tolist()
            next(iter(weights.values())).mul_(2.0)  # what is written there is seen at once
            assert policy.forward(obs)[0].tolist() == net(torch.from_numpy(obs)).tolist()


@pytest.mark.parametrize(
    ("obs", "given", "fix"),
    [
        (np.zeros(4, np.float32), "one observation without a batch", "policy.act(obs[None])"),
        (np.zeros((2, 5), np.float32), "shape (2, 5)", "the environment it was trained in"),
        (np.zeros((2, 4)), "type float64", "obs.astype(np.float32)"),
        ([[0.0] * 4], "a list", "np.asarray(obs, np.float32)"),
        (torch.zeros(1, 4), "a Tensor", "np.asarray(obs, np.float32)"),
    ],
)
def test_anything_but_a_batch_of_observations_is_refused(obs: Any, given: str, fix: str) -> None:
    spec = Spec((4,), "float32", (3,))
    net = make_net(Net(torso=MlpTorso(sizes=(8,))), spec, normalize="off", seed=0)
    policy = Policy(net, Scalar(), (3,), spec=spec)
    with pytest.raises(UsageError) as caught:
        policy.act(obs)
    assert given in caught.value.what
    assert "[B, 4] of float32" in caught.value.why
    assert fix in caught.value.fix


def test_greedy_takes_the_best_and_returns_the_values() -> None:
    obs = np.array([[0, 3, 1, 2], [5, 3, 1, 2]], np.float32)
    action, _, values = identity_policy().act(obs)
    assert action.tolist() == [1, 0]
    assert np.array_equal(values, obs)


def test_greedy_takes_the_best_of_the_allowed_even_when_all_are_negative() -> None:
    obs = np.array([[-1, -2, -3, -4], [5, 3, 1, 2]], np.float32)
    mask = np.array([[False, False, True, True], [False, True, True, True]])
    assert identity_policy().act(obs, mask=mask)[0].tolist() == [2, 1]


def test_epsilon_zero_is_greedy_and_epsilon_one_is_random() -> None:
    obs = np.tile(np.array([0, 3, 1, 2], np.float32), (4_000, 1))
    assert (identity_policy().act(obs, epsilon=0.0, rng=rng())[0] == 1).all()
    counts = np.bincount(identity_policy().act(obs, epsilon=1.0, rng=rng())[0], minlength=4)
    assert ((counts - 1_000) ** 2 / 1_000).sum() < CHI_SQUARE_3


def test_epsilon_is_the_share_of_random_actions() -> None:
    obs = np.tile(np.array([0, 3, 1, 2], np.float32), (40_000, 1))
    other = np.mean(identity_policy().act(obs, epsilon=0.2, rng=rng())[0] != 1)
    assert other == pytest.approx(0.2 * 3 / 4, abs=0.01)


def test_exploration_is_uniform_over_the_allowed_and_never_outside() -> None:
    allowed = [0, 2, 3]
    mask = np.zeros((30_000, 4), np.bool_)
    mask[:, allowed] = True
    action = identity_policy().act(np.zeros((30_000, 4), np.float32), epsilon=1.0, rng=rng(), mask=mask)[0]
    counts = np.bincount(action, minlength=4)
    assert counts[1] == 0
    assert ((counts[allowed] - 10_000) ** 2 / 10_000).sum() < CHI_SQUARE_2


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0])
def test_no_forbidden_action_under_random_masks(epsilon: float) -> None:
    generator = np.random.default_rng(3)
    mask = generator.random((5_000, 4)) < 0.4
    mask[np.arange(5_000), generator.integers(0, 4, 5_000)] = True
    values = generator.normal(size=(5_000, 4)).astype(np.float32)
    action = identity_policy().act(values, epsilon=epsilon, rng=rng(), mask=mask)[0]
    assert mask[np.arange(5_000), action].all()


def test_every_step_draws_the_same_random_numbers() -> None:
    after = []
    for epsilon in (0.0, 0.5, 1.0):
        for mask in (None, np.ones((6, 4), np.bool_), np.eye(4, dtype=np.bool_)[[0, 1, 2, 3, 0, 1]]):
            generator = rng()
            identity_policy().act(np.zeros((6, 4), np.float32), epsilon=epsilon, rng=generator, mask=mask)
            after.append(generator.random())
    expected = rng()
    expected.random((2, 6))
    assert set(after) == {expected.random()}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_values_that_are_not_finite_refuse_to_act(value: float, epsilon: float) -> None:
    obs = np.zeros((3, 4), np.float32)
    obs[1, 2] = value
    with pytest.raises(NonFiniteValues):
        identity_policy().act(obs, epsilon=epsilon, rng=rng())


def test_loaded_weights_are_shared_not_copied() -> None:
    learned = QNet(nn.Linear(4, 4), nn.Identity())
    policy = Policy(QNet(nn.Linear(4, 4), nn.Identity()), Scalar(), (4,))
    weights: dict[str, Tensor] = learned.state_dict()
    policy.load_weights(3, weights)
    assert policy.version == 3
    with torch.no_grad():
        learned.torso.weight.fill_(1.0)  # type: ignore[operator]
        learned.torso.bias.fill_(2.0)  # type: ignore[operator]
    assert policy.forward(np.ones((1, 4), np.float32))[0].tolist() == [[6.0] * 4]
