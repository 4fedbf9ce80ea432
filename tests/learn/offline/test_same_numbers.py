"""Several learners with their parts of every batch make the numbers of one learner with the whole batch, in float64."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qfleet.build.custom_parts import NO_CUSTOM_PARTS
from qfleet.data import Batch
from qfleet.distributed.learners.shares import assign_items, share_of_batch
from qfleet.distributed.learners.worker import build_learner, compute_and_step, make_server_client, make_strategy
from qfleet.learn import Learner
from qfleet.learn.offline.dataset_source import DatasetSource, make_dataset_source
from qfleet.plan import make_plan
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import ServerSync
from qfleet.replay import make_replay
from qfleet.sync.comm import Comm
from qfleet.sync.gradient_rule import Push, Shard, Verdict, shard_bounds
from qfleet.sync.strategies import Sync, flatten_tensors
from tests.support.recorded import SPEC, make_dataset
from tests.sync.parts import run_ranks

LENGTHS = [40, 33, 25, 60, 51, 7, 24]
BATCH = 24
UPDATES = 10  # an epoch of 240 transitions
RATE = 1e-3


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "data", LENGTHS, file_bytes=1_500)
    return tmp_path / "data"


def plan_for(data: Path, **more: Any) -> Plan:
    settings = {"replay.type": "dataset", "replay.path": str(data), "replay.split": "all", "replay.open_shards": 4}
    settings |= {"algo.batch_size": BATCH, "net.torso.type": "mlp", "net.torso.sizes": (8,), "optim.clip_norm": None}
    settings |= {"runtime.compile": False, "runtime.precision": "float32", "runtime.threads": 1}
    settings |= {"optim.learning_rate": RATE, "optim.type": "sgd"}
    return make_plan("Logs-v0", overrides=settings | more)


def source_for(plan: Plan) -> DatasetSource:
    return make_dataset_source(plan, make_replay(plan, SPEC, 1, np.random.default_rng(0)))


def new_learner(plan: Plan) -> Learner:
    """Observations count up to 640: the weights are small, so that nothing diverges."""
    learner = build_learner(plan, SPEC, SPEC, NO_CUSTOM_PARTS)
    learner.gradients.online_forward = learner.net  # the chain of operations computes in float32
    learner.gradients.target_forward = learner.target
    rng = torch.Generator().manual_seed(5)  # torch's own generator is that of all threads
    for tensor in learner.online_tensors:
        tensor.copy_(1e-3 * torch.randn(tensor.shape, generator=rng))
    for target, online in zip(learner.target_tensors, learner.online_tensors, strict=True):
        target.copy_(online)
    assert all(tensor.dtype == torch.float64 for tensor in learner.synced_tensors())
    return learner


def doubled(batch: Batch) -> Batch:
    values = {name: getattr(batch, name) for name in Batch.__slots__}
    floats = {name: value for name, value in values.items() if getattr(value, "dtype", None) == np.float32}
    return Batch(**values | {name: value.astype(np.float64) for name, value in floats.items()})


def alone(plan: Plan) -> Tensor:
    learner = new_learner(plan)
    source = source_for(plan)
    for _ in range(UPDATES):
        learner.update(doubled(source.next_batch(0)))
    return flatten_tensors(learner.online_tensors)


class SharedShards:
    """A parameter server whose shards all threads push to."""

    def __init__(self, num: int, size: int, initial: Tensor) -> None:
        self.barrier = threading.Barrier(num)
        self.lock = threading.Lock()
        self.shards = []
        for begin, end in shard_bounds(len(initial), size):
            held = initial[begin:end].clone()
            step = lambda gradient, factor, held=held: held.sub_(RATE * factor * gradient)  # noqa: E731
            self.shards.append(Shard(held, step, workers=num))


class SharedConnection:
    """One thread's connection to a shard; it pulls when all have pushed."""

    def __init__(self, server: SharedShards, number: int, rank: int) -> None:
        self.server = server
        self.shard = server.shards[number]
        self.rank = rank
        self.sent_bytes = 0
        self.verdict: Verdict = "waiting"

    def push(self, gradient: Tensor, sequence: int, version: int, rate: float, packed: object = None) -> None:
        with self.server.lock:
            self.verdict = self.shard.push(Push((self.rank, 0, sequence), version, gradient.clone()), 0.0)

    def reply(self) -> tuple[Verdict, int, Tensor]:
        self.server.barrier.wait(20)
        return self.verdict, self.shard.version, self.shard.weights.clone()


def strategy_for(plan: Plan, learner: Learner, comm: Comm, server: SharedShards) -> Sync:
    if isinstance(plan.sync, ServerSync):
        connections = [SharedConnection(server, number, comm.rank) for number in range(len(server.shards))]
        return make_server_client(plan.sync, 0, learner, connections, comm.rank)
    return make_strategy(plan.sync, 0, learner, comm)


def together(plan: Plan, num: int, shares: tuple[float, ...] | None = None) -> Tensor:
    """Every rank reads its own part of each batch."""
    shares = shares or (1.0,) * num
    server = SharedShards(num, 2, flatten_tensors(new_learner(plan).online_tensors))

    def learn(comm: Comm) -> Tensor:
        learner = new_learner(plan)
        source = source_for(plan)
        source.whole = False
        sync = strategy_for(plan, learner, comm, server)
        for _ in range(UPDATES):
            positions = source.next_batch(0).ids
            owners = source.owners_at(positions, assign_items(BATCH, shares), shares)
            own = doubled(source.batch_at(positions[owners == comm.rank]))
            pending, norm, _ = compute_and_step(learner, own, share_of_batch(owners, comm.rank, num), sync.step)
            learner.finish_shared_update(pending, norm)
        return flatten_tensors(learner.online_tensors)

    found = run_ranks(num, learn)
    for weights in found[1:]:
        torch.testing.assert_close(weights, found[0], rtol=0, atol=1e-14)
    return found[0]


STRATEGIES: dict[str, dict[str, Any]] = {
    "allreduce": {"sync.type": "allreduce"},
    "server": {"sync.type": "server", "sync.shards": 2},
    "local": {"sync.type": "local", "sync.every_updates": 1},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num", [2, 3])
def test_parts_of_a_batch_are_the_whole_batch(data: Path, strategy: str, num: int) -> None:
    plan = plan_for(data, **{"learners.num": num, **STRATEGIES[strategy]})
    single = alone(plan_for(data))
    start = flatten_tensors(new_learner(plan_for(data)).online_tensors)
    assert float((single - start).abs().max()) > 1e-4  # it learned
    torch.testing.assert_close(together(plan, num), single, rtol=0, atol=1e-10)


def test_unequal_parts_too(data: Path) -> None:
    plan = plan_for(data, **{"learners.num": 2})
    torch.testing.assert_close(together(plan, 2, (1.5, 0.5)), alone(plan_for(data)), rtol=0, atol=1e-10)


def test_all_reduce_with_adam_and_clipping_too(data: Path) -> None:
    """The agreed gradient is clipped, as that of one learner is."""
    more = {"optim.type": "adam", "optim.clip_norm": 0.01}
    plan = plan_for(data, **{"learners.num": 2, **more})
    torch.testing.assert_close(together(plan, 2), alone(plan_for(data, **more)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("more", [{"optim.clip_norm": 0.01}, {"optim.type": "adam"}])
def test_local_steps_are_those_of_one_learner_only_if_they_are_linear_in_the_gradient(
    data: Path, more: dict[str, Any]
) -> None:
    """Local SGD clips and scales the own gradient before anybody agrees: the mean of such steps is another step."""
    plan = plan_for(data, **{"learners.num": 2, **STRATEGIES["local"], **more})
    single = alone(plan_for(data, **more))
    difference = float((together(plan, 2) - single).abs().max())
    assert difference > 1e-8
