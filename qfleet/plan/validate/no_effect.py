"""Settings that would have no effect, each with its reason: refused when the person who starts the run wrote them.

What a preset or a default says is left alone.
"""

from collections.abc import Callable

from qfleet.plan.schema import CountBonus, InlineRuntime, MaxRule, Plan, ProcessesRuntime, RayRuntime, SoftmaxExplore
from qfleet.plan.sync_schema import (
    AllreduceSync,
    Coded,
    LocalSync,
    NoCodec,
    ServerSync,
    SoloSync,
    TopKCodec,
    WindowSync,
    sends_steps,
)
from qfleet.plan.traits import is_alone, is_distribution, is_fresh, is_together
from qfleet.plan.validate.placement import has_bundles

FLEET = ("chunk_rows", "slots", "hung_seconds", "restarts", "compress", "actor_cpus")
SOCKETS = ("gloo", "nccl")
NOBODY = "With learners.num=1 there is nobody to agree with."
NO_FLEET = "Learners of bundles act by themselves: there are no actors elsewhere."
ONE_BY_ONE = "Every gradient is a step of its own: see sync.num_gradients."


def _in_step(plan: Plan) -> bool:
    return isinstance(plan.sync, ServerSync) and plan.sync.max_staleness == 0


def _loose(plan: Plan) -> bool:
    return isinstance(plan.sync, ServerSync) and plan.sync.max_staleness != 0


def _unsupervised(plan: Plan) -> bool:
    # Central inference of processes has workers of its own, and may be chosen when the run begins.
    runtime = plan.runtime
    return plan.env.workers == 0 and not (isinstance(runtime, ProcessesRuntime) and runtime.inference != "local")


def _uncoded(plan: Plan) -> bool:
    return isinstance(plan.sync, Coded) and plan.sync.codec == NoCodec()


def _one_by_one(plan: Plan) -> bool:
    return isinstance(plan.sync, WindowSync) and plan.sync.num_gradients == 1


def _unbucketed(plan: Plan) -> bool:
    if not (is_together(plan) and isinstance(plan.sync, AllreduceSync)):
        return False
    sockets = isinstance(plan.runtime, RayRuntime) or plan.learners.backend in SOCKETS
    return not sockets or plan.sync.codec != NoCodec() or sends_steps(plan.sync)


def _unchecked(plan: Plan) -> bool:
    return isinstance(plan.sync, Coded) and not _uncoded(plan) and plan.sync.check_every_rounds == 0


def _whole(plan: Plan) -> bool:
    codec = plan.sync.codec if isinstance(plan.sync, Coded) else NoCodec()
    return isinstance(codec, TopKCodec) and codec.share == 1.0


def _fleetless(plan: Plan) -> bool:
    return isinstance(plan.runtime, RayRuntime) and has_bundles(plan)


# (setting, when it has no effect, why)
IDLE: tuple[tuple[str, Callable[[Plan], bool], str], ...] = (
    ("algo.loss", is_distribution, "A head that describes a distribution has a loss of its own."),
    ("net.noisy_sigma", lambda plan: not plan.net.noisy, "It is the size of the noise of net.noisy=true."),
    (
        "algo.rule.type",
        lambda plan: is_fresh(plan) and not isinstance(plan.algo.rule, MaxRule),
        "Fresh experience is learned from by Q(lambda) returns, which take the best action's value.",
    ),
    (
        "algo.explore.steps",
        lambda plan: isinstance(plan.algo.explore, SoftmaxExplore) and plan.algo.explore.end is None,
        "The temperature is constant without algo.explore.end.",
    ),
    (
        "algo.explore.power",
        lambda plan: plan.env.num == 1,
        "A single environment explores with algo.explore.base.",
    ),
    (
        "algo.bonus.bits",
        lambda plan: isinstance(plan.algo.bonus, CountBonus) and plan.algo.bonus.grid is not None,
        "Visits are counted by cells of algo.bonus.grid, which have no bits.",
    ),
    ("algo.n_step", is_fresh, "Q(lambda) returns weigh every number of steps: see replay.trace."),
    ("algo.batch_size", is_fresh, "replay.minibatches says into how many parts fresh experience is cut."),
    ("algo.learn_start_steps", is_fresh, "Fresh experience is learned from as soon as it is there."),
    ("algo.target.type", is_fresh, "Without replay there is no target network."),
    ("algo.target.every_updates", is_fresh, "Without replay there is no target network."),
    ("algo.target.tau", is_fresh, "Without replay there is no target network."),
    (
        "sync.type",
        lambda plan: not is_together(plan) and not isinstance(plan.sync, SoloSync),
        NOBODY,
    ),
    ("sync.codec.type", lambda plan: not is_together(plan), "With learners.num=1 nothing is sent."),
    ("learners.backend", lambda plan: not is_together(plan), "With learners.num=1 there is nobody to reach."),
    ("learners.bundles", lambda plan: not is_together(plan), "With learners.num=1 everything is in one bundle."),
    ("learners.balance", lambda plan: not is_together(plan), "With learners.num=1 there is nothing to share."),
    ("learners.restarts", lambda plan: not is_together(plan), "With learners.num=1 nobody can be lost."),
    ("learners.schedule", lambda plan: not is_together(plan), NOBODY),
    ("learners.timeout_seconds", lambda plan: not is_together(plan), "With learners.num=1 nobody is waited for."),
    *((path, lambda plan: not is_together(plan), NOBODY) for path in ("sync.reduce", "sync.send", "sync.bucket_bytes")),
    (
        "sync.bucket_bytes",
        _unbucketed,
        "Gradients go in buckets through sockets and without a codec: see learners.backend.",
    ),
    ("sync.slow_down", _in_step, "Without staleness no gradient is old: see sync.max_staleness."),
    (
        "sync.reduce",
        lambda plan: isinstance(plan.sync, AllreduceSync) and sends_steps(plan.sync),
        "Steps are averaged, not gradients: see sync.send.",
    ),
    ("sync.reduce", _loose, "With staleness every gradient is a step of its own: see sync.type=window."),
    ("sync.warm_rounds", _uncoded, "Without sync.codec.type every mean is exact."),
    ("sync.check_every_rounds", _uncoded, "Without sync.codec.type there is nothing to compare."),
    ("sync.least_cosine", _uncoded, "Without sync.codec.type there is nothing to compare."),
    ("sync.least_cosine", _unchecked, "With sync.check_every_rounds=0 nothing is compared."),
    ("sync.codec.sampled", _whole, "With sync.codec.share=1 every number is sent."),
    ("sync.window_seconds", _one_by_one, ONE_BY_ONE),
    ("sync.reduce", _one_by_one, ONE_BY_ONE),
    (
        "sync.outer_momentum",
        lambda plan: isinstance(plan.sync, LocalSync) and plan.sync.outer_rate is None,
        "It is of the outer step, which only sync.outer_rate makes.",
    ),
    (
        "learners.restarts",
        lambda plan: is_together(plan) and plan.learners.backend == "mpi",
        "MPI starts processes once: one that is lost is not replaced.",
    ),
    (
        "optim.scaling",
        lambda plan: plan.optim.base_batch is None,
        "Without optim.base_batch the learning rate is meant for a batch of any size.",
    ),
    (
        "log.history",
        lambda plan: isinstance(plan.runtime, InlineRuntime) and not is_together(plan),
        "A learner that acts by itself exchanges nothing that could be written down.",
    ),
    *((f"runtime.{name}", _fleetless, NO_FLEET) for name in FLEET),
    (
        "runtime.replay_cpus",
        lambda plan: isinstance(plan.runtime, RayRuntime) and not plan.runtime.replay_process,
        "It is what the process of runtime.replay_process=true asks for.",
    ),
    ("env.rebuilds", _unsupervised, "Environments are rebuilt in processes of their own: see env.workers."),
    ("env.worker_memory_gib", _unsupervised, "It is what a process of env.workers may take."),
    ("sync.spare", _loose, "With staleness nobody is waited for: sync.spare goes with sync.max_staleness=0."),
    ("population.every_steps", is_alone, "With population.num=1 there is nobody to take weights from."),
    ("population.spread", is_alone, "With population.num=1 there is one learning rate, optim.learning_rate."),
)
