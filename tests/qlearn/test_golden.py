"""Published or hand-computed numbers, each to the digits they are given with."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qfleet.nets import signed_hyperbolic, signed_parabolic
from qfleet.qlearn import Scalar, StepView, Tensors, lambda_returns
from qfleet.qlearn.distributional_heads import Categorical, Quantile, categorical_projection, quantile_huber_loss
from qfleet.qlearn.rules import Munchausen, NextValues
from qfleet.qlearn.td import td_target

SUPPORT = torch.linspace(-2, 2, 5, dtype=torch.float64)
MASS = torch.tensor([[0.1, 0.2, 0.4, 0.2, 0.1]], dtype=torch.float64)


def categorical_target(reward: float, discount: float) -> list[float]:
    """Through the head: logits whose softmax is MASS, of the one action there is."""
    one = torch.ones(1, 1, dtype=torch.float64)
    target = Categorical(-2, 2).target(MASS.log().unsqueeze(1), one, reward * one[0], discount * one[0])
    found: list[float] = target[0].tolist()
    return found


@pytest.mark.parametrize(
    ("reward", "discount", "expected"),
    [
        (0.5, 0.9, [0.03, 0.15, 0.32, 0.32, 0.18]),
        (1.0, 0.0, [0, 0, 0, 1, 0]),  # a terminal reward on an atom: no mass may be lost
        (0.3, 0.0, [0, 0, 0.7, 0.3, 0]),
        (-2.0, 0.0, [1, 0, 0, 0, 0]),
        (2.0, 0.0, [0, 0, 0, 0, 1]),
        (7.0, 0.0, [0, 0, 0, 0, 1]),  # beyond the last atom
        (0.0, 1.0, [0.1, 0.2, 0.4, 0.2, 0.1]),
    ],
)
def test_c51_projection(reward: float, discount: float, expected: list[float]) -> None:
    found = categorical_target(reward, discount)
    assert found == pytest.approx(expected, abs=1e-9)
    assert sum(found) == pytest.approx(1.0, abs=1e-12)
    assert categorical_projection(reward + discount * SUPPORT.unsqueeze(0), MASS, SUPPORT)[0].tolist() == pytest.approx(
        found
    )


def test_no_mass_is_lost_on_51_atoms_in_single_precision() -> None:
    support = torch.linspace(-10, 10, 51)
    rewards = torch.linspace(-12, 12, 4_801).unsqueeze(1)
    shares = categorical_projection(rewards.expand(-1, 51), torch.full((4_801, 51), 1 / 51), support)
    assert shares.sum(1).numpy() == pytest.approx(1.0, abs=1e-5)
    assert (shares @ support).numpy() == pytest.approx(rewards[:, 0].clamp(-10, 10).numpy(), abs=1e-4)


def test_quantile_huber_sums_over_quantiles_and_averages_over_targets() -> None:
    predicted, targets = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.5, 3.0]])
    found = quantile_huber_loss(predicted, targets, torch.tensor([[1 / 6, 1 / 2, 5 / 6]])).item()
    assert found == pytest.approx(0.916667, abs=1e-6)
    assert found / 3 == pytest.approx(0.305556, abs=1e-6)  # the other reduction in use: the mean over quantiles
    # The head's own fractions are the middles of equal parts.
    loss, priority = Quantile().loss(predicted.unsqueeze(1), torch.tensor([0]), targets)
    assert loss.item() == pytest.approx(0.916667, abs=1e-6)
    assert priority.item() == pytest.approx(1.75 - 1.0)


class Pair(nn.Module):
    """Two observations and the values of two actions there."""

    def __init__(self, now: list[float], after: list[float]) -> None:
        super().__init__()
        self.values = torch.tensor([now, after], dtype=torch.float64)

    def forward(self, obs: Tensor) -> Tensor:
        return self.values[obs.long().squeeze(1)]


def test_munchausen() -> None:
    now, after = (torch.tensor([row], dtype=torch.float64) for row in ([1.0, 2.0], [0.0, 0.1]))
    rule = Munchausen(0.9, 0.03, -1.0)
    choice = rule(NextValues(after, target_current=now, action=torch.tensor([0])))
    assert choice.bonus is not None
    assert choice.entropy is not None
    assert choice.bonus.item() / 0.9 == pytest.approx(-1.0, abs=1e-6)
    soft = (choice.probs * after).sum() + choice.entropy
    assert soft.item() == pytest.approx(0.10105, abs=1e-5)
    assert soft.item() == pytest.approx(0.03 * math.log(1 + math.exp(0.1 / 0.03)), abs=1e-9)
    shown: Any = Pair([1.0, 2.0], [0.0, 0.1])
    half = torch.tensor([0.5], dtype=torch.float64)
    batch = Tensors(
        torch.zeros(1, 1), torch.tensor([0]), half, torch.tensor([0.99]).double(), half, next_obs=torch.ones(1, 1)
    )
    assert td_target(Scalar(), rule, StepView(), shown, batch, None).item() == pytest.approx(-0.29996, abs=1e-5)


def test_the_bonus_stops_at_the_floor_and_is_nothing_for_a_sure_action() -> None:
    now = torch.tensor([[0.0, 50.0], [0.0, 50.0]])
    choice = Munchausen()(NextValues(now, target_current=now, action=torch.tensor([0, 1])))
    assert choice.bonus is not None
    assert choice.bonus.tolist() == pytest.approx([-0.9, 0.0])


@pytest.mark.parametrize(
    ("x", "expected"), [(0.5, 0.225245), (1, 0.415214), (10, 2.326625), (100, 9.149876), (1000, 31.638584)]
)
def test_value_rescaling(x: float, expected: float) -> None:
    value = torch.tensor([x, -x], dtype=torch.float64)
    assert signed_hyperbolic(value).tolist() == pytest.approx([expected, -expected], abs=1e-6)
    assert signed_parabolic(signed_hyperbolic(value)).tolist() == pytest.approx([x, -x], rel=1e-9)
    assert signed_hyperbolic(value.numpy()) == pytest.approx(signed_hyperbolic(value).numpy(), abs=1e-12)
    assert signed_parabolic(value.numpy()) == pytest.approx(signed_parabolic(value).numpy(), rel=1e-12)
    assert signed_parabolic(signed_hyperbolic(float(x))) == pytest.approx(x, rel=1e-12)


def test_value_rescaling_in_single_precision() -> None:
    values = torch.linspace(-300, 300, 1_201)
    assert signed_parabolic(signed_hyperbolic(values)).numpy() == pytest.approx(values.numpy(), rel=1e-6, abs=1e-9)


def returns(reward: list[float], discount: list[float], value: list[float], last: list[bool]) -> list[float]:
    gains, keeps, worth = (torch.tensor(each, dtype=torch.float64).unsqueeze(1) for each in (reward, discount, value))
    found = lambda_returns(gains, keeps, worth, torch.tensor(last).unsqueeze(1), 0.5)
    return [float(row) for row in found[:, 0]]


def test_lambda_returns() -> None:
    found = returns([1, 0, 2], [0.9] * 3, [-99, 5, 6, 7], [False] * 4)
    assert found == pytest.approx([6.1458, 6.435, 8.3], abs=1e-4)
    assert found == pytest.approx([1 + 0.9 * (0.5 * 5 + 0.5 * 6.435), 0.9 * (0.5 * 6 + 0.5 * 8.3), 8.3], abs=1e-9)


def test_lambda_returns_at_termination_and_truncation() -> None:
    died = returns([1, 0, 2, 4], [0.9, 0, 0.9, 0.9], [-99, 5, 6, 7, 8], [False, False, True, False, False])
    assert died[:2] == pytest.approx([1 + 0.9 * 2.5, 0.0])
    ended = returns([1, 3, 2, 4], [0.9] * 4, [-99, 5, 6, 7, 8], [False, False, True, False, False])
    assert ended[1] == pytest.approx(3 + 0.9 * 6)  # the final observation's value, nothing of the next episode
    assert ended[0] == pytest.approx(1 + 0.9 * (2.5 + 0.5 * ended[1]))
    assert ended[3] == pytest.approx(4 + 0.9 * 8)
