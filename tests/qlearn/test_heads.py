"""Every head under every rule against plain Python, item by item: targets, losses, priorities, gradients.

Shapes: N items, A actions, K atoms, quantiles or fractions, D dimensions. All in double precision, equal to 1e-9.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qfleet.data import Array
from qfleet.qlearn import Head, Rule, Scalar, StepView, Tensors, td_loss
from qfleet.qlearn.distributional_heads import Categorical, ImplicitQuantiles, Quantile
from qfleet.qlearn.heads import Decoupled
from qfleet.qlearn.rules import Double, Max, Munchausen, NextValues
from qfleet.qlearn.td import td_target
from tests.qlearn import plain

NUM, ACTIONS, ATOMS = 7, 4, 6
COUNTS = (3, 2, 4)  # of the decoupled head: outputs past a dimension's own count must not matter
SOFT = plain.Soft(0.9, 0.3, -1.0)
RULES: dict[str, Rule] = {"max": Max(), "double": Double(), "munchausen": Munchausen(0.9, 0.3, -1.0)}
HEADS = ["scalar huber", "scalar mse", "categorical", "quantile", "implicit", "decoupled huber", "decoupled mse"]
# Masks speak of joint actions, so decoupled dimensions have none.
CELLS = [(name, masks) for name in HEADS for masks in (False, True) if not (masks and name.startswith("decoupled"))]


def make_head(name: str, rescale: bool) -> Head:
    kind, _, loss = name.partition(" ")
    heads: dict[str, Any] = {
        "scalar": lambda: Scalar(loss, rescale),  # type: ignore[arg-type]
        "decoupled": lambda: Decoupled(COUNTS, loss, rescale),  # type: ignore[arg-type]
        "categorical": lambda: Categorical(-3.0, 5.0, rescale),
        "quantile": lambda: Quantile(rescale),
        "implicit": lambda: ImplicitQuantiles(rescale),
    }
    head: Head = heads[kind]()
    return head


class Looked(nn.Module):
    """Observation i has the outputs in row i."""

    def __init__(self, out: Array) -> None:
        super().__init__()
        self.out = nn.Parameter(torch.from_numpy(out))

    def forward(self, obs: Tensor) -> Tensor:
        return self.out[obs]


def outputs(rng: np.random.Generator, kind: str, fractions: int = ATOMS) -> Array:
    """Outputs of 2 N observations: N acted on, N bootstrapped from."""
    if kind == "scalar":
        return rng.normal(0, 2, (2 * NUM, ACTIONS))
    if kind == "decoupled":
        return rng.normal(0, 2, (2 * NUM, len(COUNTS), max(COUNTS)))
    if kind == "implicit":
        taus = rng.random((2 * NUM, 1, fractions))
        return np.concatenate([rng.normal(0, 2, (2 * NUM, ACTIONS, fractions)), taus], 1)
    return rng.normal(0, 2, (2 * NUM, ACTIONS, ATOMS))


@dataclass
class Case:
    """A batch, two networks, and the same as lists."""

    kind: str
    head: Head
    online: Any  # what td_loss takes for a network
    target: Any
    batch: Tensors
    rescale: bool

    def row(self, net: Any, item: int, *, after: bool) -> Any:
        return net.out[item + NUM * after].tolist()

    def allowed(self, item: int, *, after: bool) -> list[bool] | None:
        mask = self.batch.next_mask if after else self.batch.mask
        return None if mask is None else mask[item].tolist()


def make_case(name: str, seed: int, *, masks: bool = False, rescale: bool = False) -> Case:
    rng, kind = np.random.default_rng(seed), name.partition(" ")[0]
    joint = math.prod(COUNTS) if kind == "decoupled" else ACTIONS
    flags = [torch.from_numpy(rng.random((NUM, ACTIONS)) < 0.6) for _ in range(2)] if masks else [None, None]
    action = torch.from_numpy(rng.integers(0, joint, NUM))
    if flags[0] is not None:
        flags[0][torch.arange(NUM), action] = True  # what was done was allowed
    discount = torch.from_numpy(rng.choice([0.0, 0.99, 0.99**3], NUM))  # ends, one step, three steps
    batch = Tensors(
        obs=torch.arange(NUM),
        action=action,
        reward=torch.from_numpy(rng.normal(0, 2, NUM)),
        discount=discount,
        weight=torch.from_numpy(rng.random(NUM)),
        next_obs=torch.arange(NUM) + NUM,
        mask=flags[0],
        next_mask=flags[1],
    )
    # Implicit networks of learner and target draw different numbers of fractions.
    online, target = (Looked(outputs(rng, kind, ATOMS + extra)) for extra in (0, 3))
    return Case(kind, make_head(name, rescale), online, target, batch, rescale)


# --- the same in plain Python ---


def ends_of(case: Case) -> tuple[float, float]:
    """The first and the last atom, on the scale of the outputs."""
    return (plain.shrunk(-3.0), plain.shrunk(5.0)) if case.rescale else (-3.0, 5.0)


def atoms_of(case: Case) -> list[float]:
    """The returns that atoms stand for."""
    low, high = ends_of(case)
    return [plain.worth(low + (high - low) * place / (ATOMS - 1), case.rescale) for place in range(ATOMS)]


def values_of(case: Case, out: Any) -> list[float]:
    """Expected return per action."""
    if case.kind == "categorical":
        atoms = atoms_of(case)
        return [sum(p * z for p, z in zip(plain.softmax(logits), atoms, strict=True)) for logits in out]
    if case.kind in ("quantile", "implicit"):
        rows = out[:-1] if case.kind == "implicit" else out
        return [sum(plain.worth(x, case.rescale) for x in row) / len(row) for row in rows]
    return [plain.worth(x, case.rescale) for x in out]


def expected_probs(rule: str, online: Any, target: Any, allowed: list[bool] | None) -> list[float]:
    if rule == "munchausen":
        return SOFT.chances(target, allowed)
    return plain.one_hot(target if rule == "max" else online, allowed)


def expected_target(case: Case, rule: str, item: int) -> Any:
    reward, discount = float(case.batch.reward[item]), float(case.batch.discount[item])
    online, target = (case.row(net, item, after=True) for net in (case.online, case.target))
    now, action = case.row(case.target, item, after=False), int(case.batch.action[item])
    if case.kind == "decoupled":
        return decoupled_target(case, rule, (online, target, now), action, reward, discount)
    seen, allowed = values_of(case, target), case.allowed(item, after=True)
    probs = expected_probs(rule, values_of(case, online), seen, allowed)
    if rule == "munchausen":
        reward += SOFT.bonus(values_of(case, now), action, case.allowed(item, after=False))
        reward += discount * SOFT.entropy(seen, allowed)
    return mixed_target(case, target, probs, reward, discount)


def mixed_target(case: Case, out: Any, probs: list[float], reward: float, discount: float) -> Any:
    def moved(value: float) -> float:
        return plain.shifted(value, reward, discount, case.rescale)

    if case.kind == "scalar":
        return moved(sum(p * q for p, q in zip(probs, values_of(case, out), strict=True)))
    if case.kind == "categorical":
        rows = [plain.softmax(logits) for logits in out]
        masses = [sum(p * row[place] for p, row in zip(probs, rows, strict=True)) for place in range(ATOMS)]
        return plain.projected([moved(atom) for atom in atoms_of(case)], masses, *ends_of(case), ATOMS)
    rows = [[plain.worth(x, case.rescale) for x in row] for row in (out[:-1] if case.kind == "implicit" else out)]
    return [moved(sum(p * row[k] for p, row in zip(probs, rows, strict=True))) for k in range(len(rows[0]))]


def choices_of(action: int) -> list[int]:
    """The last dimension counts fastest."""
    found: list[int] = []
    for count in reversed(COUNTS):
        action, choice = divmod(action, count)
        found.insert(0, choice)
    return found


def decoupled_target(case: Case, rule: str, outs: tuple[Any, Any, Any], action: int, r: float, d: float) -> float:
    online, target, now = (
        [values_of(case, row[:count]) for row, count in zip(out, COUNTS, strict=True)] for out in outs
    )
    total = bonus = entropy = 0.0
    for dimension, choice in enumerate(choices_of(action)):
        probs = expected_probs(rule, online[dimension], target[dimension], None)
        total += sum(p * q for p, q in zip(probs, target[dimension], strict=True)) / len(COUNTS)
        if rule == "munchausen":
            bonus += SOFT.bonus(now[dimension], choice, None) / len(COUNTS)
            entropy += SOFT.entropy(target[dimension], None) / len(COUNTS)
    return plain.shifted(total, r + bonus + d * entropy, d, case.rescale)


def expected_loss(case: Case, name: str, item: int, target: Any) -> tuple[float, float]:
    """Loss and priority of one item."""
    out, action = case.row(case.online, item, after=False), int(case.batch.action[item])
    if case.kind == "categorical":
        chances = plain.softmax(out[action])
        cross = -sum(p * math.log(q) for p, q in zip(target, chances, strict=True))
        return cross, cross + sum(p * math.log(p) for p in target if p > 0)
    if case.kind in ("quantile", "implicit"):
        fractions = out[-1] if case.kind == "implicit" else [(i + 0.5) / ATOMS for i in range(ATOMS)]
        error = sum(target) / len(target) - sum(out[action]) / len(out[action])
        return plain.quantile_huber_loss(out[action], target, fractions), abs(error)
    if case.kind == "decoupled":
        taken = values_of(case, [out[dimension][choice] for dimension, choice in enumerate(choices_of(action))])
        error = target - plain.shifted(sum(taken) / len(taken), 0.0, 1.0, case.rescale)
    else:
        error = target - out[action]
    return (plain.huber(error) if name.endswith("huber") else error**2 / 2), abs(error)


# --- the comparison ---


def found_targets(case: Case, rule: Rule) -> Tensor:
    online_next = StepView().forward(case.online, case.batch, current=False, bootstrap=rule.needs_online)[1]
    return td_target(case.head, rule, StepView(), case.target, case.batch, online_next)


@pytest.mark.parametrize("rescale", [False, True], ids=["", "rescaled"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("name", "masks"), CELLS)
def test_targets_losses_and_priorities(name: str, rule: str, masks: bool, rescale: bool) -> None:
    for seed in range(3):
        case = make_case(name, seed, masks=masks, rescale=rescale)
        targets = [expected_target(case, rule, item) for item in range(NUM)]
        assert found_targets(case, RULES[rule]).numpy() == pytest.approx(np.array(targets), abs=1e-9)
        pairs = [expected_loss(case, name, item, target) for item, target in enumerate(targets)]
        weighted = [loss * float(w) for (loss, _), w in zip(pairs, case.batch.weight, strict=True)]
        loss, priority, _ = td_loss(case.head, RULES[rule], StepView(), case.online, case.target, case.batch)
        assert loss.item() == pytest.approx(sum(weighted) / NUM, abs=1e-9)
        assert priority.tolist() == pytest.approx([p for _, p in pairs], abs=1e-9)
        assert not priority.requires_grad


@pytest.mark.parametrize("rescale", [False, True], ids=["", "rescaled"])
@pytest.mark.parametrize("name", HEADS)
def test_the_gradient_is_that_of_the_loss_with_a_constant_target(name: str, rescale: bool) -> None:
    case, step = make_case(name, 5, rescale=rescale), 1e-6
    goal = found_targets(case, Double())
    loss, _, _ = td_loss(case.head, Double(), StepView(), case.online, case.target, case.batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert case.target.out.grad is None
    assert case.online.out.grad is not None
    assert not case.online.out.grad[NUM:].any(), "a gradient went through what is bootstrapped from"
    rng, checked = np.random.default_rng(1), 0
    for place in rng.permutation(case.online.out[:NUM].numel())[:40]:
        at = np.unravel_index(place, case.online.out.shape)
        if case.kind == "implicit" and at[1] == ACTIONS:
            continue  # the fractions are no outputs
        ends = []
        for side in (step, -step):
            with torch.no_grad():
                case.online.out[at] += side
                each, _ = case.head.loss(case.online.out[:NUM], case.batch.action, goal)
                ends.append(float((each * case.batch.weight).mean()))
                case.online.out[at] -= side
        assert case.online.out.grad[at].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-7)
        checked += 1
    assert checked > 20


@pytest.mark.parametrize("rescale", [False, True], ids=["", "rescaled"])
@pytest.mark.parametrize("name", ["scalar huber", "categorical", "quantile", "implicit"])
def test_next_outputs_are_averaged_by_any_distribution_over_actions(name: str, rescale: bool) -> None:
    case, rng = make_case(name, 9, rescale=rescale), np.random.default_rng(3)
    probs = rng.dirichlet(np.ones(ACTIONS), NUM)
    out, batch = case.target.out.detach()[NUM:], case.batch
    found = case.head.target(out, torch.from_numpy(probs), batch.reward, batch.discount)
    for item in range(NUM):
        settings = (out[item].tolist(), probs[item].tolist(), float(batch.reward[item]), float(batch.discount[item]))
        assert found[item].numpy() == pytest.approx(np.array(mixed_target(case, *settings)), abs=1e-9)


@pytest.mark.parametrize("name", HEADS)
def test_values_are_returns_whatever_the_scale_of_the_outputs(name: str) -> None:
    case = make_case(name, 6, rescale=True)
    found = case.head.values(case.online.out.detach()[:NUM])
    for item in range(NUM):
        row = case.row(case.online, item, after=False)
        if case.kind != "decoupled":
            assert found[item].tolist() == pytest.approx(values_of(case, row), abs=1e-9)
            continue
        for dimension, count in enumerate(COUNTS):
            expected = values_of(case, row[dimension][:count])
            assert found[item, dimension, :count].tolist() == pytest.approx(expected, abs=1e-9)


def test_the_support_of_rescaled_values_reaches_from_the_lowest_to_the_highest_return() -> None:
    sure = torch.full((1, 2, 51), -1e4).double()
    sure[0, 0, 0] = sure[0, 1, -1] = 0.0
    assert Categorical(-20.0, 400.0, rescale=True).values(sure).tolist() == [pytest.approx([-20.0, 400.0])]


@pytest.mark.parametrize("rule", ["max", "double"])
def test_where_one_action_is_chosen_rescaled_scalar_targets_are_the_published_ones(rule: str) -> None:
    """h(R + discount * h^-1(max_a or argmax'd output)): Pohlen et al. 2018, eq. 1."""
    case = make_case("scalar mse", 8, rescale=True)
    found = found_targets(case, RULES[rule])
    for item in range(NUM):
        online, target = (case.row(net, item, after=True) for net in (case.online, case.target))
        best = max(target) if rule == "max" else target[online.index(max(online))]
        reward, discount = float(case.batch.reward[item]), float(case.batch.discount[item])
        assert found[item].item() == pytest.approx(plain.shrunk(reward + discount * plain.stretched(best)), abs=1e-9)


def test_decoupled_values_are_very_low_where_there_is_no_such_action() -> None:
    values = Decoupled(COUNTS).values(torch.full((2, 3, 4), 50.0))
    assert (values == 50.0).sum(2).tolist() == [list(COUNTS)] * 2
    assert values.argmax(2).max() < 4
    assert (values[values != 50.0] < -1e8).all()


def test_reported_decoupled_values_are_of_existing_actions() -> None:
    case = make_case("decoupled huber", 2)
    _, _, values = td_loss(case.head, Max(), StepView(), case.online, case.target, case.batch)
    real = [
        x
        for item in range(NUM)
        for row, count in zip(case.online.out[item].tolist(), COUNTS, strict=True)
        for x in row[:count]
    ]
    assert values.mean().item() == pytest.approx(sum(real) / len(real))


@pytest.mark.parametrize("name", ["scalar huber", "decoupled huber"])
def test_without_a_rule_the_rewards_are_the_targets(name: str) -> None:
    case = make_case(name, 4)
    loss, priority, _ = td_loss(case.head, None, StepView(), case.online, case.target, case.batch)
    pairs = [expected_loss(case, name, item, float(case.batch.reward[item])) for item in range(NUM)]
    weighted = [each * float(w) for (each, _), w in zip(pairs, case.batch.weight, strict=True)]
    assert loss.item() == pytest.approx(sum(weighted) / NUM, abs=1e-9)
    assert priority.tolist() == pytest.approx([p for _, p in pairs], abs=1e-9)


def test_munchausen_without_current_values_is_refused() -> None:
    with pytest.raises(ValueError, match="current"):
        Munchausen()(NextValues(torch.zeros(1, 2)))
