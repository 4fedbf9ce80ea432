"""Several learners in a plan: how many, how they synchronise, and what they send each other."""

from typing import Annotated, Literal

from msgspec import Meta

from qfleet.plan.part import Count, Fraction, Positive, Rate, Section


class Learners(Section):
    """The learners: `num` of them, each with its share of every batch (`algo.batch_size` in all).

    They communicate through shared memory, or through sockets (`backend=gloo`, and always on Ray); with `nccl` each has
    its own accelerator, with `mpi` they are the processes that mpirun has started. A learner that is lost, or does not
    reply for `timeout_seconds`, is replaced, `restarts` times in ten minutes; the others go on without it. With
    `balance` shares follow the learners' measured speed, so the run is not deterministic. With `bundles` every learner
    is an actor-learner: it has an equal part of the environments, the replay and the batch (Gorila, Nair et al. 2015).
    `schedule` changes `sync` at given updates: ["5000 sync.type=local", "9000 sync.type=allreduce"].
    """

    num: Annotated[int, Meta(ge=1, le=1_000)] = 1
    bundles: bool = False
    backend: Literal["shared", "gloo", "nccl", "mpi"] | None = None
    balance: bool = False
    timeout_seconds: Rate = 20.0
    restarts: Count = 5
    schedule: tuple[str, ...] = ()


class NoCodec(Section, tag="none"):
    """Every number is sent as it is."""


class Fp16Codec(Section, tag="fp16"):
    """16 bits per number, with more digits."""


class Bf16Codec(Section, tag="bf16"):
    """16 bits per number, with the larger range."""


class Int8Codec(Section, tag="int8"):
    """8 bits per number and a scale per `chunk`, rounded by chance."""

    chunk: Positive = 1024


class SignCodec(Section, tag="sign"):
    """One bit per number and a size per `chunk` (Seide et al. 2014)."""

    chunk: Positive = 256


class TernaryCodec(Section, tag="ternary"):
    """-1, 0 or 1 times a size per `chunk`, by chance (Wen et al. 2017)."""

    chunk: Positive = 256


class TopKCodec(Section, tag="top_k"):
    """Only the largest `share` of all numbers (Aji and Heafield 2017); `sampled`: about the largest."""

    share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.01
    sampled: bool = False


class PowerSgdCodec(Section, tag="power_sgd"):
    """Matrices as products of two thin ones of this `rank` (Vogels et al. 2019)."""

    rank: Positive = 2


Codec = NoCodec | Fp16Codec | Bf16Codec | Int8Codec | SignCodec | TernaryCodec | TopKCodec | PowerSgdCodec


def is_coarse(codec: Codec) -> bool:
    """Does it drop so much that an optimiser which divides by the size of gradients is misled?"""
    return not isinstance(codec, NoCodec | Fp16Codec | Bf16Codec) and codec != TopKCodec(share=1.0)


class Coded(Section):
    """A strategy whose messages pass through a codec.

    The first `warm_rounds` means are exact. Every `check_every_rounds` (0: never) the mean is compared with the exact
    one; if their cosine is below `least_cosine` (by default a bound for the codec), compression is turned off.
    """

    codec: Codec = NoCodec()
    warm_rounds: Count = 0
    check_every_rounds: Count = 1_000
    least_cosine: Annotated[float, Meta(ge=-1.0, le=1.0)] | None = None


# A working codec stays well above these cosines, error feedback included (tests/sync/test_codecs.py).
LEAST_COSINES: dict[type[Codec], float] = {
    Fp16Codec: 0.9,
    Bf16Codec: 0.9,
    Int8Codec: 0.9,
    TernaryCodec: 0.3,
    PowerSgdCodec: 0.1,
    SignCodec: 0.05,
    TopKCodec: 0.02,
}


def least_cosine_of(sync: Coded) -> float:
    """The cosine with the exact mean below which the codec is turned off."""
    return LEAST_COSINES.get(type(sync.codec), -1.0) if sync.least_cosine is None else sync.least_cosine


class SoloSync(Section, tag="solo"):
    """No synchronisation: there is one learner."""


class AllreduceSync(Coded, tag="allreduce"):
    """All gradients are averaged (`reduce=mean`) or added up before every step: one learner with the whole batch.

    Through sockets and without a codec they are sent in buckets of `bucket_bytes`, each as soon as it is computed. With
    `send=steps` every learner's optimiser steps first, and the steps are averaged (Chen et al. 2022); by default
    coarse codecs send steps, all others gradients.
    """

    reduce: Literal["mean", "sum"] = "mean"
    send: Literal["gradients", "steps"] | None = None
    bucket_bytes: Positive = 1 << 20


class Sharded(Coded):
    """Weights and optimiser live in `shards` processes; learners push gradients and pull weights.

    `slow_down` divides the learning rate by a gradient's staleness (Zhang et al. 2016).
    """

    shards: Annotated[int, Meta(ge=1, le=1_000)] = 1
    slow_down: bool = False
    reduce: Literal["mean", "sum"] = "mean"


class ServerSync(Sharded, tag="server"):
    """A parameter server.

    With `max_staleness=0` each step uses the gradients of all learners, or of all but the slowest `spare`. With s every
    gradient is a step of its own, and one computed from weights more than s steps old is refused and computed again;
    with `none` none is refused.
    """

    max_staleness: Count | None = 0
    spare: Count = 0


class WindowSync(Sharded, tag="window"):
    """A parameter server that makes one step of the gradients it received, every `num_gradients` or `window_seconds`.

    With both, whichever comes first; with `num_gradients=none`, by time alone. A gradient from weights more than
    `max_staleness` steps old is refused and computed again.
    """

    num_gradients: Positive | None = 2
    window_seconds: Rate | None = None
    max_staleness: Positive | None = None


class LocalSync(Coded, tag="local"):
    """Local SGD: every learner steps by itself, and every `every_updates` weights and moments are averaged.

    With an `outer_rate` the change since the last average is a gradient for Nesterov momentum (DiLoCo, Douillard et al.
    2023).
    """

    every_updates: Positive = 8
    outer_rate: Rate | None = None
    outer_momentum: Fraction = 0.9


class EasgdSync(Coded, tag="easgd"):
    """Elastic averaging (Zhang et al. 2015): every `every_updates` learners and a centre `pull` at each other."""

    every_updates: Positive = 8
    pull: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.9


class AdmmSync(Coded, tag="admm"):
    """Consensus ADMM (Boyd et al. 2011): a tie of strength `rho`, which adapts, to a consensus made anew at times."""

    every_updates: Positive = 2
    rho: Rate = 0.01


class GossipSync(Section, tag="gossip"):
    """A step, then the mean with the neighbours on a ring (Lian et al. 2017)."""


def sends_steps(sync: AllreduceSync) -> bool:
    """Are the optimisers' steps averaged, rather than gradients?"""
    return is_coarse(sync.codec) if sync.send is None else sync.send == "steps"


Serving = ServerSync | WindowSync  # by a parameter server
Sync = SoloSync | AllreduceSync | ServerSync | WindowSync | LocalSync | EasgdSync | AdmmSync | GossipSync
