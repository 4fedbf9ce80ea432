"""Every combination of what a plan can choose makes one finite update that uses weights, masks and priorities.

Shapes: N items, M rows learned from, W rows of a window, A actions.
"""

import itertools
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from qfleet.data import Array, Batch, Sequences, Spec
from qfleet.errors import UsageError
from qfleet.learn import FreshSource, Learner, make_batch_source, make_learner
from qfleet.nets import make_net
from qfleet.plan import check
from qfleet.plan.schema import (
    Adam,
    Algo,
    AverageTarget,
    CategoricalHead,
    CopyTarget,
    DoubleRule,
    Env,
    FreshReplay,
    GruMemory,
    ImpalaTorso,
    ImplicitHead,
    LstmMemory,
    MaxRule,
    MinatarTorso,
    MlpTorso,
    MunchausenRule,
    NatureTorso,
    Net,
    NoMemory,
    Plan,
    PrioritizedSampler,
    QuantileHead,
    Radam,
    Rmsprop,
    ScalarHead,
    SequencesView,
    Sgd,
    StepsView,
    UniformSampler,
)
from qfleet.plan.schema import BufferReplay as Buffer
from qfleet.plan.validate.pairs import PAIRS
from qfleet.qlearn import Tensors, td_loss
from qfleet.qlearn.rules import Munchausen
from qfleet.qlearn.td import td_target
from qfleet.replay import Prioritized, Replay, make_replay
from tests.replay.streams import random_stream, rollout

# An odd batch: equally many errors up and down, each cut to one by Huber, would leave a bias where it was.
LANES, ROWS, BATCH = 2, 16, 7

HEADS = {
    "scalar": ScalarHead(),
    "categorical": CategoricalHead(atoms=7, low=-30.0, high=30.0),
    "quantile": QuantileHead(quantiles=5),
    "implicit": ImplicitHead(fractions=4, target_fractions=3, act_fractions=5, cosines=6),
}
# Warm enough that no policy is sure of itself: every bonus can be told from zero.
RULES = {"max": MaxRule(), "double": DoubleRule(), "munchausen": MunchausenRule(temperature=1.0)}
VIEWS = {"steps": StepsView(), "sequences": SequencesView(burn_in=1, length=3, stride=1)}
MEMORIES = {"off": NoMemory(), "lstm": LstmMemory(size=5), "gru": GruMemory(size=5)}
SAMPLERS: dict[str, UniformSampler | PrioritizedSampler] = {
    "uniform": UniformSampler(),
    "prioritized": PrioritizedSampler(),
    "actor": PrioritizedSampler(initial="actor"),
}
FRESH = FreshReplay(rows=5, epochs=2, minibatches=2)
SPECS = {
    "open": Spec((4,), "float32", (3,)),
    "masked": Spec((4,), "float32", (3,), masked=True),
    "joint": Spec((4,), "float32", (3, 2)),
    "frames": Spec((36, 36), "uint8", (3,), stack=4),
    "grid": Spec((4, 10, 10), "uint8", (3,)),
}

# Plans


def make_plan(
    head: str = "scalar",
    rule: str = "double",
    view: str = "steps",
    memory: str = "off",
    sampler: str = "prioritized",
    n: int = 1,
    *,
    optim: Adam | Radam | Rmsprop | Sgd | None = None,
    algo: dict[str, Any] | None = None,
    **net: Any,
) -> Plan:
    """A plan of small parts by their names; `algo` and `net` say more."""
    more = {"target": CopyTarget(every_updates=1), **(algo or {})}
    replay = FRESH if sampler == "fresh" else Buffer(capacity=20, sampler=SAMPLERS[sampler])
    return Plan(
        env=Env(id="none", num=LANES),
        algo=Algo(rule=RULES[rule], view=VIEWS[view], n_step=n, batch_size=BATCH, **more),  # type: ignore[arg-type]
        optim=optim or Adam(),
        net=Net(**{"torso": MlpTorso(sizes=(8,)), "head": HEADS[head], "memory": MEMORIES[memory], **net}),
        replay=replay,
    )


def legal(plan: Plan) -> bool:
    """By the one list of what does not go together."""
    return not any(pair.when(plan) for pair in PAIRS)


def cells(*axes: list[Any]) -> list[tuple[Any, ...]]:
    """Every combination whose plan is legal; the plan's axes come first."""
    return [cell for cell in itertools.product(*axes) if legal(make_plan(*cell[:6]))]


# Parts


def make_parts(plan: Plan, spec: Spec) -> tuple[Learner, Replay]:
    """A learner and a replay with some experience."""
    net = make_net(plan.net, spec, normalize="off", seed=1)
    if net.memory is not None:
        spec = replace(spec, state=(net.memory.state_size,))
    learner = make_learner(plan, spec, net, torch.device("cpu"))
    replay = make_replay(plan, spec, LANES, np.random.default_rng(2))
    values = replay.store.value is not None
    replay.add(rollout(random_stream(np.random.default_rng(1), spec, LANES, ROWS, end=0.3, values=values)))
    return learner, replay


def draw(replay: Replay) -> Batch | Sequences:
    batch = replay.sample(BATCH)
    assert batch is not None
    return batch


# What every update must do


def check_update(learner: Learner, batch: Batch | Sequences) -> Array:
    """One update: finite, every weight moves, the target follows; returns the priorities [N]."""
    torch.manual_seed(0)
    before = learner.model_arrays()
    report = learner.update(batch)
    assert np.isfinite(report.loss)
    assert report.loss > 0
    assert learner.is_finite()
    after = learner.model_arrays()
    for name in learner.names:
        assert not np.array_equal(before[name], after[name]), f"{name} did not move"
    assert report.priority.shape == (len(batch.ids),)
    assert np.isfinite(report.priority).all()
    assert (report.priority > 0).all()
    return report.priority


def check_target(learner: Learner, equal: bool) -> None:
    """After an update the target has moved: all the way, or part of it."""
    online, target = learner.model_arrays(), learner.optim_arrays()
    for name in learner.names:
        assert np.array_equal(online[name], target[f"target.{name}"]) == equal, f"{name}: not as told"


def check_priorities(replay: Replay, ids: Array, priority: Array) -> None:
    """What the learner found is what the sampler now draws by."""
    replay.update(ids, priority)
    sampler = replay.sampler
    if isinstance(sampler, Prioritized):
        newest = dict(zip(ids.tolist(), priority.tolist(), strict=True))  # of an item drawn twice the last one stays
        leaves = sampler.leaves[np.array(list(newest)) % sampler.capacity]
        assert leaves == pytest.approx((np.array(list(newest.values())) + sampler.eps) ** sampler.alpha)
        assert replay.head > len(newest)
        assert sampler.draw(64, replay.rng)[1].min() < 1  # and by which it weighs


def check_weights(learner: Learner, batch: Batch | Sequences) -> None:
    """Items of weight zero send no gradient and cost nothing, the others do."""
    weight = np.zeros(BATCH, np.float32)
    weight[: BATCH // 2] = 1.0
    tensors = learner.to_tensors(replace(batch, weight=weight))
    tensors.obs.requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(learner, tensors), tensors.obs)
    sizes = gradient.abs().sum([axis for axis in range(gradient.ndim) if axis != gradient.ndim - 2])  # [N]
    assert (sizes[: BATCH // 2] > 0).any()
    assert (sizes[BATCH // 2 :] == 0).all()
    nothing = learner.update(replace(batch, weight=np.zeros(BATCH, np.float32)))
    assert nothing.loss == 0


def loss_of(learner: Learner, tensors: Tensors) -> torch.Tensor:
    return td_loss(
        learner.gradients.head, learner.gradients.rule, learner.gradients.view, learner.net, learner.target, tensors
    )[0]


def check_masks(learner: Learner, batch: Batch | Sequences) -> None:
    """Targets read the one action that is allowed: which one matters wherever something is read."""
    first, second = (goals(learner, only(batch, action)) for action in (0, 1))
    tensors = learner.to_tensors(batch)
    matters = learner.gradients.view.rewards_and_discounts(tensors)[1] != 0
    if isinstance(learner.gradients.rule, Munchausen):  # which also reads the action taken, and what it could have been
        matters |= learner.gradients.view.actions(tensors) < 2
    differs = (first - second).abs().flatten(1).amax(1) > 1e-6 if first.ndim > 1 else (first - second).abs() > 1e-6
    assert matters.any()
    assert torch.equal(differs, matters)
    if not isinstance(learner.gradients.rule, Munchausen):
        mixed, other = by_place(batch)
        reads = torch.from_numpy(other).view(-1, *[1] * (first.ndim - 1))
        assert torch.equal(goals(learner, mixed), torch.where(reads, second, first))
    losses = []
    for action in (0, 1):
        torch.manual_seed(0)
        losses.append(loss_of(learner, learner.to_tensors(only(batch, action))).item())
    assert losses[0] != losses[1]


def by_place(batch: Batch | Sequences) -> tuple[Batch | Sequences, Array]:
    """Another action allowed here than there; and which targets [M] read where it is the second one."""
    one, other = only(batch, 0), only(batch, 1)
    if isinstance(one, Batch) and isinstance(other, Batch):
        return replace(one, next_mask=other.next_mask), np.ones(BATCH, np.bool_)
    assert isinstance(one, Sequences)
    assert one.mask is not None
    assert other.mask is not None
    odd = np.arange(len(one.mask)) % 2 == 1
    mask = np.where(odd[:, None, None], other.mask, one.mask)
    return replace(one, mask=mask), one.ahead.ravel() % 2 == 1


def goals(learner: Learner, batch: Batch | Sequences) -> torch.Tensor:  # [M, ...]
    """The targets, under the same noise each time."""
    parts = learner.gradients
    rule = parts.rule
    assert rule is not None
    tensors = learner.to_tensors(batch)
    torch.manual_seed(0)
    _, online_next = parts.view.forward(learner.net, tensors, current=False, bootstrap=rule.needs_online)
    return td_target(parts.head, rule, parts.view, learner.target, tensors, online_next)


def only(batch: Batch | Sequences, action: int) -> Batch | Sequences:
    """The batch with this one action allowed everywhere."""
    assert batch.mask is not None
    mask = np.zeros_like(batch.mask)
    mask[..., action] = True
    if isinstance(batch, Sequences):
        return replace(batch, mask=mask)
    assert batch.next_mask is not None
    return replace(batch, mask=mask, next_mask=mask)


# The axes

SAMPLED = cells(
    list(HEADS), list(RULES), list(VIEWS), list(MEMORIES), list(SAMPLERS), [1, 3], [False, True], [False, True]
)


@pytest.mark.parametrize("world", ["open", "masked"])
@pytest.mark.parametrize("cell", SAMPLED, ids=lambda cell: "-".join(map(str, cell)))
def test_every_combination_learns(cell: tuple[Any, ...], world: str) -> None:
    *axes, dueling, noisy = cell
    learner, replay = make_parts(make_plan(*axes, dueling=dueling, noisy=noisy), SPECS[world])
    batch = draw(replay)
    priority = check_update(learner, batch)
    check_target(learner, equal=True)
    check_priorities(replay, batch.ids, priority)
    check_weights(learner, batch)
    if world == "masked":
        check_masks(learner, batch)


@pytest.mark.parametrize("world", ["open", "masked"])
@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("target", [CopyTarget(every_updates=1), AverageTarget(tau=0.5)], ids=["copy", "average"])
@pytest.mark.parametrize("optim", [Adam(), Radam(), Rmsprop(), Sgd()], ids=["adam", "radam", "rmsprop", "sgd"])
def test_every_optimiser_target_and_loss(
    optim: Adam | Radam | Rmsprop | Sgd,
    target: CopyTarget | AverageTarget,
    rule: str,
    loss: Literal["huber", "mse"],
    world: str,
) -> None:
    learner, replay = make_parts(make_plan(rule=rule, optim=optim, algo={"loss": loss, "target": target}), SPECS[world])
    batch = draw(replay)
    check_priorities(replay, batch.ids, check_update(learner, batch))
    check_target(learner, equal=isinstance(target, CopyTarget))


STYLES: dict[str, dict[str, Any]] = {
    "rescaled": {"algo": {"rescale": True}},
    "layer-norm": {"layer_norm": True},
    "spectral-norm": {"spectral_norm": True},
    "dropout": {"dropout": 0.2},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("rule", RULES)
def test_every_style_of_layers_and_scale(rule: str, head: str, memory: str, style: str) -> None:
    view = "steps" if memory == "off" else "sequences"
    learner, replay = make_parts(make_plan(head, rule, view, memory, "prioritized", 3, **STYLES[style]), SPECS["open"])
    batch = draw(replay)
    check_priorities(replay, batch.ids, check_update(learner, batch))
    check_weights(learner, batch)


TORSOS = {
    "frames-nature": NatureTorso(width=8),
    "frames-impala": ImpalaTorso(pool=2, width=8),
    "grid-minatar": MinatarTorso(channels=3, width=8),
}


@pytest.mark.parametrize(("head", "memory"), [*((head, "off") for head in HEADS), ("quantile", "lstm")])
@pytest.mark.parametrize("torso", TORSOS)
def test_pictures_of_every_kind(torso: str, head: str, memory: str) -> None:
    view = "steps" if memory == "off" else "sequences"
    plan = make_plan(head, "double", view, memory, "prioritized", 3, torso=TORSOS[torso], dueling=True, noisy=True)
    learner, replay = make_parts(plan, SPECS[torso.partition("-")[0]])
    batch = draw(replay)
    check_priorities(replay, batch.ids, check_update(learner, batch))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("noisy", [False, True], ids=["still", "noisy"])
@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "dueling"])
@pytest.mark.parametrize("rule", RULES)
def test_decoupled_dimensions(rule: str, dueling: bool, noisy: bool, sampler: str, n: int) -> None:
    plan = make_plan("scalar", rule, "steps", "off", sampler, n, dueling=dueling, noisy=noisy, decoupled=True)
    learner, replay = make_parts(plan, SPECS["joint"])
    batch = draw(replay)
    check_priorities(replay, batch.ids, check_update(learner, batch))
    check_target(learner, equal=True)
    check_weights(learner, batch)


@pytest.mark.parametrize("world", ["open", "masked", "joint"])
@pytest.mark.parametrize("noisy", [False, True], ids=["still", "noisy"])
@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "dueling"])
def test_fresh_experience(dueling: bool, noisy: bool, world: str) -> None:
    plan = make_plan(sampler="fresh", dueling=dueling, noisy=noisy, layer_norm=True, decoupled=world == "joint")
    learner, replay = make_parts(plan, SPECS[world])
    batch_source = make_batch_source(plan, replay, learner, LANES)
    assert isinstance(batch_source, FreshSource)
    batch = batch_source.next_batch(0)
    assert batch is not None
    check_update(learner, batch)


# What does not go together

AXES = (
    list(HEADS), list(RULES), list(VIEWS), list(MEMORIES), [*SAMPLERS, "fresh"], [1, 3], [False, True], [False, True]
)  # fmt: skip


def refused(head: str, view: str, memory: str, sampler: str, rescale: bool, decoupled: bool) -> bool:
    """What the issue and the papers rule out, said once more and independently of the list."""
    sequences, recurrent, fresh = view == "sequences", memory != "off", sampler == "fresh"
    if fresh and (sequences or recurrent or rescale or head != "scalar"):
        return True
    if decoupled and (recurrent or head != "scalar"):
        return True
    return sequences != recurrent or (sampler == "actor" and head == "categorical")


def test_exactly_these_combinations_are_refused() -> None:
    wrong: list[str] = []
    for head, rule, view, memory, sampler, n, rescale, decoupled in itertools.product(*AXES):
        plan = make_plan(head, rule, view, memory, sampler, n, algo={"rescale": rescale}, decoupled=decoupled)
        if legal(plan) == refused(head, view, memory, sampler, rescale, decoupled):
            wrong.append(f"{head} {rule} {view} {memory} {sampler} n{n} rescale={rescale} decoupled={decoupled}")
    assert not wrong


def test_every_refused_combination_says_why_and_every_other_one_passes() -> None:
    for head, view, memory, sampler in itertools.product(HEADS, VIEWS, MEMORIES, [*SAMPLERS, "fresh"]):
        plan = make_plan(head, "max", view, memory, sampler)
        if legal(plan):
            check(plan)
            continue
        with pytest.raises(UsageError) as refusal:
            check(plan)
        assert refusal.value.what
        assert refusal.value.why in {pair.reason for pair in PAIRS if pair.when(plan)}
        assert refusal.value.fix


def test_every_pair_of_these_settings_refuses_something() -> None:
    paths = {"algo.view.type", "net.memory.type", "replay.type", "net.head.type", "algo.rescale", "net.decoupled"}
    ours = [pair for pair in PAIRS if {pair.first, pair.second} <= paths | {"replay.sampler.initial"}]
    axes = (HEADS, VIEWS, MEMORIES, [*SAMPLERS, "fresh"], [False, True], [False, True])
    plans = [
        make_plan(head, "max", view, memory, sampler, algo={"rescale": rescale}, decoupled=decoupled)
        for head, view, memory, sampler, rescale, decoupled in itertools.product(*axes)
    ]
    assert len(ours) >= 9
    assert [pair for pair in ours if not any(pair.when(plan) for plan in plans)] == []
