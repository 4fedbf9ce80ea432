"""A learner's client of a server: refused gradients are pushed again, and those that are not finite are reported."""

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
from qfleet.sync.gradient_rule import Push, Shard, Verdict
from qfleet.sync.make import make_codec, make_served
from qfleet.sync.packed import PackedGradient, pack_push, unpack_push
from qfleet.sync.served import PushRefused, ServerClient


class LocalConnection:
    """A shard in this process."""

    def __init__(self, shard: Shard, rank: int = 0) -> None:
        self.shard, self.rank = shard, rank
        self.verdict: Verdict = "waiting"
        self.gradients: list[Tensor] = []
        self.packed: PackedGradient | None = None
        self.sent_bytes = 0

    def push(
        self, gradient: Tensor, sequence: int, version: int, rate: float, packed: PackedGradient | None = None
    ) -> None:
        self.gradients.append(gradient.clone())
        self.sent_bytes += gradient.nbytes
        self.packed = packed
        self.verdict = self.shard.push(Push((self.rank, 0, sequence), version, gradient), 0.0)

    def reply(self) -> tuple[Verdict, int, Tensor]:
        return self.verdict, self.shard.version, self.shard.weights


def make(plan: ServerSync, shards: int = 2) -> tuple[ServerClient, list[LocalConnection], list[Tensor]]:
    connections = []
    for _ in range(shards):
        held = torch.zeros(2)
        step = lambda gradient, factor, held=held: held.sub_(gradient * factor)  # noqa: E731
        connections.append(LocalConnection(Shard(held, step, 1, max_staleness=plan.max_staleness)))
    weights = [torch.zeros(3), torch.zeros(shards * 2 - 3)]

    def clip(gradients: list[Tensor]) -> float:
        return float(torch.cat(gradients).norm())

    return make_served(plan, connections, clip, lambda: 1.0, weights, rank=0, seed=0), connections, weights


def test_weights_are_pulled_from_the_shards() -> None:
    client, _, weights = make(ServerSync())
    assert client.step([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])]) == pytest.approx(math.sqrt(30))
    assert torch.cat(weights).tolist() == [-1.0, -2.0, -3.0, -4.0]  # a tensor is cut where a shard ends


def test_a_refused_gradient_is_pushed_again_to_pending_shards_only() -> None:
    client, connections, weights = make(ServerSync(max_staleness=1))
    other = LocalConnection(connections[1].shard, rank=1)
    for sequence in range(2):
        other.push(torch.ones(2), sequence, sequence, 1.0)  # the second shard is two steps ahead
    with pytest.raises(PushRefused):
        client.step([torch.ones(3), torch.ones(1)])
    assert torch.cat(weights).tolist() == [-1.0, -1.0, -2.0, -2.0]
    client.step([torch.ones(3), torch.ones(1)])
    assert [len(connection.gradients) for connection in connections] == [1, 2]  # the first had accepted it
    assert torch.cat(weights).tolist() == [-1.0, -1.0, -3.0, -3.0]
    client.step([torch.ones(3), torch.ones(1)])
    assert [len(connection.gradients) for connection in connections] == [2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_error_feedback_adds_up_even_if_a_shard_refuses(seed: int) -> None:
    client, connections, _ = make(ServerSync(max_staleness=0, codec=TopKCodec(share=0.5)))
    client.drops_stale, rng = False, torch.Generator().manual_seed(seed)
    given, taken, refusals = torch.zeros(2, 2), torch.zeros(2, 2), 0
    for number in range(20):
        if number % 3 == 2:  # another learner was faster at one shard
            LocalConnection(connections[number % 2].shard, rank=number).push(
                torch.zeros(2), 0, connections[number % 2].shard.version, 1.0
            )
        gradient, pending = torch.randn(4, generator=rng), client.pending
        try:
            client.step(list(torch.split(gradient, [3, 1])))
        except PushRefused:
            refusals += 1
        for at in pending:
            if connections[at].verdict == "applied":
                given[at] += gradient.view(2, 2)[at]
                taken[at] += connections[at].gradients[-1]
    assert refusals
    assert client.average.error is not None
    torch.testing.assert_close(taken.flatten() + client.average.error, given.flatten())


def test_all_shards_receive_nan_for_a_gradient_that_is_not_finite() -> None:
    client, connections, _ = make(ServerSync())
    client.step([torch.tensor([math.nan, 0.0, 0.0]), torch.zeros(1)])
    assert all(bool(torch.isnan(connection.gradients[-1]).all()) for connection in connections)


PACKING = [Fp16Codec(), Bf16Codec(), Int8Codec(), SignCodec(), TernaryCodec(), TopKCodec(), TopKCodec(sampled=True)]


@pytest.mark.parametrize("codec", PACKING, ids=str)
def test_a_shard_decodes_its_part_of_the_compressed_gradient(codec: Codec) -> None:
    num, shards = 20_000, 2
    connections = [
        LocalConnection(Shard(torch.zeros(num // shards), lambda gradient, factor: None, 1)) for _ in range(shards)
    ]
    weights, plan = [torch.zeros(num)], ServerSync(codec=codec)
    client = make_served(plan, connections, lambda gradients: 1.0, lambda: 1.0, weights, rank=0, seed=0)
    for seed in range(3):  # the later ones include the earlier compression error
        client.step([torch.randn(num, generator=torch.Generator().manual_seed(seed))])
        for connection in connections:
            form, arrays = pack_push(connection.gradients[-1], connection.packed)
            sent_bytes = sum(array.nbytes for array in arrays.values())
            assert (sent_bytes < 4 * num // shards) == (connection.packed.nbytes < 4 * num // shards)  # type: ignore[union-attr]
            arrived = unpack_push(form, arrays, make_codec(codec, [], 0, 0), num // shards)
            assert torch.equal(arrived, connection.gradients[-1])


@pytest.mark.parametrize("codec", [NoCodec(), PowerSgdCodec()], ids=str)
def test_gradients_without_a_decodable_codec_are_sent_as_they_are(codec: Codec) -> None:
    client, connections, _ = make(ServerSync(codec=codec))
    client.step([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])])
    for connection in connections:
        assert connection.packed is None
        assert torch.equal(
            unpack_push(*pack_push(connection.gradients[-1], None), Exact(), 2), connection.gradients[-1]
        )


def test_a_compressed_gradient_without_its_codec_is_refused() -> None:
    packed = PackedGradient([torch.zeros(1, dtype=torch.uint8)], 100, 0)
    with pytest.raises(ValueError, match="no codec that can decode it"):
        unpack_push(*pack_push(torch.zeros(50), packed), Exact(), 50)
