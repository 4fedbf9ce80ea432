"""The list of incompatible pairs of settings, each with its reason and a fix.

A pair is refused wherever its settings came from.
"""

from collections.abc import Callable
from dataclasses import dataclass

from qfleet.plan import schema
from qfleet.plan.schema import Plan
from qfleet.plan.sync_schema import Coded, NoCodec, Serving, SoloSync
from qfleet.plan.traits import (
    has_one_member,
    has_several_learners,
    is_distributional,
    learns_from_data,
    uses_fresh_replay,
)
from qfleet.plan.validate.placement import has_actor_learners, has_central_inference, has_replay_process


def _has_memory(plan: Plan) -> bool:
    return not isinstance(plan.net.memory, schema.NoMemory)


def _learns_sequences(plan: Plan) -> bool:
    return isinstance(plan.algo.view, schema.SequencesView)


def _has_actor_priorities(plan: Plan) -> bool:
    sampler = plan.replay.sampler if isinstance(plan.replay, schema.BufferReplay) else None
    return isinstance(sampler, schema.PrioritizedSampler) and sampler.initial == "actor"


def _has_filter(plan: Plan) -> bool:
    return isinstance(plan.replay, schema.BufferReplay) and isinstance(plan.replay.filter, schema.DuplicatesFilter)


def _is_on_device(plan: Plan) -> bool:
    return isinstance(plan.replay, schema.BufferReplay) and plan.replay.on_device


def _is_compressed(plan: Plan) -> bool:
    return isinstance(plan.replay, schema.BufferReplay) and plan.replay.compress


def _has_annealing(plan: Plan) -> bool:
    return isinstance(plan.algo.anneal, schema.ExponentialAnneal)


NO_SCORES = "Steering uses validation scores, and there are none with 0 episodes."


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
        lambda plan: uses_fresh_replay(plan) and has_replay_process(plan),
        "Fresh experience is learned from as it comes; there is no replay to keep elsewhere.",
        "Leave runtime.replay_process off, or use replay.type=buffer.",
    ),
    Pair(
        "runtime.inference",
        "actors.num",
        lambda plan: has_central_inference(plan) and plan.actors.num == 1,
        "A single actor already chooses all actions.",
        "Leave runtime.inference out, or set actors.num to 2 or more.",
    ),
    Pair(
        "algo.view.type",
        "net.memory.type",
        lambda plan: _learns_sequences(plan) and not _has_memory(plan) and not uses_fresh_replay(plan),
        "Sequences are unrolled through a memory; without one each step can be learned from by itself.",
        "Set net.memory.type=lstm or gru, or leave algo.view.type at steps.",
    ),
    Pair(
        "net.memory.type",
        "algo.view.type",
        lambda plan: _has_memory(plan) and not _learns_sequences(plan) and not uses_fresh_replay(plan),
        "A memory depends on earlier steps, so it must be learned from sequences.",
        "Set algo.view.type=sequences, or net.memory.type=off.",
    ),
    Pair(
        "replay.type",
        "net.memory.type",
        lambda plan: uses_fresh_replay(plan) and _has_memory(plan),
        "Fresh steps are shuffled before they are learned from, which a memory cannot follow.",
        "Use the replay (replay.type=buffer, algo.view.type=sequences), or net.memory.type=off.",
    ),
    Pair(
        "replay.type",
        "algo.view.type",
        lambda plan: uses_fresh_replay(plan) and _learns_sequences(plan),
        "Fresh steps are shuffled before they are learned from.",
        "Leave algo.view.type at steps, or use replay.type=buffer.",
    ),
    Pair(
        "replay.type",
        "net.head.type",
        lambda plan: uses_fresh_replay(plan) and is_distributional(plan),
        "Q(lambda) returns are numbers, not distributions.",
        "Use net.head.type=scalar, or replay.type=buffer.",
    ),
    Pair(
        "replay.type",
        "algo.rescale",
        lambda plan: uses_fresh_replay(plan) and plan.algo.rescale,
        "Q(lambda) returns add rewards and values up, which rescaled values do not allow.",
        "Leave algo.rescale off; env.normalize=reward keeps large rewards small.",
    ),
    Pair(
        "net.decoupled",
        "net.head.type",
        lambda plan: plan.net.decoupled and is_distributional(plan),
        "A joint action is worth the mean over its dimensions; the mean of distributions is not one of them.",
        "Use net.head.type=scalar, or leave net.decoupled off.",
    ),
    Pair(
        "net.decoupled",
        "net.memory.type",
        lambda plan: plan.net.decoupled and _has_memory(plan),
        "A memory sees the previous joint action as one-hot, which many dimensions make far too long.",
        "Use net.memory.type=off, or leave net.decoupled off.",
    ),
    Pair(
        "replay.sampler.initial",
        "net.head.type",
        lambda plan: _has_actor_priorities(plan) and isinstance(plan.net.head, schema.CategoricalHead),
        "Actors know errors of values, a categorical head's priorities are divergences: they cannot be compared.",
        "Use replay.sampler.initial=largest, or net.head.type=quantile.",
    ),
    Pair(
        "replay.sampler.initial",
        "env.normalize",
        lambda plan: _has_actor_priorities(plan) and plan.env.normalize in ("reward", "both"),
        "Actors compute errors from raw rewards, but the network's values are on the scale of normalised rewards.",
        "Use replay.sampler.initial=largest, or env.normalize=obs or off.",
    ),
    Pair(
        "algo.anneal.type",
        "replay.type",
        lambda plan: _has_annealing(plan) and uses_fresh_replay(plan),
        "Q(lambda) returns weigh every number of steps, so there is no n to move: see replay.trace.",
        "Use replay.type=buffer, or leave algo.anneal.type off.",
    ),
    Pair(
        "algo.anneal.type",
        "algo.discount",
        lambda plan: _has_annealing(plan) and plan.algo.discount == 1.0,
        "1 - discount shrinks by a constant factor, which never ends at zero.",
        "Use algo.discount=0.999, or leave algo.anneal.type off.",
    ),
    Pair(
        "steer.batch.type",
        "replay.type",
        lambda plan: isinstance(plan.steer.batch, schema.GrowingBatch) and uses_fresh_replay(plan),
        "Fresh experience is cut into replay.minibatches parts: how large they are follows from that.",
        "Use replay.type=buffer, or leave steer.batch.type off.",
    ),
    Pair(
        "steer.batch.type",
        "eval.episodes",
        lambda plan: isinstance(plan.steer.batch, schema.GrowingBatch) and plan.eval.episodes == 0,
        NO_SCORES,
        "Set eval.episodes to 20 or so, or leave steer.batch.type off.",
    ),
    Pair(
        "steer.learning_rate.type",
        "eval.episodes",
        lambda plan: isinstance(plan.steer.learning_rate, schema.PlateauRate) and plan.eval.episodes == 0,
        NO_SCORES,
        "Set eval.episodes to 20 or so, or leave steer.learning_rate.type off.",
    ),
    Pair(
        "steer.stop_patience",
        "eval.episodes",
        lambda plan: plan.steer.stop_patience is not None and plan.eval.episodes == 0,
        NO_SCORES,
        "Set eval.episodes to 20 or so, or leave steer.stop_patience out.",
    ),
    Pair(
        "replay.filter.type",
        "algo.view.type",
        lambda plan: _has_filter(plan) and _learns_sequences(plan),
        "Sequences must be contiguous, and the filter leaves out repeated steps.",
        "Leave replay.filter.type off, or algo.view.type at steps.",
    ),
    Pair(
        "replay.filter.type",
        "algo.bonus.type",
        lambda plan: _has_filter(plan) and isinstance(plan.algo.bonus, schema.CountBonus),
        "The bonus falls with every visit, so no two steps have the same reward and none is a copy.",
        "Leave replay.filter.type or algo.bonus.type off.",
    ),
    Pair(
        "replay.filter.type",
        "algo.anneal.type",
        lambda plan: _has_filter(plan) and _has_annealing(plan),
        "While n and discount move, steps that are equal now need not be equal when they are drawn.",
        "Leave replay.filter.type or algo.anneal.type off.",
    ),
    Pair(
        "replay.on_device",
        "algo.view.type",
        lambda plan: _is_on_device(plan) and _learns_sequences(plan),
        "Only batches of single steps are stacked on the device.",
        "Leave replay.on_device off, or algo.view.type at steps.",
    ),
    Pair(
        "replay.on_device",
        "replay.compress",
        lambda plan: _is_on_device(plan) and _is_compressed(plan),
        "The copy on the device holds every frame uncompressed, so compression would save nothing.",
        "Leave replay.on_device or replay.compress off.",
    ),
    Pair(
        "replay.on_device",
        "runtime.replay_process",
        lambda plan: _is_on_device(plan) and has_replay_process(plan),
        "The replay process sends whole batches; the copy on the device needs only their indices.",
        "Leave replay.on_device or runtime.replay_process off.",
    ),
    Pair(
        "replay.compress",
        "runtime.replay_process",
        # On Ray only the replay process reads its rows.
        lambda plan: (
            _is_compressed(plan) and isinstance(plan.runtime, schema.ProcessesRuntime) and plan.runtime.replay_process
        ),
        "With a replay process two processes read the rows, but only one can read compressed rows.",
        "Leave replay.compress or runtime.replay_process off.",
    ),
    Pair(
        "learners.num",
        "sync.type",
        lambda plan: has_several_learners(plan) and isinstance(plan.sync, SoloSync),
        "Several learners have to synchronise their weights.",
        "Leave sync.type out for the default (allreduce), or learners.num at 1.",
    ),
    Pair(
        "learners.num",
        "population.num",
        lambda plan: has_several_learners(plan) and not has_one_member(plan),
        "Several learners keep one set of weights, the members of a population each have their own.",
        "Leave learners.num or population.num at 1.",
    ),
    Pair(
        "learners.backend",
        "runtime.type",
        lambda plan: (
            has_several_learners(plan)
            and plan.learners.backend == "shared"
            and isinstance(plan.runtime, schema.RayRuntime)
        ),
        "Learners on Ray may be on different nodes, which share no memory.",
        "Leave learners.backend out, or use runtime.type=processes or inline.",
    ),
    Pair(
        "learners.backend",
        "runtime.type",
        lambda plan: plan.learners.backend in ("nccl", "mpi") and isinstance(plan.runtime, schema.RayRuntime),
        "Learners on Ray are processes that Ray starts, and connect by gloo.",
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
        lambda plan: has_actor_learners(plan) and isinstance(plan.runtime, schema.ProcessesRuntime),
        "An actor-learner acts in its own process; there are no other actors.",
        "Use runtime.type=inline or ray, or leave learners.bundles off.",
    ),
    Pair(
        "learners.bundles",
        "actors.num",
        lambda plan: has_actor_learners(plan) and plan.actors.num > 1,
        "An actor-learner acts in its own process; there are no other actors.",
        "Leave actors.num at 1, or learners.bundles off.",
    ),
    Pair(
        "learners.bundles",
        "runtime.replay_process",
        lambda plan: (
            has_actor_learners(plan) and isinstance(plan.runtime, schema.RayRuntime) and plan.runtime.replay_process
        ),
        "An actor-learner has its replay in its own process.",
        "Leave learners.bundles or runtime.replay_process off.",
    ),
    Pair(
        "learners.bundles",
        "learners.balance",
        lambda plan: has_actor_learners(plan) and plan.learners.balance,
        "An actor-learner's gradient is weighted by the content of its replay, not by its speed.",
        "Leave learners.bundles or learners.balance off.",
    ),
    Pair(
        "learners.bundles",
        "steer.batch.type",
        lambda plan: has_actor_learners(plan) and not isinstance(plan.steer.batch, schema.SteadyBatch),
        "Every actor-learner samples its own batches, all of one size.",
        "Leave learners.bundles off, or steer.batch.type out.",
    ),
    Pair(
        "learners.num",
        "replay.on_device",
        lambda plan: has_several_learners(plan) and _is_on_device(plan),
        "Only the learner in the replay's process can use its copy on the device.",
        "Leave replay.on_device off, or learners.num at 1.",
    ),
    Pair(
        "learners.num",
        "env.normalize",
        # Those of a data set do not change, and all learners begin with them.
        lambda plan: has_several_learners(plan) and plan.env.normalize != "off" and not learns_from_data(plan),
        "The statistics for normalising are only known in the replay's process.",
        "Leave env.normalize off, or learners.num at 1.",
    ),
    Pair(
        "learners.num",
        "replay.type",
        lambda plan: has_several_learners(plan) and uses_fresh_replay(plan),
        "Fresh experience is cut into minibatches of different sizes, which only a single learner supports.",
        "Use replay.type=buffer, or leave learners.num at 1.",
    ),
    Pair(
        "population.num",
        "replay.type",
        lambda plan: not has_one_member(plan) and uses_fresh_replay(plan),
        "Members share a replay; fresh experience is only of use to the member whose policy made it.",
        "Use replay.type=buffer, or start several runs with --seeds.",
    ),
    Pair(
        "population.num",
        "eval.episodes",
        lambda plan: not has_one_member(plan) and plan.eval.episodes == 0,
        "Validation scores decide which member leads, and there are none with 0 episodes.",
        "Set eval.episodes to 20 or so, or leave population.num at 1.",
    ),
)
