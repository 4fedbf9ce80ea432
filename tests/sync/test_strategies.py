"""Strategies: many learners equal one where they should, and all find the optimum of a quadratic."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qfleet.learn.optimizer import FusedAdam, FusedSgd, clip_gradients, gradient_norm
from qfleet.plan.sync_schema import (
    AdmmSync,
    AllreduceSync,
    Codec,
    EasgdSync,
    Fp16Codec,
    Int8Codec,
    NoCodec,
    SignCodec,
    TopKCodec,
    sends_steps,
)
from qfleet.sync.average import CodedMean
from qfleet.sync.codecs import Exact, TopK
from qfleet.sync.comm import Comm, NoComm
from qfleet.sync.gradient_rule import Push, Shard, shard_bounds
from qfleet.sync.make import make_sync
from qfleet.sync.strategies import (
    Admm,
    Allreduce,
    Easgd,
    Gossip,
    Local,
    OptimizerStep,
    StepAveraging,
    Sync,
    copy_into,
    flatten_tensors,
)
from tests.sync.parts import ThreadComm, run_ranks

BATCH, UPDATES = 24, 12
Make = Callable[[OptimizerStep, Comm, Sequence[Tensor], Sequence[Tensor]], Sync]


def make_net() -> nn.Module:
    net, rng = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)).double(), torch.Generator().manual_seed(3)
    for parameter in net.parameters():  # not by torch's own generator, which all threads share
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
    return net


def batch_of(update: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(update)
    return tuple(torch.randn(BATCH, width, generator=rng, dtype=torch.float64) for width in (5, 3))  # type: ignore[return-value]


def stepping(optimizer: Any, limit: float | None = None) -> OptimizerStep:
    def step(gradients: list[Tensor]) -> float:
        norm = float(gradient_norm(gradients))
        clip_gradients(gradients, norm, limit)
        optimizer.step(gradients)
        return norm

    return step


def learn(comm: Comm, make: Make, optim: str, limit: float | None = 0.5) -> Tensor:
    """Train on this rank's share of every batch; returns the final weights."""
    net = make_net()
    weights = [parameter.detach() for parameter in net.parameters()]
    optimizer: Any = FusedAdam(weights, 1e-2) if optim == "adam" else FusedSgd(weights, 1e-1, momentum=0.9)
    moments = [moment for kind in optimizer.moments.values() for moment in kind]
    sync = make(stepping(optimizer, limit), comm, weights, moments)
    for update in range(UPDATES):
        obs, goal = (part.chunk(comm.world_size)[comm.rank] for part in batch_of(update))
        loss = (net(obs) - goal).square().mean()
        sync.step(list(torch.autograd.grad(loss, list(net.parameters()))))
    return flatten_tensors(weights)


class Solo:
    """A single learner."""

    def __init__(self, step: OptimizerStep) -> None:
        self.step = step


def make_solo(step: OptimizerStep, comm: Comm, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> Sync:
    return Solo(step)


def make_allreduce(step: OptimizerStep, comm: Comm, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> Sync:
    return Allreduce(step, CodedMean(comm, Exact()))


def make_local(every: int) -> Make:
    return lambda step, comm, weights, moments: Local(step, CodedMean(comm, Exact()), weights, moments, every=every)


@pytest.mark.parametrize("optim", ["adam", "sgd"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_learners_with_a_share_of_the_batch_equal_one_with_all_of_it(size: int, optim: str) -> None:
    single = learn(NoComm(), make_solo, optim)
    for weights in run_ranks(size, lambda comm: learn(comm, make_allreduce, optim)):
        assert torch.allclose(weights, single, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_one_local_step_at_a_time_equals_averaging_gradients(size: int) -> None:
    single = learn(NoComm(), make_solo, "sgd", limit=None)
    for weights in run_ranks(size, lambda comm: learn(comm, make_local(1), "sgd", limit=None)):
        assert torch.allclose(weights, single, rtol=0, atol=1e-12)


def learn_by_shards(workers: int, shards: int, optim: str) -> Tensor:
    """All workers push their shares of every batch to a synchronous server; returns the final weights."""
    net = make_net()
    weights = flatten_tensors([parameter.detach() for parameter in net.parameters()])
    bounds = shard_bounds(len(weights), shards)
    shard_list = [shard_of(weights[begin:end], workers, optim) for begin, end in bounds]
    for update in range(UPDATES):
        copy_into(
            torch.cat([shard.weights for shard in shard_list]), [parameter.data for parameter in net.parameters()]
        )
        for worker in range(workers):
            obs, goal = (part.chunk(workers)[worker] for part in batch_of(update))
            loss = (net(obs) - goal).square().mean()
            gradient = flatten_tensors(torch.autograd.grad(loss, list(net.parameters())))
            for shard, (begin, end) in zip(shard_list, bounds, strict=True):
                shard.push(Push((worker, 0, update), update, gradient[begin:end]), 0.0)
    return torch.cat([shard.weights for shard in shard_list])


def shard_of(weights: Tensor, workers: int, optim: str) -> Shard:
    block = weights.clone()
    optimizer: Any = FusedAdam([block], 1e-2) if optim == "adam" else FusedSgd([block], 1e-1, momentum=0.9)
    return Shard(block, lambda gradient, factor: optimizer.step([gradient]), workers)


@pytest.mark.parametrize("optim", ["adam", "sgd"])
@pytest.mark.parametrize(("workers", "shards"), [(2, 1), (3, 2), (4, 5)])
def test_a_synchronous_server_equals_one_learner(workers: int, shards: int, optim: str) -> None:
    single = learn(NoComm(), make_solo, optim, limit=None)
    assert torch.allclose(learn_by_shards(workers, shards, optim), single, rtol=0, atol=1e-12)


@pytest.mark.parametrize("every", [1, 4])
def test_weights_are_equal_after_each_synchronisation(every: int) -> None:
    first, *others = run_ranks(3, lambda comm: learn(comm, make_local(every), "adam"))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("size", [2, 3])
def test_steps_of_sgd_through_all_of_top_k_equal_one_learner(size: int) -> None:
    def make(step: OptimizerStep, comm: Comm, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> Sync:
        return StepAveraging(step, CodedMean(comm, TopK(1.0)), weights)

    single = learn(NoComm(), make_solo, "sgd", limit=None)  # its step is linear in the gradient
    for weights in run_ranks(size, lambda comm: learn(comm, make, "sgd", limit=None)):
        assert torch.allclose(weights, single, rtol=0, atol=1e-12)


def test_weights_include_the_learners_own_compression_error() -> None:
    """Weights are the mean of all steps made, minus the other learners' part of the compression error."""

    def act(comm: ThreadComm) -> tuple[Tensor, Tensor, Tensor]:
        point, made, rng = torch.zeros(40).double(), torch.zeros(40).double(), torch.Generator().manual_seed(comm.rank)
        own = list[Tensor]()

        def step(gradients: list[Tensor]) -> float:
            point.sub_(gradients[0])
            own.append(-gradients[0])
            return 1.0

        sync = StepAveraging(step, CodedMean(comm, TopK(0.1)), [point])
        for _ in range(9):
            sync.step([torch.randn(40, generator=rng, dtype=torch.float64)])
            made = made + own[-1]
        assert sync.average.error is not None
        return point, made, sync.average.error

    found = run_ranks(3, act)
    mean, mean_error = sum(made for _, made, _ in found) / 3, sum(error for *_, error in found) / 3
    for weights, _, error in found:
        assert torch.allclose(weights, mean - mean_error + error / 3, rtol=0, atol=1e-6)  # numbers are sent in float32


def test_no_learner_moves_if_one_had_no_finite_gradient() -> None:
    weights = [torch.ones(3)]

    def optimizer_step(gradients: list[Tensor]) -> float:
        weights[0].sub_(gradients[0])
        return 1.0

    def average(made: Tensor) -> Tensor:
        return torch.full_like(made, torch.nan)  # as a learner without a finite gradient sends

    steps = StepAveraging(optimizer_step, average, weights)  # type: ignore[arg-type]
    assert math.isnan(steps.step([torch.ones(3)]))
    assert torch.equal(weights[0], torch.ones(3))


def test_delayed_steps_do_not_overshoot() -> None:
    """One number in twenty is sent at a time: a learner that ignores its delayed steps overshoots."""

    def act(comm: ThreadComm) -> Tensor:
        point = torch.full((20,), 5.0).double()
        sync = StepAveraging(stepping(FusedSgd([point], 0.15)), CodedMean(comm, TopK(0.05)), [point])
        distances = list[Tensor]()
        for _ in range(400):
            sync.step([point.clone()])
            distances.append(point.abs().max())
        return torch.stack(distances[200:]).max()

    assert max(map(float, run_ranks(2, act))) < 1e-3


def test_coarse_codecs_send_steps_and_others_gradients() -> None:
    sent = {
        codec: sends_steps(AllreduceSync(codec=codec))
        for codec in (NoCodec(), Fp16Codec(), TopKCodec(share=1.0), TopKCodec(), Int8Codec(), SignCodec())
    }
    assert list(sent.values()) == [False, False, False, True, True, True]
    assert not sends_steps(AllreduceSync(codec=SignCodec(), send="gradients"))


def test_top_k_of_all_is_bit_equal_to_no_codec() -> None:
    def make(step: OptimizerStep, comm: Comm, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> Sync:
        return Allreduce(step, CodedMean(comm, TopK(1.0)))

    exact = run_ranks(2, lambda comm: learn(comm, make_allreduce, "adam"))
    assert torch.equal(run_ranks(2, lambda comm: learn(comm, make, "adam"))[0], exact[0])


def test_sum_is_world_size_times_the_mean() -> None:
    def make(step: OptimizerStep, comm: Comm, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> Sync:
        return Allreduce(step, CodedMean(comm, Exact()), total=True)

    norms = run_ranks(
        2, lambda comm: make(lambda gradients: float(gradients[0][0]), comm, [], []).step([torch.ones(1)])
    )
    assert norms == [2.0, 2.0]


# A quadratic: learner i has its optimum at goal_i with curvature h_i; the common one is sum(h goal) / sum(h).

CURVES = torch.tensor(
    [[1.0, 4.0, 0.5], [2.0, 1.0, 1.5], [1.0, 1.0, 1.0], [0.5, 2.0, 1.0], [1.5, 0.5, 2.0]], dtype=torch.float64
)
GOALS = torch.tensor(
    [[1.0, -2.0, 3.0], [-1.0, 0.5, 2.0], [0.0, 0.0, 0.0], [4.0, -1.0, 1.0], [-3.0, 2.0, 0.5]], dtype=torch.float64
)


def optimum(size: int) -> Tensor:
    return (CURVES * GOALS)[:size].sum(0) / CURVES[:size].sum(0)


def descend(comm: ThreadComm, make: Make, rate: float, steps: int, falling: bool = False) -> tuple[Tensor, Sync]:
    """Gradient descent on this rank's quadratic; with `falling` the rate goes to zero, as gossip needs."""
    point = torch.full((3,), 5.0).double()
    optimizer = FusedSgd([point], rate)
    sync = make(stepping(optimizer), comm, [point], [])
    for at in range(steps):
        optimizer.learning_rate = rate / (1.0 + 0.05 * at) if falling else rate
        sync.step([CURVES[comm.rank] * (point - GOALS[comm.rank])])
    return point, sync


@pytest.mark.parametrize("size", [2, 3])
def test_admm_finds_the_optimum_and_its_residuals_vanish(size: int) -> None:
    def act(comm: ThreadComm) -> Admm:
        def make(step: OptimizerStep, comm: Comm, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> Sync:
            return Admm(step, CodedMean(comm, Exact()), weights, every=20, rho=1.0)

        _, sync = descend(comm, make, 0.1, 4_000)
        assert isinstance(sync, Admm)
        return sync

    for sync in run_ranks(size, act):
        assert torch.allclose(sync.consensus, optimum(size), atol=1e-6)
        assert max(sync.residuals) < 1e-6


@pytest.mark.parametrize("size", [2, 3])
def test_the_elastic_centre_finds_the_optimum(size: int) -> None:
    def act(comm: ThreadComm) -> Tensor:
        def make(step: OptimizerStep, comm: Comm, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> Sync:
            return Easgd(step, CodedMean(comm, Exact()), weights, every=1, pull=0.9)

        _, sync = descend(comm, make, 0.2, 6_000, falling=True)
        assert isinstance(sync, Easgd)
        return sync.centre

    for centre in run_ranks(size, act):
        assert torch.allclose(centre, optimum(size), atol=2e-2)


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_gossip_finds_the_optimum(size: int) -> None:
    def act(comm: ThreadComm) -> Tensor:
        def make(step: OptimizerStep, comm: Comm, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> Sync:
            return Gossip(step, comm, weights)

        return descend(comm, make, 0.2, 6_000, falling=True)[0]

    for found in run_ranks(size, act):
        assert torch.allclose(found, optimum(size), atol=2e-2)


def test_gossip_averages_with_both_neighbours_only() -> None:
    def act(comm: ThreadComm) -> float:
        point = torch.tensor([float(10**comm.rank)])
        Gossip(lambda gradients: 0.0, comm, [point]).step([torch.zeros(1)])
        return 3.0 * float(point)

    assert run_ranks(5, act) == pytest.approx([10_011.0, 111.0, 1_110.0, 11_100.0, 11_001.0])


def test_admm_logs_its_residuals_now_and_then() -> None:
    def act(comm: ThreadComm) -> list[tuple[str, dict[str, Any]]]:
        events = []

        def make(step: OptimizerStep, comm: Comm, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> Sync:
            log_event = lambda kind, **fields: events.append((kind, fields))  # noqa: E731
            return make_sync(AdmmSync(every_updates=2), comm, step, weights, moments, seed=0, log_event=log_event)

        descend(comm, make, 0.1, 500)
        return events

    for events in run_ranks(2, act):
        assert [(kind, fields["meetings"]) for kind, fields in events] == [("admm", 1), ("admm", 101), ("admm", 201)]
        first, last = events[0][1], events[-1][1]
        assert first["primal"] > 1e3 * last["primal"]
        assert first["dual"] > 1e3 * last["dual"]
        assert first["rho"] == 0.01


def test_an_outer_rate_of_one_without_momentum_is_plain_averaging() -> None:
    def outer(step: OptimizerStep, comm: Comm, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> Sync:
        average = CodedMean(comm, Exact())
        return Local(step, average, weights, moments, every=3, outer_rate=1.0, outer_momentum=0.0)

    plain = run_ranks(2, lambda comm: learn(comm, make_local(3), "adam"))
    assert torch.equal(run_ranks(2, lambda comm: learn(comm, outer, "adam"))[0], plain[0])


@pytest.mark.parametrize("codec", [TopKCodec(share=0.34), SignCodec(), Int8Codec()], ids=["top-k", "sign", "int8"])
def test_admm_finds_the_optimum_through_a_codec(codec: Codec) -> None:
    """The change since the last round is sent: adding the compression error of a distance would count it twice."""

    def act(comm: ThreadComm) -> Tensor:
        def make(step: OptimizerStep, comm: Comm, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> Sync:
            plan = AdmmSync(every_updates=20, rho=1.0, codec=codec, check_every_rounds=0)
            return make_sync(plan, comm, step, weights, moments, seed=1)

        _, sync = descend(comm, make, 0.1, 2_000)
        assert isinstance(sync, Admm)
        return sync.consensus

    for consensus in run_ranks(2, act):
        assert torch.allclose(consensus, optimum(2), atol=1e-3)


@pytest.mark.parametrize(
    "codec",
    [pytest.param(TopKCodec(share=0.34), marks=pytest.mark.slow, id="top-k"), pytest.param(Int8Codec(), id="int8")],
)
def test_the_elastic_centre_finds_the_optimum_through_a_codec(codec: Codec) -> None:
    def act(comm: ThreadComm) -> Tensor:
        def make(step: OptimizerStep, comm: Comm, weights: Sequence[Tensor], moments: Sequence[Tensor]) -> Sync:
            plan = EasgdSync(every_updates=1, codec=codec, check_every_rounds=0)
            return make_sync(plan, comm, step, weights, moments, seed=1)

        _, sync = descend(comm, make, 0.2, 6_000, falling=True)
        assert isinstance(sync, Easgd)
        return sync.centre

    for centre in run_ranks(2, act):
        assert torch.allclose(centre, optimum(2), atol=3e-2)


@pytest.mark.parametrize(("primal", "dual", "rho"), [(11.0, 1.0, 2.0), (1.0, 11.0, 0.5), (9.0, 1.0, 1.0)])
def test_rho_adapts_to_the_residuals(primal: float, dual: float, rho: float) -> None:
    sync = Admm(lambda gradients: 0.0, CodedMean(NoComm(), Exact()), [torch.zeros(2)], every=1, rho=1.0)
    sync.dual = torch.ones(2)
    sync.adapt_rho(primal, dual)
    assert sync.rho == rho
    assert (sync.dual * sync.rho).tolist() == [1.0, 1.0]  # the scaled dual variable stays the same


def test_the_outer_step_is_nesterovs() -> None:
    weight = torch.zeros(1)

    def step(gradients: list[Tensor]) -> float:
        weight.add_(1.0)  # every round moves by one from the last anchor
        return 0.0

    sync = Local(step, CodedMean(NoComm(), Exact()), [weight], [], every=1, outer_rate=0.5, outer_momentum=0.9)
    velocity = 0.0
    expected = 0.0
    for _ in range(3):
        sync.step([])
        velocity = 0.9 * velocity + 1.0
        expected += 0.5 * (1.0 + 0.9 * velocity)
        assert float(weight) == pytest.approx(expected)
