"""Settings that would have no effect, each with its reason: refused when the user set them for this run.

Values from a preset or a default are accepted.
"""

from collections.abc import Callable

from qfleet.plan import sync_schema
from qfleet.plan.schema import (
    BufferReplay,
    CountBonus,
    InlineRuntime,
    MaxRule,
    Plan,
    ProcessesRuntime,
    RayRuntime,
    SoftmaxExplore,
)
from qfleet.plan.traits import (
    clones,
    has_one_learner,
    has_one_member,
    has_several_learners,
    is_distributional,
    learns_from_data,
    learns_in_epochs,
    uses_fresh_replay,
)
from qfleet.plan.validate.placement import has_actor_learners

ACTOR_SETTINGS = ("chunk_rows", "slots", "hung_seconds", "restarts", "compress", "actor_cpus")
SOCKETS = ("gloo", "nccl")
CLONED = (
    "algo.rule.type",
    "algo.n_step",
    "algo.discount",
    "algo.loss",
    "algo.target.type",
    "algo.target.every_updates",
    "algo.target.tau",
)
ONE_LEARNER = "A single learner (learners.num=1) does not synchronise."
NO_ACTORS = "Of a data set nobody acts, and with learners.bundles every learner itself: there are no other actors."
IN_MEMORY = "Without epochs the whole data set is in memory: see replay.order.type."
STEP_PER_GRADIENT = "Every gradient is a step of its own: see sync.num_gradients."


def _has_no_prefill(plan: Plan) -> bool:
    return isinstance(plan.replay, BufferReplay) and not plan.replay.prefill


def _draws_recorded(plan: Plan) -> bool:
    return learns_from_data(plan) and not learns_in_epochs(plan)


def _is_synchronous(plan: Plan) -> bool:
    return isinstance(plan.sync, sync_schema.ServerSync) and plan.sync.max_staleness == 0


def _is_asynchronous(plan: Plan) -> bool:
    return isinstance(plan.sync, sync_schema.ServerSync) and plan.sync.max_staleness != 0


def _has_no_env_workers(plan: Plan) -> bool:
    # Central inference of processes has workers of its own, and may be chosen when the run begins.
    runtime = plan.runtime
    return plan.env.workers == 0 and not (isinstance(runtime, ProcessesRuntime) and runtime.inference != "local")


def _has_no_codec(plan: Plan) -> bool:
    return isinstance(plan.sync, sync_schema.Coded) and plan.sync.codec == sync_schema.NoCodec()


def _steps_per_gradient(plan: Plan) -> bool:
    return isinstance(plan.sync, sync_schema.WindowSync) and plan.sync.num_gradients == 1


def _has_no_buckets(plan: Plan) -> bool:
    if not (has_several_learners(plan) and isinstance(plan.sync, sync_schema.AllreduceSync)):
        return False
    sockets = isinstance(plan.runtime, RayRuntime) or plan.learners.backend in SOCKETS
    return not sockets or plan.sync.codec != sync_schema.NoCodec() or sync_schema.sends_steps(plan.sync)


def _is_never_compared(plan: Plan) -> bool:
    return isinstance(plan.sync, sync_schema.Coded) and not _has_no_codec(plan) and plan.sync.check_every_rounds == 0


def _sends_every_number(plan: Plan) -> bool:
    codec = plan.sync.codec if isinstance(plan.sync, sync_schema.Coded) else sync_schema.NoCodec()
    return isinstance(codec, sync_schema.TopKCodec) and codec.share == 1.0


def _has_no_actors(plan: Plan) -> bool:
    return learns_from_data(plan) or (isinstance(plan.runtime, RayRuntime) and has_actor_learners(plan))


# (setting, when it has no effect, why)
NO_EFFECT: tuple[tuple[str, Callable[[Plan], bool], str], ...] = (
    ("algo.loss", is_distributional, "A head that describes a distribution has a loss of its own."),
    ("net.noisy_sigma", lambda plan: not plan.net.noisy, "It is the size of the noise of net.noisy=true."),
    (
        "algo.rule.type",
        lambda plan: uses_fresh_replay(plan) and not isinstance(plan.algo.rule, MaxRule),
        "Fresh experience is learned from by Q(lambda) returns, which take the best action's value.",
    ),
    (
        "algo.explore.steps",
        lambda plan: isinstance(plan.algo.explore, SoftmaxExplore) and plan.algo.explore.end is None,
        "The temperature is constant without algo.explore.end.",
    ),
    ("algo.explore.power", lambda plan: plan.env.num == 1, "A single environment explores with algo.explore.base."),
    (
        "algo.bonus.bits",
        lambda plan: isinstance(plan.algo.bonus, CountBonus) and plan.algo.bonus.grid is not None,
        "Visits are counted by cells of algo.bonus.grid, which have no bits.",
    ),
    ("algo.n_step", uses_fresh_replay, "Q(lambda) returns weigh every number of steps: see replay.trace."),
    ("algo.batch_size", uses_fresh_replay, "replay.minibatches sets into how many parts fresh experience is cut."),
    ("algo.learn_start_steps", uses_fresh_replay, "Fresh experience is learned from as soon as it is there."),
    ("algo.learn_start_steps", learns_from_data, "A data set is there from the start."),
    ("env.num", learns_from_data, "A data set is learned from without acting."),
    ("env.workers", learns_from_data, "A data set is learned from without acting."),
    ("replay.prefill_share", _has_no_prefill, "Without replay.prefill there are no recorded steps."),
    ("replay.prefill_version", _has_no_prefill, "Without replay.prefill there is no data set."),
    ("replay.open_shards", _draws_recorded, IN_MEMORY),
    ("replay.cache_bytes", _draws_recorded, IN_MEMORY),
    ("replay.disk_bytes", _draws_recorded, IN_MEMORY),
    (
        "until.steps",
        lambda plan: plan.until.epochs is not None,
        "The run ends after until.epochs, whose steps are counted when it begins.",
    ),
    ("algo.target.type", uses_fresh_replay, "Without replay there is no target network."),
    ("algo.target.every_updates", uses_fresh_replay, "Without replay there is no target network."),
    ("algo.target.tau", uses_fresh_replay, "Without replay there is no target network."),
    *((path, clones, "A cloned policy has no values of what follows.") for path in CLONED),
    ("sync.type", lambda plan: has_one_learner(plan) and not isinstance(plan.sync, sync_schema.SoloSync), ONE_LEARNER),
    ("sync.codec.type", has_one_learner, "With learners.num=1 nothing is sent."),
    ("learners.backend", has_one_learner, "With learners.num=1 there is no other learner to reach."),
    ("learners.bundles", has_one_learner, "With learners.num=1 there is nothing to divide."),
    ("learners.balance", has_one_learner, "With learners.num=1 there is nothing to share."),
    ("learners.restarts", has_one_learner, "With learners.num=1 there is no other learner that could be lost."),
    ("learners.schedule", has_one_learner, ONE_LEARNER),
    ("learners.timeout_seconds", has_one_learner, "With learners.num=1 there is no other learner to wait for."),
    *((path, has_one_learner, ONE_LEARNER) for path in ("sync.reduce", "sync.send", "sync.bucket_bytes")),
    (
        "sync.bucket_bytes",
        _has_no_buckets,
        "Gradients go in buckets through sockets and without a codec: see learners.backend.",
    ),
    ("sync.slow_down", _is_synchronous, "Without staleness no gradient is old: see sync.max_staleness."),
    (
        "sync.reduce",
        lambda plan: isinstance(plan.sync, sync_schema.AllreduceSync) and sync_schema.sends_steps(plan.sync),
        "Steps are averaged, not gradients: see sync.send.",
    ),
    ("sync.reduce", _is_asynchronous, "With staleness every gradient is a step of its own: see sync.type=window."),
    ("sync.warm_rounds", _has_no_codec, "Without sync.codec.type every mean is exact."),
    ("sync.check_every_rounds", _has_no_codec, "Without sync.codec.type there is nothing to compare."),
    ("sync.least_cosine", _has_no_codec, "Without sync.codec.type there is nothing to compare."),
    ("sync.least_cosine", _is_never_compared, "With sync.check_every_rounds=0 nothing is compared."),
    ("sync.codec.sampled", _sends_every_number, "With sync.codec.share=1 every number is sent."),
    ("sync.window_seconds", _steps_per_gradient, STEP_PER_GRADIENT),
    ("sync.reduce", _steps_per_gradient, STEP_PER_GRADIENT),
    (
        "sync.outer_momentum",
        lambda plan: isinstance(plan.sync, sync_schema.LocalSync) and plan.sync.outer_rate is None,
        "It belongs to the outer step, which only sync.outer_rate makes.",
    ),
    (
        "learners.restarts",
        lambda plan: has_several_learners(plan) and plan.learners.backend == "mpi",
        "MPI starts processes only once: a lost one is not replaced.",
    ),
    (
        "optim.scaling",
        lambda plan: plan.optim.base_batch is None,
        "Without optim.base_batch the learning rate is meant for a batch of any size.",
    ),
    (
        "log.history",
        lambda plan: isinstance(plan.runtime, InlineRuntime) and not has_several_learners(plan),
        "A single inline learner exchanges no messages that could be recorded.",
    ),
    *((f"runtime.{name}", _has_no_actors, NO_ACTORS) for name in ACTOR_SETTINGS),
    (
        "runtime.replay_cpus",
        lambda plan: isinstance(plan.runtime, RayRuntime) and not plan.runtime.replay_process,
        "It is the CPUs that the process of runtime.replay_process=true requests.",
    ),
    ("env.rebuilds", _has_no_env_workers, "Environments are rebuilt in processes of their own: see env.workers."),
    ("env.worker_memory_gib", _has_no_env_workers, "It is the memory limit of a process of env.workers."),
    ("sync.spare", _is_asynchronous, "With staleness no learner is waited for: it needs sync.max_staleness=0."),
    ("population.every_steps", has_one_member, "With population.num=1 there is no other member to take weights from."),
    ("population.spread", has_one_member, "With population.num=1 there is one learning rate, optim.learning_rate."),
)
