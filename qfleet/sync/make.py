"""Make the plan's strategy, codec, and parameter-server parts."""

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
from qfleet.sync.average import CodedMean, LogEvent
from qfleet.sync.buckets import Buckets
from qfleet.sync.codecs import Codec, Exact, Half, Int8, PowerSgd, Sign, Ternary, TopK, sampled_indices
from qfleet.sync.comm import Comm
from qfleet.sync.packed import RecordingComm
from qfleet.sync.served import Clip, ServerClient, ShardConnection
from qfleet.sync.shard import Shard, ShardStep
from qfleet.sync.strategies import Admm, Allreduce, Easgd, Gossip, Local, OptimizerStep, StepAveraging, Sync


def make_sync(
    plan: SyncPlan,
    comm: Comm,
    step: OptimizerStep,
    weights: Sequence[Tensor],
    moments: Sequence[Tensor],
    *,
    seed: int,
    log_event: LogEvent = lambda kind, **fields: None,
) -> Sync:
    """The plan's strategy for a learner with these weights and moments; `step` is its optimiser's step."""
    if isinstance(plan, GossipSync):
        return Gossip(step, comm, weights)
    if not isinstance(plan, Coded):
        raise TypeError(f"no strategy for {type(plan).__name__}")
    average = make_average(plan, comm, [tuple(weight.shape) for weight in weights], seed, log_event)
    match plan:
        case AllreduceSync() if sends_steps(plan):
            return StepAveraging(step, average, weights)
        case AllreduceSync(reduce=reduce, bucket_bytes=bucket_bytes):
            overlaps = comm.overlaps and isinstance(plan.codec, NoCodec)
            buckets = Buckets(comm, weights, bucket_bytes) if overlaps else None
            return Allreduce(step, average, total=reduce == "sum", buckets=buckets)
        case LocalSync(every_updates=every, outer_rate=rate, outer_momentum=momentum):
            outer = {"outer_rate": rate, "outer_momentum": momentum}
            averaged = () if is_coarse(plan.codec) else moments
            return Local(step, average, weights, averaged, every=every, **outer)  # type: ignore[arg-type]
        case EasgdSync(every_updates=every, pull=pull):
            return Easgd(step, average, weights, every=every, pull=pull)
        case AdmmSync(every_updates=every, rho=rho):
            return Admm(step, average, weights, every=every, rho=rho, log_event=log_event)
    raise TypeError(f"no strategy for {type(plan).__name__}")


def make_served(
    plan: Serving,
    connections: Sequence[ShardConnection],
    clip: Clip,
    rate: Callable[[], float],
    weights: Sequence[Tensor],
    *,
    rank: int,
    seed: int,
    log_event: LogEvent = lambda kind, **fields: None,
) -> ServerClient:
    """A learner's client of a parameter server."""
    # Other learners' gradients are not known here: the codec is checked against this learner's own.
    average = make_average(plan, RecordingComm(), [tuple(weight.shape) for weight in weights], seed + rank, log_event)
    # A synchronous step does not wait for the slowest `spare` learners: their gradients are dropped.
    return ServerClient(connections, clip, rate, average, weights, drops_stale=plan.max_staleness == 0)


def make_shard(plan: Serving, weights: Tensor, step: ShardStep) -> Shard:
    """A shard of a parameter server, without workers yet."""
    options: dict[str, Any] = {
        "max_staleness": plan.max_staleness,
        "slow_down": plan.slow_down,
        "total": plan.reduce == "sum",
    }
    if isinstance(plan, WindowSync):
        limit = float("inf") if plan.window_seconds is None else plan.window_seconds
        options |= {"window": plan.num_gradients, "window_seconds": limit}
    else:
        options["spare"] = plan.spare
    return Shard(weights, step, workers=0, **options)


def make_average(plan: Coded, comm: Comm, shapes: list[tuple[int, ...]], seed: int, log_event: LogEvent) -> CodedMean:
    """All-reduce means through the plan's codec."""
    return CodedMean(
        comm,
        make_codec(plan.codec, shapes, comm.rank, seed),
        warm_rounds=plan.warm_rounds,
        check_every=plan.check_every_rounds,
        least_cosine=least_cosine_of(plan),
        log_event=log_event,
    )


def make_codec(plan: CodecPlan, shapes: list[tuple[int, ...]], rank: int, seed: int) -> Codec:
    """The codec that the plan names; random rounding differs between ranks, PowerSGD starts alike on all."""
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
            return TopK(share, sampled_indices(own) if sampled else None)
        case PowerSgdCodec(rank=matrix_rank):
            return PowerSgd(matrix_rank, shapes, common)
