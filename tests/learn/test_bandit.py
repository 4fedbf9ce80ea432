"""A bandit whose returns are known as a distribution: arm 0 pays +1 or -1, each half the time, arm 1 always 0.3."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from qfleet.data import Array, Batch, Spec
from qfleet.learn import Learner, make_learner
from qfleet.nets import ImplicitQuantileHead, make_net
from qfleet.plan.schema import (
    Adam,
    Algo,
    CategoricalHead,
    CopyTarget,
    Env,
    ImplicitHead,
    MaxRule,
    MlpTorso,
    Net,
    Plan,
    QuantileHead,
)

SPEC = Spec((8,), "float32", (2,))
SURE = 0.3


def learned(head: Any, updates: int, *, discount: float = 0.0, rate: float = 5e-3) -> Learner:
    """A learner trained on batches that hold each outcome as often as it is likely."""
    torch.manual_seed(0)
    plan = Plan(
        env=Env(id="none"),
        algo=Algo(rule=MaxRule(), target=CopyTarget(every_updates=1)),
        optim=Adam(learning_rate=rate),
        net=Net(torso=MlpTorso(sizes=(32,)), head=head),
    )
    learner = make_learner(plan, SPEC, make_net(plan.net, SPEC, normalize="off", seed=1), torch.device("cpu"))
    num, ones = 16, np.ones((16, 8), np.float32)
    action, reward = np.arange(num) % 2, np.full(num, SURE, np.float32)
    reward[action == 0] = np.tile([1.0, -1.0], num // 4)
    folded = np.full(num, discount, np.float32)
    batch = Batch(ones, action, reward, folded, ones, np.ones(num, np.float32), np.arange(num))
    for update in range(updates):
        learner.optimizer.learning_rate = rate * (1 - update / updates)
        learner.update(batch)
    return learner


def look(learner: Learner) -> Array:
    with torch.no_grad():
        out: Array = learner.net(torch.ones(1, 8))[0].numpy()
    return out


def huber_quantile(fraction: float) -> float:
    """The minimum of the quantile Huber loss of a fair +-1, kappa 1.

    Near an outcome the loss is quadratic: for a fraction f >= 1/2 the slopes (1 - f) of the outcome two away and
    f (1 - x) of the near one are equal at x = 1 - (1 - f) / f; below 1/2 it is the mirror image.
    """
    if fraction < 0.5:
        return -huber_quantile(1.0 - fraction)
    return 1.0 - (1.0 - fraction) / fraction


def test_the_formula_minimises_the_loss() -> None:
    def loss(x: float, fraction: float) -> float:
        sizes = [(abs(u) - 0.5 if abs(u) > 1 else u * u / 2) * abs(fraction - (u < 0)) for u in (1 - x, -1 - x)]
        return sum(sizes)

    for fraction in (0.05, 0.3, 0.5, 0.7, 0.95):
        grid = np.linspace(-1.2, 1.2, 24_001)
        best = grid[np.argmin([loss(x, fraction) for x in grid])]
        assert huber_quantile(fraction) == pytest.approx(best, abs=1e-3)


def test_a_categorical_head_learns_the_probabilities() -> None:
    learner = learned(CategoricalHead(atoms=9, low=-2.0, high=2.0), 600)
    chances = torch.from_numpy(look(learner)).softmax(1).numpy()
    expected = np.zeros((2, 9))
    expected[0, [2, 6]] = 0.5  # the atoms -1 and +1
    expected[1, [4, 5]] = 0.4, 0.6  # 0.3 lies between 0 and 0.5
    assert chances == pytest.approx(expected, abs=0.02)


def test_a_quantile_head_learns_the_quantiles() -> None:
    found = look(learned(QuantileHead(quantiles=8), 1_500))
    fractions = [(place + 0.5) / 8 for place in range(8)]
    assert found[0] == pytest.approx([huber_quantile(f) for f in fractions], abs=0.02)
    assert found[1] == pytest.approx(np.full(8, SURE), abs=0.02)
    assert found[0].mean() == pytest.approx(0.0, abs=0.01)


def test_an_implicit_head_learns_the_quantile_function() -> None:
    learner = learned(ImplicitHead(fractions=32, target_fractions=4, cosines=12), 800, rate=2e-3)
    assert isinstance(learner.net.head, ImplicitQuantileHead)
    learner.net.head.even, learner.net.head.fractions = True, 10
    found = look(learner)
    assert found[2] == pytest.approx(np.arange(0.05, 1, 0.1))
    assert found[0] == pytest.approx([huber_quantile(f) for f in found[2].tolist()], abs=0.15)
    assert (np.diff(found[0]) > 0).all()
    assert found[1] == pytest.approx(np.full(10, SURE), abs=0.1)
    assert found[0].mean() == pytest.approx(0.0, abs=0.05)


def test_bootstrapped_returns_are_part_of_the_distribution() -> None:
    # Discount 0.5, and the sure arm is the better one: Z1 = 0.3 + Z1 / 2 = 0.6, Z0 = +-1 + 0.3.
    learner = learned(CategoricalHead(atoms=21, low=-2.0, high=2.0), 800, discount=0.5)
    chances = torch.from_numpy(look(learner)).softmax(1).numpy()
    atoms = np.linspace(-2, 2, 21)
    mean, var = (
        chances @ atoms,
        [np.average((atoms - m) ** 2, weights=p) for m, p in zip(chances @ atoms, chances, strict=True)],
    )
    assert mean == pytest.approx([0.3, 0.6], abs=0.03)
    assert var[0] == pytest.approx(1.0, abs=0.1)
    assert math.sqrt(var[1]) < 0.2
