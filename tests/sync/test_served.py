"""A learner's end of a server: pushes where it is new, computes again what was refused, tells what is not finite."""

import math

import pytest
import torch
from torch import Tensor

from qfleet.plan.together import ServerSync, TopKCodec
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


@pytest.mark.parametrize("seed", range(5))
def test_what_is_sent_and_what_is_left_out_add_up_even_if_a_shard_refuses(seed: int) -> None:
    served, ports, _ = make(ServerSync(max_staleness=0, codec=TopKCodec(share=0.5)))
    served.drops, rng = False, torch.Generator().manual_seed(seed)
    given, taken, refusals = torch.zeros(2, 2), torch.zeros(2, 2), 0
    for number in range(20):
        if number % 3 == 2:  # somebody else was faster at one shard
            NearPort(ports[number % 2].shard, rank=number).push(torch.zeros(2), 0, ports[number % 2].shard.version, 1.0)
        gradient, pending = torch.randn(4, generator=rng), served.pending
        try:
            served.step(list(torch.split(gradient, [3, 1])))
        except Refused:
            refusals += 1
        for at in pending:
            if ports[at].verdict == "applied":
                given[at] += gradient.view(2, 2)[at]
                taken[at] += ports[at].pushed[-1]
    assert refusals
    assert served.average.error is not None
    torch.testing.assert_close(taken.flatten() + served.average.error, given.flatten())


def test_everybody_hears_that_there_is_nothing_to_be_had() -> None:
    served, ports, _ = make(ServerSync())
    served.step([torch.tensor([math.nan, 0.0, 0.0]), torch.zeros(1)])
    assert all(bool(torch.isnan(port.pushed[-1]).all()) for port in ports)
