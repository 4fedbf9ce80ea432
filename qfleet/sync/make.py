"""Make the plan's strategy, codec, and parameter-server parts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qfleet.plan import sync_schema as plans
from qfleet.sync.average import CodedMean, LogEvent
from qfleet.sync.buckets import Buckets
from qfleet.sync.codecs import Codec, Exact, Half, Int8, PowerSgd, Sign, Ternary, TopK, sampled_indices
from qfleet.sync.comm import Comm, OverlappingComm
from qfleet.sync.gradient_rule import Shard, ShardStep
from qfleet.sync.packed import RecordingComm
from qfleet.sync.served import Clip, ServerClient, ShardConnection
from qfleet.sync.strategies import Admm, Allreduce, Easgd, Gossip, Local, OptimizerStep, StepAveraging, Sync


def make_sync(
    plan: plans.Sync,
    comm: Comm,
    step: OptimizerStep,
    weights: Sequence[Tensor],
    moments: Sequence[Tensor],
    *,
    seed: int,
    log_event: LogEvent = lambda kind, **fields: None,
) -> Sync:
    """The plan's strategy for a learner with these weights and moments; `step` is its optimiser's step."""
    if isinstance(plan, plans.GossipSync):
        return Gossip(step, comm, weights)
    if not isinstance(plan, plans.Coded):
        raise TypeError(f"no strategy for {type(plan).__name__}")
    average = make_average(plan, comm, [tuple(weight.shape) for weight in weights], seed, log_event)
    match plan:
        case plans.AllreduceSync() if plans.sends_steps(plan):
            return StepAveraging(step, average, weights)
        case plans.AllreduceSync(reduce=reduce, bucket_bytes=bucket_bytes):
            buckets = None
            if isinstance(comm, OverlappingComm) and isinstance(plan.codec, plans.NoCodec):
                buckets = Buckets(comm, weights, bucket_bytes)
            return Allreduce(step, average, total=reduce == "sum", buckets=buckets)
        case plans.LocalSync(every_updates=every, outer_rate=rate, outer_momentum=momentum):
            averaged = () if plans.is_coarse(plan.codec) else moments
            return Local(step, average, weights, averaged, every=every, outer_rate=rate, outer_momentum=momentum)
        case plans.EasgdSync(every_updates=every, pull=pull):
            return Easgd(step, average, weights, every=every, pull=pull)
        case plans.AdmmSync(every_updates=every, rho=rho):
            return Admm(step, average, weights, every=every, rho=rho, log_event=log_event)
    raise TypeError(f"no strategy for {type(plan).__name__}")


def make_served(
    plan: plans.Serving,
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


def make_shard(plan: plans.Serving, weights: Tensor, step: ShardStep) -> Shard:
    """A shard of a parameter server, without workers yet."""
    if isinstance(plan, plans.WindowSync):
        limit = float("inf") if plan.window_seconds is None else plan.window_seconds
        options: dict[str, Any] = {"window": plan.num_gradients, "window_seconds": limit}
    else:
        options = {"spare": plan.spare}
    options |= {"max_staleness": plan.max_staleness, "slow_down": plan.slow_down, "total": plan.reduce == "sum"}
    return Shard(weights, step, workers=0, **options)


def make_average(
    plan: plans.Coded, comm: Comm, shapes: list[tuple[int, ...]], seed: int, log_event: LogEvent
) -> CodedMean:
    """All-reduce means through the plan's codec."""
    return CodedMean(
        comm,
        make_codec(plan.codec, shapes, comm.rank, seed),
        warm_rounds=plan.warm_rounds,
        check_every=plan.check_every_rounds,
        least_cosine=plans.least_cosine_of(plan),
        log_event=log_event,
    )


def make_codec(plan: plans.Codec, shapes: list[tuple[int, ...]], rank: int, seed: int) -> Codec:
    """The codec that the plan names; random rounding differs between ranks, PowerSGD starts alike on all."""
    own = torch.Generator().manual_seed(seed + 1 + rank)
    common = torch.Generator().manual_seed(seed)
    match plan:
        case plans.NoCodec():
            return Exact()
        case plans.Fp16Codec():
            return Half(torch.float16)
        case plans.Bf16Codec():
            return Half(torch.bfloat16)
        case plans.Int8Codec(chunk=chunk):
            return Int8(chunk, own)
        case plans.SignCodec(chunk=chunk):
            return Sign(chunk)
        case plans.TernaryCodec(chunk=chunk):
            return Ternary(chunk, own)
        case plans.TopKCodec(share=share, sampled=sampled):
            return TopK(share, sampled_indices(own) if sampled else None)
        case plans.PowerSgdCodec(rank=matrix_rank):
            return PowerSgd(matrix_rank, shapes, common)
