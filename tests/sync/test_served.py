"""A learner's end of a server: pushes where it is new, computes again what was refused, tells what is not finite."""

import math

import pytest
import torch
from torch import Tensor

from qfleet.plan.sync_schema import (
    Bf16Codec,
    Codec,
    Fp16Codec,
    Int8Codec,
    NoCodec,
    PowerSgdCodec,
    ServerSync,
    SignCodec,
    TernaryCodec,
    TopKCodec,
)
from qfleet.sync.codecs import Exact
from qfleet.sync.make import make_codec, make_served
from qfleet.sync.packed import PackedGradient, push_parcel, pushed
from qfleet.sync.served import PushRefused, ServerClient
from qfleet.sync.shard import Push, Shard, Verdict


class NearPort:
    """A shard in this process."""

    def __init__(self, shard: Shard, rank: int = 0) -> None:
        self.shard, self.rank = shard, rank
        self.verdict: Verdict = "waiting"
        self.pushed: list[Tensor] = []
        self.packed: PackedGradient | None = None
        self.sent_bytes = 0

    def push(
        self, gradient: Tensor, sequence: int, version: int, rate: float, packed: PackedGradient | None = None
    ) -> None:
        self.pushed.append(gradient.clone())
        self.sent_bytes += gradient.nbytes
        self.packed = packed
        self.verdict = self.shard.push(Push((self.rank, 0, sequence), version, gradient), 0.0)

    def reply(self) -> tuple[Verdict, int, Tensor]:
        return self.verdict, self.shard.version, self.shard.weights


def make(plan: ServerSync, shards: int = 2) -> tuple[ServerClient, list[NearPort], list[Tensor]]:
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
    with pytest.raises(PushRefused):
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
        except PushRefused:
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


PACKING = [Fp16Codec(), Bf16Codec(), Int8Codec(), SignCodec(), TernaryCodec(), TopKCodec(), TopKCodec(sampled=True)]


@pytest.mark.parametrize("codec", PACKING, ids=str)
def test_a_shard_finds_its_part_in_what_the_codec_sends(codec: Codec) -> None:
    num, shards = 20_000, 2
    ports = [NearPort(Shard(torch.zeros(num // shards), lambda gradient, factor: None, 1)) for _ in range(shards)]
    weights, plan = [torch.zeros(num)], ServerSync(codec=codec)
    served = make_served(plan, ports, lambda gradients: 1.0, lambda: 1.0, weights, rank=0, seed=0)
    for seed in range(3):  # the second one has what the first one owed
        served.step([torch.randn(num, generator=torch.Generator().manual_seed(seed))])
        for port in ports:
            parcel = push_parcel(port.pushed[-1], port.packed)
            assert (len(parcel) < 4 * num // shards) == (port.packed.nbytes < 4 * num // shards)  # type: ignore[union-attr]
            arrived = pushed(parcel, make_codec(codec, [], 0, 0), num // shards, 1 << 20)
            assert torch.equal(arrived, port.pushed[-1])


@pytest.mark.parametrize("codec", [NoCodec(), PowerSgdCodec()], ids=str)
def test_what_no_codec_packs_goes_as_it_is(codec: Codec) -> None:
    served, ports, _ = make(ServerSync(codec=codec))
    served.step([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])])
    for port in ports:
        assert port.packed is None
        assert torch.equal(pushed(push_parcel(port.pushed[-1], None), Exact(), 2, 1 << 20), port.pushed[-1])


def test_a_packet_that_nobody_can_open_is_refused() -> None:
    packed = PackedGradient([torch.zeros(1, dtype=torch.uint8)], 100, 0)
    with pytest.raises(ValueError, match="no codec that packs"):
        pushed(push_parcel(torch.zeros(50), packed), Exact(), 50, 1 << 20)
