"""CQL and behaviour cloning: hand-computed numbers for every head, and gradients against finite differences."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qfleet.learn import Learner, make_learner
from qfleet.nets import Chain, make_net
from qfleet.plan.schema import (
    Algo,
    CategoricalHead,
    CloningOfflineLoss,
    ConservativeOfflineLoss,
    DoubleRule,
    Env,
    ImplicitHead,
    MaxRule,
    MlpTorso,
    MunchausenRule,
    Net,
    Plan,
    QuantileHead,
    ScalarHead,
)
from qfleet.qlearn import CloningLoss, ConservativeLoss, Head, Scalar, StepView, Tensors, make_rule, td_loss
from qfleet.qlearn.distributional_heads import Categorical, ImplicitQuantiles, Quantile
from qfleet.qlearn.heads import Decoupled
from qfleet.qlearn.offline import recorded_action_loss
from tests.learn.parts import VECTOR, batch

GAP = math.log(1 + math.exp(0.5))  # values 0 and 0.5, the first action was recorded: 0.974077
HEADS: dict[str, tuple[Head, Tensor]] = {
    "scalar": (Scalar(), torch.tensor([[0.0, 0.5]])),
    "categorical": (Categorical(-1.0, 1.0), torch.tensor([[[0.25, 0.5, 0.25], [0.1, 0.3, 0.6]]]).log()),
    "quantile": (Quantile(), torch.tensor([[[-1.0, 1.0], [0.25, 0.75]]])),
    "implicit": (ImplicitQuantiles(), torch.tensor([[[-1.0, 1.0], [0.25, 0.75], [0.3, 0.9]]])),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_term_is_of_the_mean_values_of_every_head(name: str) -> None:
    head, out = HEADS[name]
    assert recorded_action_loss(head, out, torch.tensor([0]), None).item() == pytest.approx(0.974077, abs=1e-6)
    assert recorded_action_loss(head, out, torch.tensor([1]), None).item() == pytest.approx(GAP - 0.5, abs=1e-6)


def test_actions_that_were_not_allowed_do_not_count() -> None:
    out = torch.tensor([[0.0, 0.5, 7.0]])
    mask = torch.tensor([[True, True, False]])
    assert recorded_action_loss(Scalar(), out, torch.tensor([0]), mask).item() == pytest.approx(GAP, abs=1e-6)


def test_of_decoupled_values_it_is_that_of_all_joint_actions() -> None:
    """Joint actions of 3 x 2 choices, worth the mean over both dimensions; action 4 is (2, 0)."""
    out = torch.tensor([[[1.0, 2.0, 0.5], [0.3, -1.0, 99.0]]])
    joint = torch.tensor([[(a + b) / 2 for a in (1.0, 2.0, 0.5) for b in (0.3, -1.0)]])
    expected = recorded_action_loss(Scalar(), joint, torch.tensor([4]), None).item()
    assert recorded_action_loss(Decoupled((3, 2)), out, torch.tensor([4]), None).item() == pytest.approx(expected)


def known_batch(weight: float = 1.0) -> Tensors:
    """One item: action 0 was recorded, and the return after it was 1.5."""
    one = torch.ones(1)
    return Tensors(torch.zeros(1, 1), torch.tensor([0]), 1.5 * one, 0 * one, weight * one, next_obs=torch.zeros(1, 1))


def test_cql_adds_the_term_to_the_loss_of_td_errors() -> None:
    """Values 1, 2, 0.5 and target 1.5: 0.5 x 0.5^2 + 2 x (ln(e + e^2 + e^0.5) - 1) = 0.125 + 2 x 1.464369."""
    out = torch.tensor([[1.0, 2.0, 0.5]], requires_grad=True)
    parts = (Scalar("mse"), make_rule(Algo(rule=MaxRule())), StepView(), lambda obs: out, lambda obs: out)
    loss, priority, values = ConservativeLoss(2.0)(*parts, known_batch())
    assert loss.item() == pytest.approx(3.053738, abs=1e-6)
    assert priority.tolist() == [0.5]  # of the TD error alone
    assert values.tolist() == [[1.0, 2.0, 0.5]]
    (gradient,) = torch.autograd.grad(loss, out)
    # 2 x softmax, minus 2 and minus the TD error 0.5 at the recorded action
    assert gradient[0].tolist() == pytest.approx([2 * 0.231224 - 2.5, 2 * 0.628532, 2 * 0.140244], abs=1e-5)
    assert ConservativeLoss(2.0)(*parts, known_batch(0.25))[0].item() == pytest.approx(3.053738 / 4, abs=1e-6)
    plain = td_loss(*parts, known_batch())
    assert ConservativeLoss(0.0)(*parts, known_batch())[0].item() == plain[0].item() == 0.125


def test_cloning_is_the_cross_entropy_alone() -> None:
    out = torch.tensor([[1.0, 2.0, 0.5]], requires_grad=True)
    parts = (Scalar(), make_rule(Algo()), StepView(), lambda obs: out, lambda obs: out)
    loss, priority, _ = CloningLoss()(*parts, known_batch())
    assert loss.item() == pytest.approx(1.464369, abs=1e-6)
    assert priority.tolist() == [loss.item()]
    expected = torch.nn.functional.cross_entropy(out, torch.tensor([0]))
    assert loss.item() == pytest.approx(expected.item())


def test_a_cloned_policy_is_that_of_the_data() -> None:
    """Two states, in which action 2 and action 1 were recorded most often."""
    learner = learner_for(Algo(offline=CloningOfflineLoss()), ScalarHead())
    items = batch(num=8)
    items.obs[:4], items.obs[4:] = 1.0, -1.0
    items.action[:] = [2, 2, 2, 0, 1, 1, 0, 1]
    for _ in range(300):
        learner.update(items)
    with torch.no_grad():
        out = learner.net(torch.from_numpy(items.obs[[0, 4]]))
    assert out.argmax(1).tolist() == [2, 1]
    assert out.softmax(1)[0, 2].item() == pytest.approx(0.75, abs=0.05)


def learner_for(algo: Algo, head: Any) -> Learner:
    net = Net(torso=MlpTorso(sizes=(16,)), head=head)
    plan = Plan(env=Env(id="none"), algo=algo, net=net)
    return make_learner(plan, VECTOR, make_net(net, VECTOR, normalize="off", seed=1), torch.device("cpu"))


KINDS = [
    (ScalarHead(), MaxRule()),
    (ScalarHead(), MunchausenRule()),
    (CategoricalHead(atoms=5), DoubleRule()),
    (QuantileHead(quantiles=4), DoubleRule()),
    (ImplicitHead(fractions=4), DoubleRule()),
]


@pytest.mark.parametrize(("head", "rule"), KINDS)
def test_the_learners_gradient_includes_the_term(head: Any, rule: Any) -> None:
    """Autograd computes it: the gradients written by hand are those of TD errors only."""
    alpha = 0.7
    plain = learner_for(Algo(rule=rule), head)
    both = learner_for(Algo(rule=rule, offline=ConservativeOfflineLoss(alpha)), head)
    assert not isinstance(both.gradients.online_forward, Chain)
    items = batch(num=8)
    tensors = both.to_tensors(items)
    torch.manual_seed(5)
    _, _, _, without = plain.gradients.compute(plain.to_tensors(items))
    torch.manual_seed(5)
    _, _, _, found = both.gradients.compute(tensors)
    torch.manual_seed(5)
    out = both.net(tensors.obs)
    gap = recorded_action_loss(both.gradients.head, out, tensors.action, None)
    more = torch.autograd.grad(alpha * (gap * tensors.weight).mean(), both.parameters)
    assert any(not np.allclose(each.numpy(), 0) for each in more)
    for one, td, extra in zip(found, without, more, strict=True):
        torch.testing.assert_close(one, td + extra, rtol=1e-4, atol=1e-5)
