"""Resets, annealed returns, learning-rate decay, weight decay, dropout, and dormant units."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qfleet.act import Policy
from qfleet.data import Array, Spec
from qfleet.errors import UsageError
from qfleet.learn import (
    Anneal,
    Learner,
    NormalizationStatistics,
    RateLimiter,
    ReplaySource,
    dormant_units,
    make_learner,
)
from qfleet.learn.optimizer import FusedOptimizer, make_optimizer
from qfleet.learn.plasticity import make_anneal
from qfleet.nets import QNet, make_net, set_noise
from qfleet.plan import check, make_plan
from qfleet.plan.schema import (
    Adam,
    Algo,
    CopyTarget,
    Env,
    ExponentialAnneal,
    ImplicitHead,
    LstmMemory,
    MlpTorso,
    Net,
    NoReset,
    PeriodicReset,
    Plan,
    Radam,
    Rmsprop,
    SequencesView,
    Sgd,
)
from qfleet.plan.schema import BufferReplay as Buffer
from qfleet.replay import NStepReturn, Replay, SequenceCut, StepCut, make_cut, make_replay
from tests.learn.parts import VECTOR, batch, same
from tests.replay.streams import random_stream, rollout

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Adam | Radam | Rmsprop | Sgd] = {
    "adam": Adam(),
    "radam": Radam(),
    "rmsprop": Rmsprop(),
    "sgd": Sgd(momentum=0.9),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def small_net(seed: int, net: Net | None = None, normalize: str = "off") -> QNet:
    return make_net(net or Net(torso=MlpTorso(sizes=(16, 16))), VECTOR, normalize=normalize, seed=seed)


def learner_with(keep: float | None, optim: Adam | Radam | Rmsprop | Sgd | None = None, freeze: str = "") -> Learner:
    """A learner that resets after every third update, or never."""
    reset = NoReset() if keep is None else PeriodicReset(every_updates=3, keep=keep)
    algo = Algo(target=CopyTarget(every_updates=2), reset=reset)
    plan = Plan(env=Env(id="none"), algo=algo, optim=optim or Adam(), net=Net(torso=MlpTorso(sizes=(16, 16))))
    net = small_net(1, normalize="both")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not freeze or not name.startswith(freeze))
    return make_learner(plan, VECTOR, net, CPU, fresh=lambda number: small_net(100 + number))


def taught(learner: Learner, updates: int) -> Learner:
    for seed in range(updates):
        learner.update(batch(seed=seed))
    return learner


def parameters(net: nn.Module) -> dict[str, Array]:
    return {name: value.detach().numpy().copy() for name, value in net.named_parameters()}


# Resets


@pytest.mark.parametrize("keep", [0.0, 0.3, 1.0])
def test_a_reset_replaces_the_head_and_shrinks_the_torso_of_both_networks(keep: float) -> None:
    before, after = taught(learner_with(None), 3), taught(learner_with(keep), 3)
    fresh = parameters(small_net(101))
    for old, new in ((before.net, after.net), (before.target, after.target)):
        was, now = parameters(old), parameters(new)
        assert any(not np.array_equal(was[name], fresh[name]) for name in was)
        for name in was:
            share = 0.0 if name.startswith("head.") else keep
            assert now[name] == pytest.approx(share * was[name] + (1 - share) * fresh[name], abs=1e-7), name
    assert not np.array_equal(
        parameters(before.net)["torso.layers.0.linear.weight"], fresh["torso.layers.0.linear.weight"]
    )


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_after_a_reset_spectral_norms_are_right_at_once(keep: float) -> None:
    shape = Net(torso=MlpTorso(sizes=(32, 32, 32)), spectral_norm=True)
    algo = Algo(reset=PeriodicReset(every_updates=1, keep=keep))
    plan, fresh = Plan(env=Env(id="none"), algo=algo, net=shape), small_net(100, shape)
    with torch.no_grad():
        for parameter in fresh.torso.parameters():
            parameter.mul_(20.0)  # nothing like the weights they replace
    learner = make_learner(plan, VECTOR, small_net(1, shape), CPU, fresh=lambda number: fresh)
    policy = Policy(small_net(2, shape).eval(), learner.gradients.head, VECTOR.actions)
    policy.load_weights(1, learner.weights())
    learner.update(batch())
    assert policy.net.training is False
    for net in (policy.net, learner.net, learner.target):
        layers = [layer for layer in net.eval().modules() if hasattr(layer, "parametrizations")]
        found = [float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) for layer in layers]  # type: ignore[operator]
        assert found == pytest.approx([1.0, 1.0], abs=0.01)


@every_optimizer
@pytest.mark.parametrize("keep", [0.5, 1.0])
def test_only_moments_of_reset_parameters_become_zero(name: str, keep: float) -> None:
    before, after = taught(learner_with(None, OPTIMIZERS[name]), 3), taught(learner_with(keep, OPTIMIZERS[name]), 3)
    assert before.optimizer.moments
    for kind, moments in after.optimizer.moments.items():
        for place, parameter in enumerate(after.names):
            if keep < 1.0 or parameter.startswith("head."):
                assert not moments[place].any(), (kind, parameter)
            else:
                assert torch.equal(moments[place], before.optimizer.moments[kind][place])
                assert moments[place].any()


@every_optimizer
def test_a_reset_restarts_only_the_heads_step_count(name: str) -> None:
    """After a reset of the head the torso's steps continue unchanged, and the head's are first steps."""
    rng = torch.Generator().manual_seed(3)
    together = [torch.ones(4), torch.ones(3)]
    alone = [torch.ones(4), torch.ones(3)]
    both = make_optimizer(OPTIMIZERS[name], together)
    first, second = (make_optimizer(OPTIMIZERS[name], [values]) for values in alone)
    for step in range(20):
        if step == 9:
            torch._foreach_zero_([values[1] for values in both.moments.values()])
            second = make_optimizer(OPTIMIZERS[name], alone[1:])
        gradients = [torch.randn(values.shape, generator=rng) for values in together]
        both.step([gradient.clone() for gradient in gradients])
        first.step(gradients[:1])
        second.step(gradients[1:])
    assert all(torch.equal(mine, yours) for mine, yours in zip(together, alone, strict=True))


def test_every_reset_has_its_own_weights_and_is_reported() -> None:
    learner = learner_with(0.0)
    for number in (1, 2):
        reports = [learner.update(batch(seed=seed)) for seed in range(3)]
        assert [report.stats.get("reset") for report in reports] == [None, None, number]
        assert same(parameters(learner.net), parameters(small_net(100 + number)))
        assert same(parameters(learner.target), parameters(small_net(100 + number)))


def test_frozen_parts_and_statistics_stay_as_they_are() -> None:
    learner = learner_with(0.0, freeze="torso.")
    assert learner.net.normalize is not None
    learner.net.normalize.observe(torch.randn(9, 4))
    was, mean = parameters(learner.net), learner.net.normalize.mean.clone()
    now = parameters(taught(learner, 3).net)
    fresh = parameters(small_net(101))
    for name in was:
        assert np.array_equal(now[name], (was if name.startswith("torso.") else fresh)[name])
    assert torch.equal(learner.net.normalize.mean, mean)


def test_a_reset_writes_the_weights_in_place() -> None:
    learner = learner_with(0.0)
    shared = learner.net.state_dict()
    taught(learner, 3)
    assert torch.equal(shared["head.actions.out.weight"], small_net(101).state_dict()["head.actions.out.weight"])


def test_a_reset_needs_fresh_weights() -> None:
    plan = Plan(env=Env(id="none"), algo=Algo(reset=PeriodicReset()), net=Net(torso=MlpTorso(sizes=(8,))))
    with pytest.raises(ValueError, match="fresh weights"):
        make_learner(plan, VECTOR, small_net(1), CPU)


# Annealing


def anneal(every: int | None = None) -> Anneal:
    """BBF's: n from 10 to 3 and gamma from 0.97 to 0.997 over 10,000 updates."""
    return Anneal(NStepReturn(10, 0.97, True, True), NStepReturn(3, 0.997, True, True), 10_000, every)


@pytest.mark.parametrize(
    ("updates", "n", "gamma"),
    [
        (0, 10, 0.97),
        (5_000, 5, 1 - math.sqrt(0.03 * 0.003)),  # the geometric mean of both ends; sqrt(30) = 5.48
        (2_500, 7, 1 - 0.03**0.75 * 0.003**0.25),
        (9_999, 3, 1 - 0.003 * 10**1e-4),
        (10_000, 3, 0.997),
        (10_000_000, 3, 0.997),
    ],
)
def test_n_and_gamma_move_exponentially(updates: int, n: int, gamma: float) -> None:
    found = anneal().n_step(updates)
    assert (found.n, found.clip, found.rescale) == (n, True, True)
    assert found.gamma == pytest.approx(gamma, abs=1e-12)


def test_annealing_restarts_after_a_reset() -> None:
    cycle = anneal(every=20_000)
    assert [cycle.n_step(count).n for count in (0, 5_000, 19_999, 20_000, 25_000, 39_999)] == [10, 5, 3, 10, 5, 3]
    assert anneal().n_step(20_000).n == 3


def test_n_may_rise_too() -> None:
    rising = Anneal(NStepReturn(1, 0.9), NStepReturn(8, 0.99), 30)
    assert [rising.n_step(count).n for count in (0, 10, 20, 30)] == [1, 2, 4, 8]


ANNEALED = Algo(n_step=3, discount=0.99, anneal=ExponentialAnneal(n_step=6, discount=0.9, updates=4))


def source_of(algo: Algo, updates: int = 0, end: float = 0.0) -> ReplaySource:
    """A source with 30 rows of two lanes in it."""
    plan = Plan(env=Env(id="none", num=2), algo=algo, replay=Buffer(capacity=200))
    replay = make_replay(plan, VECTOR, 2, np.random.default_rng(0))
    batch_source = ReplaySource(
        replay,
        RateLimiter(Fraction(1), 0),
        NormalizationStatistics(small_net(0), 2, 0.99),
        8,
        make_anneal(algo, replay.n_step),
    )
    batch_source.insert(rollout(random_stream(np.random.default_rng(1), VECTOR, 2, 30, end)))
    for _ in range(updates):
        drawn = batch_source.next_batch(0)
        assert drawn is not None
        batch_source.after_update(drawn, np.ones(8, np.float32))
    return batch_source


def test_batches_use_the_annealed_n_and_gamma() -> None:
    batch_source = source_of(ANNEALED)
    for updates, n in ((0, 6), (1, 5), (2, 4), (3, 4), (4, 3), (5, 3)):
        drawn = batch_source.next_batch(0)
        assert drawn is not None
        gamma = 1 - 0.1 ** (1 - updates / 4) * 0.01 ** (updates / 4) if updates < 4 else 0.99
        assert drawn.discount == pytest.approx(np.full(8, gamma**n), rel=1e-5)
        batch_source.after_update(drawn, np.ones(8, np.float32))


def test_a_skipped_update_does_not_anneal() -> None:
    batch_source = source_of(ANNEALED)
    batch_source.next_batch(0)
    batch_source.next_batch(0)
    assert batch_source.replay.n_step.n == 6


def test_a_restored_source_has_the_annealed_fold() -> None:
    state = source_of(ANNEALED, updates=2).state_dict()
    back = source_of(ANNEALED)
    back.load_state_dict(state)
    assert back.replay.n_step == source_of(ANNEALED, updates=2).replay.n_step
    assert back.replay.n_step.n == 4
    assert back.replay.n_step.gamma == pytest.approx(1 - math.sqrt(0.1 * 0.01))


def test_items_are_ready_after_the_largest_n() -> None:
    assert make_cut(ANNEALED) == StepCut(6)
    assert make_cut(Algo(n_step=8, anneal=ANNEALED.anneal)) == StepCut(8)
    assert make_cut(Algo(n_step=8)) == StepCut(8)
    view = SequencesView(burn_in=2, length=5, stride=3)
    windows = make_cut(Algo(n_step=3, anneal=ANNEALED.anneal, view=view))
    assert isinstance(windows, SequenceCut)
    assert windows.rows == 2 + 5 + 6
    assert len(source_of(ANNEALED).replay) == (30 - 6) * 2


# The learning rate


@every_optimizer
def test_the_learning_rate_decays_linearly_to_zero(name: str) -> None:
    optim = type(OPTIMIZERS[name])(learning_rate=0.08, decay_updates=4)
    learner, rates, moved = learner_with(None, optim), [], []
    for seed in range(6):
        before = parameters(learner.net)
        learner.update(batch(seed=seed))
        rates.append(learner.optimizer.learning_rate)
        moved.append(not same(parameters(learner.net), before))
    assert rates == pytest.approx([0.08, 0.06, 0.04, 0.02, 0.0, 0.0])
    assert moved == [True, True, True, True, False, False]


def test_a_step_is_proportional_to_the_rate() -> None:
    plain, decayed = learner_with(None, Sgd(clip_norm=None)), learner_with(None, Sgd(clip_norm=None, decay_updates=4))
    decayed.updates = 1
    start = parameters(plain.net)
    for learner in (plain, decayed):
        learner.update(batch())
    name = "torso.layers.0.linear.weight"
    far, near = (parameters(learner.net)[name] - start[name] for learner in (plain, decayed))
    assert near == pytest.approx(0.75 * far, abs=1e-7)


# Weight decay and dropout


def shrunk(optimizer: FusedOptimizer, values: Tensor) -> float:
    """What is left of a weight after one step without a gradient."""
    before = float(values[0])
    optimizer.step([torch.zeros_like(values)])
    return float(values[0]) / before


@every_optimizer
def test_weight_decay_acts_in_every_optimizer(name: str) -> None:
    kind = type(OPTIMIZERS[name])
    for decay, less in ((0.0, False), (0.5, True)):
        values = torch.full((3,), 2.0)
        left = shrunk(make_optimizer(kind(learning_rate=0.1, weight_decay=decay), [values]), values)
        assert (left < 1.0) == less
        if name != "rmsprop" and less:  # whose step does not depend on how large the gradient is
            assert left == pytest.approx(1 - 0.1 * 0.5)


@every_optimizer
def test_weight_decay_reaches_the_learner(name: str) -> None:
    kind = type(OPTIMIZERS[name])
    with_decay, without = (
        sum(float((value**2).sum()) for value in parameters(taught(learner_with(None, optim), 20).net).values())
        for optim in (kind(learning_rate=1e-2, weight_decay=1.0), kind(learning_rate=1e-2))
    )
    assert with_decay < 0.95 * without


# Sleeping units


def silence(net: QNet, layer: str, units: int) -> None:
    """Let the first units of a layer never fire."""
    with torch.no_grad():
        part = net.get_submodule(layer)
        part.weight[:units] = 0.0  # type: ignore[operator]
        part.bias[:units] = -1.0  # type: ignore[operator]


def test_units_that_never_fire_are_counted() -> None:
    net, replay = small_net(2), source_of(Algo()).replay
    with torch.no_grad():
        for name, value in net.named_parameters():
            value.copy_(torch.full_like(value, 1.0) if name.endswith("bias") else torch.zeros_like(value))
    assert dormant_units(net, replay) == 0.0  # every unit fires, all alike
    silence(net, "torso.layers.0.linear", 4)
    assert dormant_units(net, replay) == pytest.approx(4 / 32)
    silence(net, "head.actions.hidden.linear", 16)
    assert dormant_units(net, replay) == pytest.approx(20 / 32)


def test_an_empty_replay_has_no_dormant_share() -> None:
    batch_source = source_of(Algo())
    batch_source.replay.clear()
    assert dormant_units(small_net(2), batch_source.replay) is None


def test_a_users_torso_leaves_the_heads_units() -> None:
    own = make_net(Net(), VECTOR, normalize="off", seed=0, torso=nn.Linear(4, 5))
    assert dormant_units(own, source_of(Algo()).replay) is None


class Restless(nn.Module):
    """A torso that draws whenever it looks."""

    def forward(self, obs: Tensor) -> Tensor:
        return obs + torch.rand_like(obs)


def test_a_torso_that_draws_random_numbers_changes_no_generator() -> None:
    own = make_net(Net(), VECTOR, normalize="off", seed=0, torso=Restless())
    drawn = torch.get_rng_state()
    dormant_units(own, source_of(Algo()).replay)
    assert torch.equal(torch.get_rng_state(), drawn)


def sequences(replay_state: tuple[int, ...]) -> Replay:
    spec = Spec((4,), "float32", (3,), state=replay_state)
    plan = Plan(env=Env(id="none", num=2), algo=Algo(view=SequencesView(burn_in=2, length=4, stride=3)))
    replay = make_replay(plan, spec, 2, np.random.default_rng(0))
    replay.add(rollout(random_stream(np.random.default_rng(1), spec, 2, 30, 0.1)))
    return replay


def test_a_memory_is_run_on_windows() -> None:
    net = small_net(2, Net(torso=MlpTorso(sizes=(16, 16)), memory=LstmMemory(size=8)))
    assert net.memory is not None
    share = dormant_units(net, sequences((net.memory.state_size,)))
    assert share is not None
    assert 0.0 <= share < 1.0


@pytest.mark.parametrize(
    "net",
    [Net(noisy=True), Net(head=ImplicitHead()), Net(dropout=0.5), Net(spectral_norm=True), Net(layer_norm=True)],
    ids=["noisy", "implicit", "dropout", "spectral", "layer_norm"],
)
def test_dormant_units_change_no_generator_and_no_weight(net: Net) -> None:
    made = small_net(2, Net(**{name: getattr(net, name) for name in net.__struct_fields__} | SMALL_TORSO))
    made.eval()
    set_noise(made, active=False)
    if isinstance(net.head, ImplicitHead):
        made.head.even = True  # type: ignore[assignment]
    replay = source_of(Algo()).replay
    drawn, chance = torch.get_rng_state(), replay.rng.bit_generator.state
    weights = {name: value.clone() for name, value in made.state_dict().items()}
    first = dormant_units(made, replay)
    assert dormant_units(made, replay) == first
    assert torch.equal(torch.get_rng_state(), drawn)
    assert str(replay.rng.bit_generator.state) == str(chance)
    assert all(torch.equal(value, weights[name]) for name, value in made.state_dict().items())


SMALL_TORSO: dict[str, Any] = {"torso": MlpTorso(sizes=(16, 16))}


# Settings that are refused, word for word

RESETS = {"algo.reset.type": "periodic", "algo.reset.every_updates": 1_000}
ANNEALS = {"algo.anneal.type": "exponential"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"algo.reset.type": "periodic", "algo.reset.every_updates": 99_999_999},
            "algo.reset.every_updates=99999999 (Python) has no effect: the run makes 24750 updates\n"
            "The first reset would come after the last update.\n"
            "Set algo.reset.every_updates to 6187 or so, or raise until.steps.",
        ),
        (
            {"algo.reset.every_updates": 7},
            "algo.reset.every_updates=7 has no effect (Python)\n"
            "algo.reset.type is off (default); every_updates belongs to periodic.\n"
            "Add algo.reset.type=periodic, or leave algo.reset.every_updates out.",
        ),
        (
            {**ANNEALS, "algo.anneal.n_step": 3, "algo.anneal.discount": 0.99},
            "algo.anneal.type=exponential (Python) has no effect: it starts at algo.n_step and algo.discount\n"
            "It would anneal from these values to the same values.\n"
            "Leave it out, or set algo.anneal.n_step or algo.anneal.discount to where it shall start.",
        ),
        (
            {**RESETS, **ANNEALS},
            "algo.anneal.updates=10000 (default) is not less than algo.reset.every_updates=1000 (Python)\n"
            "Annealing begins again after each reset, so algo.n_step and algo.discount would never be reached.\n"
            "Set algo.anneal.updates to 500 or so.",
        ),
        (
            {**ANNEALS, "algo.discount": 1.0},
            "algo.anneal.type=exponential (Python) does not go with algo.discount=1.0 (Python)\n"
            "1 - discount shrinks by a constant factor, which never ends at zero.\n"
            "Use algo.discount=0.999, or leave algo.anneal.type off.",
        ),
        (
            {**ANNEALS, "replay.type": "fresh", "algo.rule.type": "max"},
            "algo.anneal.type=exponential (Python) does not go with replay.type=fresh (Python)\n"
            "Q(lambda) returns weigh every number of steps, so there is no n to move: see replay.trace.\n"
            "Use replay.type=buffer, or leave algo.anneal.type off.",
        ),
        (
            {**ANNEALS, "algo.anneal.n_step": 50, "replay.capacity": 400},
            "replay.capacity=400 (Python) cannot hold algo.anneal.n_step=50 (Python) for env.num=8 (default)\n"
            "Every environment needs room for the steps that one n-step return spans.\n"
            "Set replay.capacity to 408 or more.",
        ),
        (
            {**ANNEALS, "algo.anneal.discount": 1.0},
            "algo.anneal.discount=1.0 is not valid (Python)\n"
            "algo.anneal.discount must be a number of at least 0 and below 1.\n"
            "Write for example algo.anneal.discount=0.97",
        ),
    ],
)
def test_refused_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan("X-v0", overrides=settings)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({**RESETS, "algo.reset.every_updates": 24_700}, "the last reset comes 50 updates before the end"),
        ({**ANNEALS, "algo.anneal.updates": 24_751}, "algo.anneal.updates=24751, but the run makes 24750 updates"),
        ({"optim.decay_updates": 24_000}, "the learning rate is 0 from update 24000 on: optim.decay_updates=24000"),
    ],
)
def test_settings_with_a_note(settings: dict[str, Any], note: str) -> None:
    assert [said for said in check(make_plan("X-v0", overrides=settings)) if said.startswith(note)]


@pytest.mark.parametrize(
    "settings",
    [
        RESETS,
        {**RESETS, "algo.reset.every_updates": 18_000},
        {**ANNEALS, "algo.anneal.updates": 24_750},
        {"optim.decay_updates": 24_750},
        {**RESETS, **ANNEALS, "algo.anneal.updates": 999},
    ],
)
def test_settings_without_a_note(settings: dict[str, Any]) -> None:
    assert check(make_plan("X-v0", overrides=settings)) == []
