"""Importance weights and masks reach the loss in every branch: head x rule x view, and returns without a rule."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qfleet.data import Spec
from qfleet.learn import make_target
from qfleet.nets import QNet, make_net
from qfleet.plan.schema import (
    Algo,
    CategoricalHead,
    DoubleRule,
    Env,
    ImplicitHead,
    LstmMemory,
    MaxRule,
    MlpTorso,
    MunchausenRule,
    Net,
    NoMemory,
    Plan,
    QuantileHead,
    ScalarHead,
    SequencesView,
    StepsView,
)
from qfleet.qlearn import Tensors, make_head, make_rule, make_view, td_loss

HEADS = [ScalarHead(), CategoricalHead(atoms=5), QuantileHead(quantiles=4), ImplicitHead(fractions=4)]
RULES = [MaxRule(), DoubleRule(), MunchausenRule(temperature=0.5)]
VIEWS = [StepsView(), SequencesView(burn_in=1, length=2)]
NUM, ACTIONS = 4, 3


def make_plan(*parts: object, decoupled: bool = False) -> Plan:
    head, rule, view = parts
    memory = LstmMemory(size=4) if isinstance(view, SequencesView) else NoMemory()
    net = Net(torso=MlpTorso(sizes=(6,)), head=head, memory=memory, decoupled=decoupled)  # type: ignore[arg-type]
    return Plan(env=Env(id="none"), algo=Algo(rule=rule, view=view), net=net)  # type: ignore[arg-type]


CELLS = [make_plan(*axes) for axes in itertools.product(HEADS, RULES, VIEWS)]
NAMES = ["-".join(type(part).__name__ for part in axes) for axes in itertools.product(HEADS, RULES, VIEWS)]
CELLS += [make_plan(ScalarHead(), rule, StepsView(), decoupled=True) for rule in RULES]
NAMES += [f"decoupled-{type(rule).__name__}" for rule in RULES]
every_cell = pytest.mark.parametrize("plan", CELLS, ids=NAMES)


def spec_of(plan: Plan) -> Spec:
    return Spec((2,), "float32", (3, 2) if plan.net.decoupled else (ACTIONS,))


def random_batch(plan: Plan, net: QNet) -> Tensors:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight, action = torch.ones(NUM), torch.tensor([0, 1, 2, 0])
    if net.memory is None:
        return Tensors(draw(NUM, 2), action, draw(NUM), torch.full((NUM,), 0.9), weight, next_obs=draw(NUM, 2))
    rows = 4  # one of burn-in, two learned from, one to bootstrap from
    return Tensors(
        obs=draw(rows, NUM, 2),
        action=action.expand(rows, NUM),
        reward=draw(2, NUM),
        discount=torch.full((2, NUM), 0.9),
        weight=weight,
        gain=draw(rows, NUM),
        last=torch.zeros(rows, NUM, dtype=torch.bool),
        state=net.memory.initial_state(NUM),
        ahead=torch.tensor([[2], [3]]).expand(2, NUM),
    )


class Branch:
    """One cell's networks and batch; every call sees the same random numbers."""

    def __init__(self, plan: Plan) -> None:
        self.head, self.rule, self.view = make_head(plan, spec_of(plan)), make_rule(plan.algo), make_view(plan.algo)
        self.net = make_net(plan.net, spec_of(plan), normalize="off", seed=1)
        self.target = make_target(plan, make_net(plan.net, spec_of(plan), normalize="off", seed=2))
        self.batch = random_batch(plan, self.net)

    def loss(self, batch: Tensors, *, ruled: bool = True) -> Tensor:
        torch.manual_seed(3)
        loss, _, _ = td_loss(self.head, self.rule if ruled else None, self.view, self.net, self.target, batch)
        return loss

    def parts(self, **options: bool) -> Iterator[float]:
        """The loss with all weight on one item, item after item."""
        for item in range(NUM):
            alone = torch.zeros(NUM)
            alone[item] = 1.0
            yield self.loss(replace(self.batch, weight=alone), **options).item()


def check_weights(branch: Branch, *, ruled: bool) -> None:
    single = branch.loss(branch.batch, ruled=ruled)
    double = branch.loss(replace(branch.batch, weight=torch.full((NUM,), 2.0)), ruled=ruled)
    assert single.item() > 0
    assert double.item() == pytest.approx(2 * single.item(), rel=1e-5)
    weight = torch.tensor([0.1, 0.7, 0.4, 1.0])
    parts = list(branch.parts(ruled=ruled))
    assert len({round(part, 6) for part in parts}) == NUM
    mixed = branch.loss(replace(branch.batch, weight=weight), ruled=ruled)
    assert mixed.item() == pytest.approx(
        sum(w * part for w, part in zip(weight.tolist(), parts, strict=True)), rel=1e-5
    )


@every_cell
def test_importance_weights_multiply_their_own_items_loss(plan: Plan) -> None:
    check_weights(Branch(plan), ruled=True)


@every_cell
def test_importance_weights_multiply_their_own_items_gradient(plan: Plan) -> None:
    branch = Branch(plan)
    parameters = list(branch.net.parameters())

    def gradient(weight: Tensor) -> Tensor:
        found = torch.autograd.grad(branch.loss(replace(branch.batch, weight=weight)), parameters, allow_unused=True)
        return torch.cat([each.flatten() for each in found if each is not None])

    alone = [gradient(row) for row in torch.eye(NUM)]
    weight = torch.tensor([0.0, 0.5, 0.0, 2.0])
    assert torch.allclose(gradient(weight), 0.5 * alone[1] + 2.0 * alone[3], atol=1e-6)
    assert all(each.any() for each in alone)


@pytest.mark.parametrize("decoupled", [False, True])
def test_importance_weights_reach_returns_without_a_rule(decoupled: bool) -> None:
    check_weights(Branch(make_plan(ScalarHead(), MaxRule(), StepsView(), decoupled=decoupled)), ruled=False)


def with_mask(batch: Tensors, allowed: Tensor) -> Tensors:
    """Only these actions are allowed where the targets are read; everything is where the actions were taken."""
    everything = torch.ones(NUM, ACTIONS, dtype=torch.bool)
    if batch.next_obs is not None:
        return replace(batch, mask=everything, next_mask=allowed.expand(NUM, -1))
    return replace(batch, mask=allowed.expand(4, NUM, -1))


masked_cells = pytest.mark.parametrize("plan", CELLS[: -len(RULES)], ids=NAMES[: -len(RULES)])


@masked_cells
def test_masks_decide_what_is_bootstrapped_from(plan: Plan) -> None:
    branch = Branch(plan)
    free = branch.loss(branch.batch).item()
    assert branch.loss(with_mask(branch.batch, torch.ones(ACTIONS, dtype=torch.bool))).item() == free
    # Each single allowed action gives a target of its own; at least two of three differ from the free choice.
    losses = [branch.loss(with_mask(branch.batch, only)).item() for only in torch.eye(ACTIONS, dtype=torch.bool)]
    assert len({round(loss, 6) for loss in losses}) == ACTIONS
    assert sum(loss != pytest.approx(free, rel=1e-6) for loss in losses) >= 2


@pytest.mark.parametrize("view", VIEWS, ids=["steps", "sequences"])
@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_munchausen_uses_the_current_mask_too(head: object, view: object) -> None:
    branch = Branch(make_plan(head, MunchausenRule(temperature=0.5, floor=-50.0), view))
    taken = torch.nn.functional.one_hot(branch.batch.action, ACTIONS).bool()
    free = branch.loss(branch.batch).item()
    if branch.batch.next_obs is not None:
        found = branch.loss(replace(branch.batch, mask=taken)).item()
    else:
        everything = torch.ones(4, NUM, ACTIONS, dtype=torch.bool)
        everything[1] = taken[1]  # the first row learned from, from which nothing is bootstrapped
        found = branch.loss(replace(branch.batch, mask=everything)).item()
    assert found != pytest.approx(free, rel=1e-6)  # the only action there was earns no bonus
