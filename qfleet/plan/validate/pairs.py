"""Settings that do not go together: the one list of them, each with its reason and what to do.

A pair is refused when both its conditions hold, wherever they came from.
"""

from collections.abc import Callable
from dataclasses import dataclass

from qfleet.plan.schema import (
    BufferReplay,
    CategoricalHead,
    CountBonus,
    DuplicatesFilter,
    ExponentialAnneal,
    GrowingBatch,
    NoMemory,
    Plan,
    PlateauRate,
    PrioritizedSampler,
    ProcessesRuntime,
    RayRuntime,
    SequencesView,
    SteadyBatch,
)
from qfleet.plan.sync_schema import Coded, NoCodec, Serving, SoloSync
from qfleet.plan.traits import is_alone, is_distribution, is_fresh, is_together
from qfleet.plan.validate.placement import has_bundles, has_replay_process, is_central


def _memory(plan: Plan) -> bool:
    return not isinstance(plan.net.memory, NoMemory)


def _sequences(plan: Plan) -> bool:
    return isinstance(plan.algo.view, SequencesView)


def _actor_priority(plan: Plan) -> bool:
    sampler = plan.replay.sampler if isinstance(plan.replay, BufferReplay) else None
    return isinstance(sampler, PrioritizedSampler) and sampler.initial == "actor"


def _filters(plan: Plan) -> bool:
    return isinstance(plan.replay, BufferReplay) and isinstance(plan.replay.filter, DuplicatesFilter)


def _mirrors(plan: Plan) -> bool:
    return isinstance(plan.replay, BufferReplay) and plan.replay.on_device


def _compresses(plan: Plan) -> bool:
    return isinstance(plan.replay, BufferReplay) and plan.replay.compress


def _pays(plan: Plan) -> bool:
    return isinstance(plan.algo.bonus, CountBonus)


def _anneals(plan: Plan) -> bool:
    return isinstance(plan.algo.anneal, ExponentialAnneal)


def _grows(plan: Plan) -> bool:
    return isinstance(plan.steer.batch, GrowingBatch)


def _unjudged(plan: Plan) -> bool:
    return plan.eval.episodes == 0


BLIND = "Steering looks at validation scores, and there are none with 0 episodes."


@dataclass(frozen=True)
class Pair:
    """Two settings that do not go together under `when`."""

    first: str
    second: str
    when: Callable[[Plan], bool]
    reason: str
    fix: str


PAIRS: tuple[Pair, ...] = (
    Pair(
        "runtime.replay_process",
        "replay.type",
        lambda plan: is_fresh(plan) and has_replay_process(plan),
        "Fresh experience is learned from as it comes; there is no replay to keep elsewhere.",
        "Leave runtime.replay_process off, or use replay.type=buffer.",
    ),
    Pair(
        "runtime.inference",
        "actors.num",
        lambda plan: is_central(plan) and plan.actors.num == 1,
        "A single actor chooses all actions already.",
        "Leave runtime.inference out, or set actors.num to 2 or more.",
    ),
    Pair(
        "algo.view.type",
        "net.memory.type",
        lambda plan: _sequences(plan) and not _memory(plan) and not is_fresh(plan),
        "Sequences are unrolled through a memory; without one each step can be learned from by itself.",
        "Set net.memory.type=lstm or gru, or leave algo.view.type at steps.",
    ),
    Pair(
        "net.memory.type",
        "algo.view.type",
        lambda plan: _memory(plan) and not _sequences(plan) and not is_fresh(plan),
        "What a memory holds depends on the steps before, so it is learned from stretches of experience.",
        "Set algo.view.type=sequences, or net.memory.type=off.",
    ),
    Pair(
        "replay.type",
        "net.memory.type",
        lambda plan: is_fresh(plan) and _memory(plan),
        "Fresh steps are shuffled before they are learned from, which a memory cannot follow.",
        "Use the replay (replay.type=buffer, algo.view.type=sequences), or net.memory.type=off.",
    ),
    Pair(
        "replay.type",
        "algo.view.type",
        lambda plan: is_fresh(plan) and _sequences(plan),
        "Fresh steps are shuffled before they are learned from.",
        "Leave algo.view.type at steps, or use replay.type=buffer.",
    ),
    Pair(
        "replay.type",
        "net.head.type",
        lambda plan: is_fresh(plan) and is_distribution(plan),
        "Q(lambda) returns are numbers, not distributions.",
        "Use net.head.type=scalar, or replay.type=buffer.",
    ),
    Pair(
        "replay.type",
        "algo.rescale",
        lambda plan: is_fresh(plan) and plan.algo.rescale,
        "Q(lambda) returns add rewards and values up, which rescaled values do not allow.",
        "Leave algo.rescale off; env.normalize=reward keeps large rewards small.",
    ),
    Pair(
        "net.decoupled",
        "net.head.type",
        lambda plan: plan.net.decoupled and is_distribution(plan),
        "A joint action is worth the mean over its dimensions; the mean of distributions is not one of them.",
        "Use net.head.type=scalar, or leave net.decoupled off.",
    ),
    Pair(
        "net.decoupled",
        "net.memory.type",
        lambda plan: plan.net.decoupled and _memory(plan),
        "A memory sees the previous joint action as one-hot, which many dimensions make far too long.",
        "Use net.memory.type=off, or leave net.decoupled off.",
    ),
    Pair(
        "replay.sampler.initial",
        "net.head.type",
        lambda plan: _actor_priority(plan) and isinstance(plan.net.head, CategoricalHead),
        "Actors know errors of values, a categorical head's priorities are divergences: they cannot be compared.",
        "Use replay.sampler.initial=largest, or net.head.type=quantile.",
    ),
    Pair(
        "replay.sampler.initial",
        "env.normalize",
        lambda plan: _actor_priority(plan) and plan.env.normalize in ("reward", "both"),
        "Actors compare raw rewards with what they expected, which a network of scaled rewards has on another scale.",
        "Use replay.sampler.initial=largest, or env.normalize=obs or off.",
    ),
    Pair(
        "algo.anneal.type",
        "replay.type",
        lambda plan: _anneals(plan) and is_fresh(plan),
        "Q(lambda) returns weigh every number of steps, so there is no n to move: see replay.trace.",
        "Use replay.type=buffer, or leave algo.anneal.type off.",
    ),
    Pair(
        "algo.anneal.type",
        "algo.discount",
        lambda plan: _anneals(plan) and plan.algo.discount == 1.0,
        "1 - discount shrinks by a constant factor, which never ends at zero.",
        "Use algo.discount=0.999, or leave algo.anneal.type off.",
    ),
    Pair(
        "steer.batch.type",
        "replay.type",
        lambda plan: _grows(plan) and is_fresh(plan),
        "Fresh experience is cut into replay.minibatches parts: how large they are follows from that.",
        "Use replay.type=buffer, or leave steer.batch.type off.",
    ),
    Pair(
        "steer.batch.type",
        "eval.episodes",
        lambda plan: _grows(plan) and _unjudged(plan),
        BLIND,
        "Set eval.episodes to 20 or so, or leave steer.batch.type off.",
    ),
    Pair(
        "steer.learning_rate.type",
        "eval.episodes",
        lambda plan: isinstance(plan.steer.learning_rate, PlateauRate) and _unjudged(plan),
        BLIND,
        "Set eval.episodes to 20 or so, or leave steer.learning_rate.type off.",
    ),
    Pair(
        "steer.stop_patience",
        "eval.episodes",
        lambda plan: plan.steer.stop_patience is not None and _unjudged(plan),
        BLIND,
        "Set eval.episodes to 20 or so, or leave steer.stop_patience out.",
    ),
    Pair(
        "replay.filter.type",
        "algo.view.type",
        lambda plan: _filters(plan) and _sequences(plan),
        "A stretch of experience without its repeated steps is no longer what happened.",
        "Leave replay.filter.type off, or algo.view.type at steps.",
    ),
    Pair(
        "replay.filter.type",
        "algo.bonus.type",
        lambda plan: _filters(plan) and _pays(plan),
        "The bonus falls with every visit, so no two steps have the same reward and none is a copy.",
        "Leave replay.filter.type or algo.bonus.type off.",
    ),
    Pair(
        "replay.filter.type",
        "algo.anneal.type",
        lambda plan: _filters(plan) and _anneals(plan),
        "While n and discount move, steps that are equal now need not be equal when they are drawn.",
        "Leave replay.filter.type or algo.anneal.type off.",
    ),
    Pair(
        "replay.on_device",
        "algo.view.type",
        lambda plan: _mirrors(plan) and isinstance(plan.algo.view, SequencesView),
        "Only batches of single steps are stacked on the device.",
        "Leave replay.on_device off, or algo.view.type at steps.",
    ),
    Pair(
        "replay.on_device",
        "replay.compress",
        lambda plan: _mirrors(plan) and _compresses(plan),
        "A copy on the device has every frame as it is; there is nothing left to save.",
        "Leave replay.on_device or replay.compress off.",
    ),
    Pair(
        "replay.on_device",
        "runtime.replay_process",
        lambda plan: _mirrors(plan) and has_replay_process(plan),
        "A process of its own cuts whole batches; a copy on the device wants only their places.",
        "Leave replay.on_device or runtime.replay_process off.",
    ),
    Pair(
        "replay.compress",
        "runtime.replay_process",
        # On Ray only the replay's own process sees its rows.
        lambda plan: _compresses(plan) and isinstance(plan.runtime, ProcessesRuntime) and plan.runtime.replay_process,
        "The rows of a replay in a process of its own are seen by two processes, compressed ones only by one.",
        "Leave replay.compress or runtime.replay_process off.",
    ),
    Pair(
        "learners.num",
        "sync.type",
        lambda plan: is_together(plan) and isinstance(plan.sync, SoloSync),
        "Several learners have to agree on their weights.",
        "Leave sync.type out for the usual way (allreduce), or learners.num at 1.",
    ),
    Pair(
        "learners.num",
        "population.num",
        lambda plan: is_together(plan) and not is_alone(plan),
        "Several learners keep one set of weights, the members of a population each have their own.",
        "Leave learners.num or population.num at 1.",
    ),
    Pair(
        "learners.backend",
        "runtime.type",
        lambda plan: is_together(plan) and plan.learners.backend == "shared" and isinstance(plan.runtime, RayRuntime),
        "Learners on Ray may be on different nodes, which share no memory.",
        "Leave learners.backend out, or use runtime.type=processes or inline.",
    ),
    Pair(
        "learners.backend",
        "runtime.type",
        lambda plan: plan.learners.backend in ("nccl", "mpi") and isinstance(plan.runtime, RayRuntime),
        "Learners on Ray are processes that Ray starts, and meet by gloo.",
        "Leave learners.backend out, or use runtime.type=processes or inline.",
    ),
    Pair(
        "learners.backend",
        "sync.type",
        lambda plan: plan.learners.backend in ("nccl", "mpi") and isinstance(plan.sync, Serving),
        "A parameter server's shards live in processes that qfleet starts, and compute on a CPU.",
        "Use sync.type=allreduce, or leave learners.backend out.",
    ),
    Pair(
        "learners.backend",
        "runtime.device",
        lambda plan: plan.learners.backend == "nccl" and not str(plan.runtime.device).startswith("cuda"),
        "NCCL connects accelerators.",
        "Add runtime.device=cuda, or use learners.backend=gloo.",
    ),
    Pair(
        "learners.backend",
        "sync.codec.type",
        lambda plan: plan.learners.backend == "nccl" and isinstance(plan.sync, Coded) and plan.sync.codec != NoCodec(),
        "Codecs compute on a CPU.",
        "Leave sync.codec.type out, or use learners.backend=gloo.",
    ),
    Pair(
        "learners.bundles",
        "runtime.type",
        lambda plan: has_bundles(plan) and isinstance(plan.runtime, ProcessesRuntime),
        "A bundle acts in its learner's process; there are no other actors.",
        "Use runtime.type=inline or ray, or leave learners.bundles off.",
    ),
    Pair(
        "learners.bundles",
        "actors.num",
        lambda plan: has_bundles(plan) and plan.actors.num > 1,
        "A bundle acts in its learner's process; there are no other actors.",
        "Leave actors.num at 1, or learners.bundles off.",
    ),
    Pair(
        "learners.bundles",
        "runtime.replay_process",
        lambda plan: has_bundles(plan) and isinstance(plan.runtime, RayRuntime) and plan.runtime.replay_process,
        "A bundle remembers in its learner's process.",
        "Leave learners.bundles or runtime.replay_process off.",
    ),
    Pair(
        "learners.bundles",
        "learners.balance",
        lambda plan: has_bundles(plan) and plan.learners.balance,
        "A bundle's gradient counts by what its replay holds, not by its speed.",
        "Leave learners.bundles or learners.balance off.",
    ),
    Pair(
        "learners.bundles",
        "steer.batch.type",
        lambda plan: has_bundles(plan) and not isinstance(plan.steer.batch, SteadyBatch),
        "Every bundle draws batches of its own, all of one size.",
        "Leave learners.bundles off, or steer.batch.type out.",
    ),
    Pair(
        "learners.num",
        "replay.on_device",
        lambda plan: is_together(plan) and _mirrors(plan),
        "Only the learner beside the replay sees its mirror.",
        "Leave replay.on_device off, or learners.num at 1.",
    ),
    Pair(
        "learners.num",
        "env.normalize",
        lambda plan: is_together(plan) and plan.env.normalize != "off",
        "What is normalised by is only known beside the replay.",
        "Leave env.normalize off, or learners.num at 1.",
    ),
    Pair(
        "learners.num",
        "replay.type",
        lambda plan: is_together(plan) and is_fresh(plan),
        "Fresh experience is cut into minibatches of several sizes, learned from by one learner.",
        "Use replay.type=buffer, or leave learners.num at 1.",
    ),
    Pair(
        "population.num",
        "replay.type",
        lambda plan: not is_alone(plan) and is_fresh(plan),
        "Members share a replay; fresh experience is only of use to the member whose policy made it.",
        "Use replay.type=buffer, or start several runs with --seeds.",
    ),
    Pair(
        "population.num",
        "eval.episodes",
        lambda plan: not is_alone(plan) and _unjudged(plan),
        "Validation scores decide who leads, and there are none with 0 episodes.",
        "Set eval.episodes to 20 or so, or leave population.num at 1.",
    ),
)
