"""A learner's end of a server: pushes where it is new, computes again what was refused, tells what is not finite."""

import math

import pytest
import torch
from torch import Tensor

from qfleet.plan.together import Int8Codec, ServerSync
from qfleet.sync.make import make_served
from qfleet.sync.served import Refused, Served
from qfleet.sync.shard import Push, Shard, Verdict


class NearPort:
    """A shard in this process."""

    def __init__(self, shard: Shard, rank: int = 0) -> None:
        self.shard, self.rank = shard, rank
        self.verdict: Verdict = "waiting"
        self.pushed: list[Tensor] = []

    def push(self, gradient: Tensor, sequence: int, version: int, rate: float) -> None:
        self.pushed.append(gradient.clone())
        self.verdict = self.shard.push(Push((self.rank, 0, sequence), version, gradient), 0.0)

    def reply(self) -> tuple[Verdict, int, Tensor]:
        return self.verdict, self.shard.version, self.shard.weights


def make(plan: ServerSync, shards: int = 2) -> tuple[Served, list[NearPort], list[Tensor]]:
    ports = []
    for _ in range(shards):
        held = torch.zeros(2)
        step = lambda gradient, factor, held=held: held.sub_(gradient * factor)  # noqa: E731
        ports.append(NearPort(Shard(held, step, 1, max_staleness=plan.max_staleness)))
    weights = [torch.zeros(3), torch.zeros(shards * 2 - 3)]

    def clip(gradients: list[Tensor]) -> float:
        return float(torch.cat(gradients).norm())

    return make_served(plan, ports, clip, lambda: 1.0, weights, rank=0, seed=0), ports, weights


def test_weights_follow_the_shards() -> None:
    served, _, weights = make(ServerSync())
    assert served.step([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])]) == pytest.approx(math.sqrt(30))
    assert torch.cat(weights).tolist() == [-1.0, -2.0, -3.0, -4.0]  # a tensor is cut where a shard ends


def test_what_was_refused_is_pushed_again_to_whom_it_is_new() -> None:
    served, ports, weights = make(ServerSync(max_staleness=1))
    other = NearPort(ports[1].shard, rank=1)
    for sequence in range(2):
        other.push(torch.ones(2), sequence, sequence, 1.0)  # the second shard is two steps ahead
    with pytest.raises(Refused):
        served.step([torch.ones(3), torch.ones(1)])
    assert torch.cat(weights).tolist() == [-1.0, -1.0, -2.0, -2.0]
    served.step([torch.ones(3), torch.ones(1)])
    assert [len(port.pushed) for port in ports] == [1, 2]  # the first had taken it
    assert torch.cat(weights).tolist() == [-1.0, -1.0, -3.0, -3.0]
    served.step([torch.ones(3), torch.ones(1)])
    assert [len(port.pushed) for port in ports] == [2, 3]


def test_a_gradient_that_was_refused_leaves_no_error_behind() -> None:
    served, ports, _ = make(ServerSync(max_staleness=0, codec=Int8Codec()))
    served.drops = False
    ports[0].shard.version = 3
    with pytest.raises(Refused):
        served.step([torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0])])
    assert served.average.error is None


def test_everybody_hears_that_there_is_nothing_to_be_had() -> None:
    served, ports, _ = make(ServerSync())
    served.step([torch.tensor([math.nan, 0.0, 0.0]), torch.zeros(1)])
    assert all(bool(torch.isnan(port.pushed[-1]).all()) for port in ports)
