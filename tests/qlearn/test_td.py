"""Targets and losses against numbers worked out by hand, through the replay's own cut."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qfleet.data import Rollout, Spec
from qfleet.qlearn import Rule, Scalar, StepView, Tensors, td_loss
from qfleet.qlearn.rules import Double, Max, NextValues
from qfleet.qlearn.td import td_target
from qfleet.replay import NStepReturn, Replay, StepCut, Uniform
from tests.replay.streams import one_lane

SPEC = Spec((1,), "float32", (2,))
RESET = 99.0  # the value of a first observation: a target that leaks into the next episode is far off


class Shown(nn.Module):
    """An observation is its own value, for both actions."""

    def forward(self, obs: Tensor) -> Tensor:
        return obs.expand(-1, 2)


class Table(nn.Module):
    """Observation i has the values in row i."""

    def __init__(self, values: list[list[float]]) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, obs: Tensor) -> Tensor:
        return self.values[obs.long().squeeze(1)]


def tensors(
    reward: list[float], discount: list[float], weight: list[float] | None = None, mask: list[list[bool]] | None = None
) -> Tensors:
    """Items that stand at observation 0, took action i % 2, and came to observation 1."""
    num = len(reward)
    return Tensors(
        obs=torch.zeros(num, 1),
        action=torch.arange(num) % 2,
        reward=torch.tensor(reward),
        discount=torch.tensor(discount),
        next_obs=torch.ones(num, 1),
        weight=torch.tensor(weight or [1.0] * num),
        next_mask=None if mask is None else torch.tensor(mask),
    )


def targets(stream: Rollout, rule: Rule) -> list[float]:
    """The 3-step target of every item of a stream, at gamma 0.9."""
    replay = Replay(SPEC, 1, 100, Uniform(), np.random.default_rng(0), cut=StepCut(3), n_step=NStepReturn(3, 0.9))
    replay.add(stream)
    batch = replay.read_batch(np.arange(len(replay)), np.ones(len(replay), np.float32))
    names = ("obs", "action", "reward", "discount", "next_obs", "weight")
    shown = Tensors(**{name: torch.from_numpy(getattr(batch, name)) for name in names})
    return target_of(rule, Shown(), Shown(), shown)


def target_of(rule: Rule, online: Any, target: Any, batch: Tensors) -> list[float]:
    """What a learner with these two networks aims at."""
    online_next = StepView().forward(online, batch, current=False, bootstrap=rule.needs_online)[1]
    found: list[float] = td_target(Scalar(), rule, StepView(), target, batch, online_next).tolist()
    return found


@pytest.mark.parametrize("rule", [Max(), Double()])
class TestGoldenReturns:
    def test_no_end(self, rule: Rule) -> None:
        stream = one_lane([0, 0, 0, 10], [1, 2, 4, 0], [1, 1, 1, 1], [False] * 4)
        assert targets(stream, rule) == pytest.approx([13.33])

    def test_terminated_at_the_second_reward(self, rule: Rule) -> None:
        stream = one_lane(
            [0, 0, 10, RESET, RESET], [1, 2, 0, 4, 4], [1, 0, 1, 1, 1], [False, False, True, False, False]
        )
        assert targets(stream, rule) == pytest.approx([2.8, 2.0])

    def test_truncated_at_the_second_reward(self, rule: Rule) -> None:
        stream = one_lane(
            [0, 0, 10, RESET, RESET], [1, 2, 0, 4, 4], [1, 1, 1, 1, 1], [False, False, True, False, False]
        )
        assert targets(stream, rule) == pytest.approx([10.9, 11.0])


def goal(rule: Rule, online: list[float], target: list[float], mask: list[bool] | None = None) -> float:
    """The target of one item with reward 1 and discount 0.5, given both networks' values of the next observation."""
    batch = tensors([1.0], [0.5], mask=None if mask is None else [mask])
    online_net, target_net = (Table([[0.0] * len(values), values]) for values in (online, target))
    return target_of(rule, online_net, target_net, batch)[0]


def test_max_takes_the_target_networks_best() -> None:
    assert goal(Max(), [1, 3, 2], [10, 20, 30]) == 1 + 0.5 * 30


def test_double_lets_the_online_network_choose_and_the_target_network_value() -> None:
    assert goal(Double(), [1, 3, 2], [10, 20, 30]) == 1 + 0.5 * 20


def test_forbidden_actions_are_not_bootstrapped_from() -> None:
    assert goal(Max(), [1, 3, 2], [10, 20, 30], [True, True, False]) == 1 + 0.5 * 20
    assert goal(Double(), [1, 3, 2], [10, 20, 30], [True, False, True]) == 1 + 0.5 * 30
    assert goal(Max(), [0, 0, 0], [-1, -2, -3], [False, False, True]) == 1 - 0.5 * 3  # not the mask's own zero


@pytest.mark.parametrize("rule", [Max(), Double()])
def test_a_final_state_without_allowed_actions_has_a_finite_target(rule: Rule) -> None:
    batch = tensors([2.0], [0.0], mask=[[False, False]])
    net = Table([[1.0, 2.0], [3.0, 4.0]])
    assert target_of(rule, net, net, batch) == [2.0]


def test_double_without_online_values_is_refused() -> None:
    with pytest.raises(ValueError, match="online"):
        Double()(NextValues(torch.zeros(1, 2)))


ERRORS = [0.0, 0.3, -0.999, 1.0, -1.5, 20.0]


def independent(kind: str, error: float) -> float:
    """Huber (1964) with kappa 1, or half the square."""
    if kind == "mse" or abs(error) <= 1:
        return error**2 / 2
    return abs(error) - 0.5


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_losses_and_priorities(kind: str) -> None:
    head = Scalar(kind)  # type: ignore[arg-type]
    out = torch.zeros(len(ERRORS), 2, requires_grad=True)
    action = torch.arange(len(ERRORS)) % 2
    loss, priority = head.loss(out, action, torch.tensor(ERRORS))
    assert loss.tolist() == pytest.approx([independent(kind, error) for error in ERRORS])
    assert priority.tolist() == pytest.approx([abs(error) for error in ERRORS])
    assert not priority.requires_grad
    loss.sum().backward()  # type: ignore[no-untyped-call]
    slope = -np.array(ERRORS) if kind == "mse" else -np.clip(ERRORS, -1, 1)
    expected = np.zeros((len(ERRORS), 2))
    expected[np.arange(len(ERRORS)), action.numpy()] = slope
    assert out.grad is not None
    assert out.grad.numpy() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_importance_weights_multiply_the_loss_of_their_item(kind: str) -> None:
    # Item 0 took action 0 (error 0.5), item 1 action 1 (error 3): one table entry each, so gradients tell them apart.
    net = Table([[0.0, 0.0], [0.0, 0.0]])
    batch = tensors([0.5, 3.0], [0.0, 0.0], weight=[0.25, 0.75])
    loss, priority, values = td_loss(Scalar(kind), Max(), StepView(), net, net, batch)  # type: ignore[arg-type]
    losses = [independent(kind, 0.5), independent(kind, 3.0)]
    assert loss.item() == pytest.approx((0.25 * losses[0] + 0.75 * losses[1]) / 2)
    assert priority.tolist() == pytest.approx([0.5, 3.0])  # what was learned from, not how much it counted
    assert values.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    loss.backward()  # type: ignore[no-untyped-call]
    slopes = [0.5, 1.0 if kind == "huber" else 3.0]
    assert net.values.grad is not None
    assert net.values.grad[0].tolist() == pytest.approx([-0.25 * slopes[0] / 2, -0.75 * slopes[1] / 2])


@pytest.mark.parametrize("rule", [Max(), Double()])
def test_no_gradient_flows_through_the_target(rule: Rule) -> None:
    online, target = Table([[0.0, 0.0], [5.0, 6.0]]), Table([[0.0, 0.0], [7.0, 8.0]])
    loss, _, _ = td_loss(Scalar(), rule, StepView(), online, target, tensors([1.0], [0.9]))  # type: ignore[arg-type]
    loss.backward()  # type: ignore[no-untyped-call]
    assert target.values.grad is None
    assert online.values.grad is not None
    assert online.values.grad[1].tolist() == [0.0, 0.0]
    assert online.values.grad[0, 0] != 0
