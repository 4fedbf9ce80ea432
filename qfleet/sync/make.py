"""From the plan to a strategy and its codec."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qfleet.plan.sync_schema import (
    AdmmSync,
    AllreduceSync,
    Bf16Codec,
    Coded,
    EasgdSync,
    Fp16Codec,
    GossipSync,
    Int8Codec,
    LocalSync,
    NoCodec,
    PowerSgdCodec,
    Serving,
    SignCodec,
    TernaryCodec,
    TopKCodec,
    WindowSync,
    is_coarse,
    least_cosine_of,
    sends_steps,
)
from qfleet.plan.sync_schema import Codec as CodecPlan
from qfleet.plan.sync_schema import Sync as SyncPlan
from qfleet.sync.average import CodedMean, Tell
from qfleet.sync.buckets import Buckets
from qfleet.sync.codecs import Codec, Exact, Half, Int8, PowerSgd, Sign, Ternary, TopK, sampled_places
from qfleet.sync.comm import Comm
from qfleet.sync.packed import Packet
from qfleet.sync.served import Clip, ServerClient, ShardConnection
from qfleet.sync.shard import Shard
from qfleet.sync.shard import Step as ShardStep
from qfleet.sync.strategies import Admm, Allreduce, Easgd, Gossip, Local, OptimizerSteps, Step, Sync


def make_sync(
    plan: SyncPlan,
    comm: Comm,
    step: Step,
    weights: Sequence[Tensor],
    moments: Sequence[Tensor],
    *,
    seed: int,
    tell: Tell = lambda kind, **fields: None,
) -> Sync:
    """The strategy that a plan names, for a learner with these weights and moments whose own step this is."""
    if isinstance(plan, GossipSync):
        return Gossip(step, comm, weights)
    if not isinstance(plan, Coded):
        raise TypeError(f"no strategy for {type(plan).__name__}")
    average = make_average(plan, comm, [tuple(weight.shape) for weight in weights], seed, tell)
    match plan:
        case AllreduceSync() if sends_steps(plan):
            return OptimizerSteps(step, average, weights)
        case AllreduceSync(reduce=reduce, bucket_bytes=most):
            streams = comm.overlaps and isinstance(plan.codec, NoCodec)
            buckets = Buckets(comm, weights, most) if streams else None
            return Allreduce(step, average, total=reduce == "sum", buckets=buckets)
        case LocalSync(every_updates=every, outer_rate=rate, outer_momentum=momentum):
            outer = {"outer_rate": rate, "outer_momentum": momentum}
            averaged = () if is_coarse(plan.codec) else moments
            return Local(step, average, weights, averaged, every=every, **outer)  # type: ignore[arg-type]
        case EasgdSync(every_updates=every, pull=pull):
            return Easgd(step, average, weights, every=every, pull=pull)
        case AdmmSync(every_updates=every, rho=rho):
            return Admm(step, average, weights, every=every, rho=rho, tell=tell)
    raise TypeError(f"no strategy for {type(plan).__name__}")


def make_served(
    plan: Serving,
    ports: Sequence[ShardConnection],
    clip: Clip,
    rate: Callable[[], float],
    weights: Sequence[Tensor],
    *,
    rank: int,
    seed: int,
    tell: Tell = lambda kind, **fields: None,
) -> ServerClient:
    """A learner's end of a parameter server."""
    # Nobody else's gradient is known here: the codec is compared with what it was given.
    average = make_average(plan, Packet(), [tuple(weight.shape) for weight in weights], seed + rank, tell)
    # In a synchronous step nobody waits for the slowest `spare` learners: theirs is done without.
    return ServerClient(ports, clip, rate, average, weights, drops=plan.max_staleness == 0)


def make_shard(plan: Serving, weights: Tensor, step: ShardStep) -> Shard:
    """A block of a parameter server that nobody works with yet."""
    rules: dict[str, Any] = {
        "max_staleness": plan.max_staleness,
        "slow_down": plan.slow_down,
        "total": plan.reduce == "sum",
    }
    if isinstance(plan, WindowSync):
        limit = float("inf") if plan.window_seconds is None else plan.window_seconds
        rules |= {"window": plan.num_gradients, "window_seconds": limit}
    else:
        rules["spare"] = plan.spare
    return Shard(weights, step, workers=0, **rules)


def make_average(plan: Coded, comm: Comm, shapes: list[tuple[int, ...]], seed: int, tell: Tell) -> CodedMean:
    """Means through the plan's codec."""
    return CodedMean(
        comm,
        make_codec(plan.codec, shapes, comm.rank, seed),
        warm_rounds=plan.warm_rounds,
        check_every=plan.check_every_rounds,
        least_cosine=least_cosine_of(plan),
        tell=tell,
    )


def make_codec(plan: CodecPlan, shapes: list[tuple[int, ...]], rank: int, seed: int) -> Codec:
    """The codec that a plan names; where chance rounds every learner has its own, PowerSGD begins alike everywhere."""
    own = torch.Generator().manual_seed(seed + 1 + rank)
    common = torch.Generator().manual_seed(seed)
    match plan:
        case NoCodec():
            return Exact()
        case Fp16Codec() | Bf16Codec():
            return Half(torch.float16 if isinstance(plan, Fp16Codec) else torch.bfloat16)
        case Int8Codec(chunk=chunk):
            return Int8(chunk, own)
        case SignCodec(chunk=chunk):
            return Sign(chunk)
        case TernaryCodec(chunk=chunk):
            return Ternary(chunk, own)
        case TopKCodec(share=share, sampled=sampled):
            return TopK(share, sampled_places(own) if sampled else None)
        case PowerSgdCodec(rank=thin):
            return PowerSgd(thin, shapes, common)
