"""Updates divided into tasks have the same bits on one and on two threads, whoever makes which task."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from qfleet.build.resolve import resolve
from qfleet.build.threads import operation_threads, torch_threads
from qfleet.data import Batch, Spec
from qfleet.learn import Learner, make_learner
from qfleet.learn.gradients.batch_halves import MIN_CHAIN_ITEMS, MIN_ITEMS
from qfleet.nets import Chain, make_net
from qfleet.plan.schema import (
    Algo,
    CategoricalHead,
    DoubleRule,
    Env,
    FreshReplay,
    ImpalaTorso,
    ImplicitHead,
    InlineRuntime,
    MinatarTorso,
    MlpTorso,
    MunchausenRule,
    NatureTorso,
    Net,
    Plan,
)
from qfleet.system.parallel_tasks import Contention
from tests.learn.parts import same

NATURE = Spec((84, 84), "uint8", (6,), stack=4)
MINATAR = Spec((4, 10, 10), "uint8", (3,))
SQUARE = Spec((16, 16), "uint8", (6,), stack=2)
KINDS: dict[str, tuple[Spec, dict[str, Any]]] = {
    "plain": (NATURE, {"net": Net(torso=NatureTorso())}),
    "double": (NATURE, {"net": Net(torso=NatureTorso()), "algo": Algo(rule=DoubleRule())}),
    "munchausen": (NATURE, {"net": Net(torso=NatureTorso(width=64)), "algo": Algo(rule=MunchausenRule())}),
    "normalised, whole returns": (NATURE, {"net": Net(torso=NatureTorso(), layer_norm=True), "replay": FreshReplay()}),
    "duelling": (NATURE, {"net": Net(torso=NatureTorso(width=64), dueling=True), "algo": Algo(rule=DoubleRule())}),
    "categorical": (NATURE, {"net": Net(torso=NatureTorso(width=64), head=CategoricalHead())}),
    "noisy": (MINATAR, {"net": Net(torso=MinatarTorso(), noisy=True)}),
    "implicit": (MINATAR, {"net": Net(torso=MinatarTorso(), head=ImplicitHead())}),
    "minatar": (MINATAR, {"net": Net(torso=MinatarTorso()), "algo": Algo(rule=DoubleRule())}),
    "residual": (SQUARE, {"net": Net(torso=ImpalaTorso(pool=2, width=32)), "algo": Algo(rule=DoubleRule())}),
    "small": (Spec((4,), "float32", (2,)), {"net": Net(torso=MlpTorso(sizes=(32, 32)))}),
}


def pictures(spec: Spec, num: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.integers(0, 256, (2, num, *spec.input_shape)).astype(spec.dtype)
    reward, weight = rng.random((2, num)).astype(np.float32)
    action = rng.integers(0, spec.num_actions, num)
    return Batch(obs, action, reward, np.full(num, 0.9, np.float32), next_obs, weight, np.arange(num))


def learner_of(kind: str, threads: int, precision: str) -> Learner:
    spec, parts = KINDS[kind]
    runtime = InlineRuntime(threads=threads, precision=precision, parallel="tasks")  # type: ignore[arg-type]
    plan = Plan(env=Env(id="none"), runtime=runtime, **parts)
    return make_learner(plan, spec, make_net(plan.net, spec, normalize="off", seed=1), torch.device("cpu"))


@pytest.fixture(autouse=True)
def one_thread_per_operation() -> Iterator[None]:
    with torch_threads(1):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_give_the_bits_of_one(kind: str, precision: str) -> None:
    spec, _ = KINDS[kind]
    states = []
    for threads in (1, 2):
        torch.manual_seed(0)
        learner = learner_of(kind, threads, precision)
        assert (learner.gradients.tasks is not None) == (threads == 2)
        assert isinstance(learner.gradients.online_forward, Chain) or learner.gradients.batch_halves is not None
        reports = [learner.update(pictures(spec, num, seed)) for seed, num in enumerate((32, 32, 33, 8, 64, 129))]
        if learner.gradients.tasks is not None:
            assert learner.gradients.tasks.thread is not None  # the other thread took part
            learner.gradients.tasks.close()
        states.append((reports, learner.model_arrays(), learner.optim_arrays()))
    (reports, model, optim), (others, other_model, other_optim) = states
    assert [report.loss for report in reports] == [report.loss for report in others]
    assert all(np.array_equal(one.priority, other.priority) for one, other in zip(reports, others, strict=True))
    assert same(model, other_model)
    assert same(optim, other_optim)


def test_a_thread_that_pauses_in_between_changes_nothing() -> None:
    spec, _ = KINDS["double"]
    plain = learner_of("double", 1, "float32")
    other = learner_of("double", 2, "float32")
    assert other.gradients.tasks is not None
    for seed in range(6):
        other.gradients.tasks.contention = Contention(paused_until=float("inf") if seed % 2 else 0.0)
        assert plain.update(pictures(spec, 32, seed)).loss == other.update(pictures(spec, 32, seed)).loss
    assert same(plain.model_arrays(), other.model_arrays())
    other.gradients.tasks.close()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "double", "munchausen", "normalised, whole returns", "duelling", "residual"])
def test_the_halves_of_a_large_batch_add_up_to_it(kind: str, precision: str) -> None:
    spec, _ = KINDS[kind]
    learner = learner_of(kind, 2, precision)
    assert learner.gradients.batch_halves is not None
    assert learner.gradients.tasks is not None
    batch = learner.to_tensors(pictures(spec, MIN_CHAIN_ITEMS + 1, 0))
    loss, priority, values, gradients = learner.gradients.compute(batch)
    learner.gradients.batch_halves = None
    whole_loss, whole_priority, whole_values, whole = learner.gradients.compute(batch)
    rtol, atol = (1e-4, 1e-6) if precision == "float32" else (0.05, 1e-3)
    for half, other in ((loss, whole_loss), (priority, whole_priority), (values, whole_values)):
        torch.testing.assert_close(half, other, rtol=rtol, atol=atol)
    assert len(gradients) == len(whole)
    for gradient, other in zip(gradients, whole, strict=True):
        assert (gradient - other).norm() <= (1e-5 if precision == "float32" else 0.02) * other.norm()
    learner.gradients.tasks.close()


def test_gradients_of_halves_are_reported_from_the_last_to_the_first() -> None:
    spec, _ = KINDS["double"]
    learner = learner_of("double", 1, "float32")
    reported = dict[int, torch.Tensor]()
    batch = learner.to_tensors(pictures(spec, MIN_CHAIN_ITEMS, 0))
    gradients = learner.gradients.compute(batch, lambda index, gradient: reported.update({index: gradient}))[3]
    assert list(reported) == list(range(len(gradients)))[::-1]
    assert all(reported[index] is gradient for index, gradient in enumerate(gradients))


@pytest.mark.parametrize(
    ("kind", "halved"),
    [
        ("plain", True),
        ("duelling", True),
        ("categorical", True),
        ("residual", True),
        ("minatar", False),
        ("small", False),
    ],
)
def test_which_learners_halve_their_batches(kind: str, halved: bool) -> None:
    learner = learner_of(kind, 1, "float32")
    assert (learner.gradients.batch_halves is not None) == halved


@pytest.mark.parametrize(("kind", "smallest"), [("plain", MIN_CHAIN_ITEMS), ("residual", MIN_ITEMS)])
def test_small_batches_are_not_halved(kind: str, smallest: int) -> None:
    spec, _ = KINDS[kind]
    learner = learner_of(kind, 1, "float32")
    assert learner.gradients.batch_halves is not None
    assert not learner.gradients.batch_halves.fits(learner.to_tensors(pictures(spec, smallest - 1, 0)))
    assert learner.gradients.batch_halves.fits(learner.to_tensors(pictures(spec, smallest, 0)))


def test_parts_are_computed_apart_only_where_that_keeps_the_bits() -> None:
    learner = learner_of("plain", 1, "float32")
    chain = learner.gradients.online_forward
    assert isinstance(chain, Chain)
    obs = torch.from_numpy(pictures(NATURE, 32, 0).obs)
    halves = torch.cat([chain.outputs(part) for part in obs.chunk(2)])
    assert chain.has_independent_rows(obs) == torch.equal(halves, chain.outputs(obs))
    chain.independent_rows[obs.shape] = False
    assert not chain.has_independent_rows(obs)


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (Net(torso=NatureTorso()), "tasks"),
        (Net(torso=NatureTorso(), dueling=True), "tasks"),
        (Net(torso=ImpalaTorso()), "tasks"),
        (Net(torso=ImpalaTorso(), head=ImplicitHead()), "operations"),
        (Net(torso=NatureTorso(), spectral_norm=True), "operations"),
        (Net(torso=MlpTorso()), "operations"),
    ],
)
def test_what_runs_side_by_side_is_chosen_by_the_network(net: Net, expected: str) -> None:
    plan = Plan(env=Env(id="none"), net=net, runtime=InlineRuntime(device="cpu", threads=2))
    chosen = resolve(plan, NATURE)
    assert chosen.runtime.parallel == expected
    assert operation_threads(chosen) == (1 if expected == "tasks" else 2)
    given = msgspec.structs.replace(plan, runtime=InlineRuntime(device="cpu", threads=2, parallel="operations"))
    assert resolve(given, NATURE).runtime.parallel == "operations"


def test_a_run_of_an_older_version_goes_on_dividing_operations() -> None:
    assert operation_threads(Plan(env=Env(id="none"), runtime=InlineRuntime(threads=2))) == 2
