"""Incompatible settings: the exact message of every entry of the two tables, and plans that are allowed."""

import shlex
from typing import NamedTuple

import pytest

from qfleet.errors import UsageError
from qfleet.plan import compose, paths
from qfleet.plan.schema import Plan
from qfleet.plan.validate.case import COMMAND_LINE
from qfleet.plan.validate.no_effect import NO_EFFECT
from qfleet.plan.validate.pairs import PAIRS


class Refused(NamedTuple):
    """Settings, and the three sentences they earn."""

    settings: str
    what: str
    why: str
    fix: str


PAIRED = [
    Refused(
        "learners.num=2 sync.type=solo",
        "learners.num=2 (command line) does not go with sync.type=solo (command line)",
        "Several learners have to synchronise their weights.",
        "Leave sync.type out for the default (allreduce), or learners.num at 1.",
    ),
    Refused(
        "learners.num=2 population.num=2 env.num=8",
        "learners.num=2 (command line) does not go with population.num=2 (command line)",
        "Several learners keep one set of weights, the members of a population each have their own.",
        "Leave learners.num or population.num at 1.",
    ),
    Refused(
        "learners.num=2 learners.backend=shared runtime.type=ray",
        "learners.backend=shared (command line) does not go with runtime.type=ray (command line)",
        "Learners on Ray may be on different nodes, which share no memory.",
        "Leave learners.backend out, or use runtime.type=processes or inline.",
    ),
    Refused(
        "learners.num=2 learners.backend=mpi runtime.type=ray",
        "learners.backend=mpi (command line) does not go with runtime.type=ray (command line)",
        "Learners on Ray are processes that Ray starts, and connect by gloo.",
        "Leave learners.backend out, or use runtime.type=processes or inline.",
    ),
    Refused(
        "learners.num=2 learners.backend=mpi sync.type=server",
        "learners.backend=mpi (command line) does not go with sync.type=server (command line)",
        "A parameter server's shards live in processes that qfleet starts, and compute on a CPU.",
        "Use sync.type=allreduce, or leave learners.backend out.",
    ),
    Refused(
        "learners.num=2 learners.backend=nccl",
        "learners.backend=nccl (command line) does not go with runtime.device=none (default)",
        "NCCL connects accelerators.",
        "Add runtime.device=cuda, or use learners.backend=gloo.",
    ),
    Refused(
        "learners.num=2 learners.backend=nccl runtime.device=cuda sync.codec.type=fp16",
        "learners.backend=nccl (command line) does not go with sync.codec.type=fp16 (command line)",
        "Codecs compute on a CPU.",
        "Leave sync.codec.type out, or use learners.backend=gloo.",
    ),
    Refused(
        "learners.num=2 learners.bundles=true runtime.type=processes",
        "learners.bundles=true (command line) does not go with runtime.type=processes (command line)",
        "An actor-learner acts in its own process; there are no other actors.",
        "Use runtime.type=inline or ray, or leave learners.bundles off.",
    ),
    Refused(
        "learners.num=2 learners.bundles=true runtime.type=ray actors.num=2",
        "learners.bundles=true (command line) does not go with actors.num=2 (command line)",
        "An actor-learner acts in its own process; there are no other actors.",
        "Leave actors.num at 1, or learners.bundles off.",
    ),
    Refused(
        "learners.num=2 learners.bundles=true learners.balance=true",
        "learners.bundles=true (command line) does not go with learners.balance=true (command line)",
        "An actor-learner's gradient is weighted by the content of its replay, not by its speed.",
        "Leave learners.bundles or learners.balance off.",
    ),
    Refused(
        "learners.num=2 learners.bundles=true steer.batch.type=grow",
        "learners.bundles=true (command line) does not go with steer.batch.type=grow (command line)",
        "Every actor-learner samples its own batches, all of one size.",
        "Leave learners.bundles off, or steer.batch.type out.",
    ),
    Refused(
        "learners.num=2 replay.on_device=true",
        "learners.num=2 (command line) does not go with replay.on_device=true (command line)",
        "Only the learner in the replay's process can use its copy on the device.",
        "Leave replay.on_device off, or learners.num at 1.",
    ),
    Refused(
        "learners.num=2 env.normalize=obs",
        "learners.num=2 (command line) does not go with env.normalize=obs (command line)",
        "The statistics for normalising are only known in the replay's process.",
        "Leave env.normalize off, or learners.num at 1.",
    ),
    Refused(
        "learners.num=2 replay.type=fresh",
        "learners.num=2 (command line) does not go with replay.type=fresh (command line)",
        "Fresh experience is cut into minibatches of different sizes, which only a single learner supports.",
        "Use replay.type=buffer, or leave learners.num at 1.",
    ),
    Refused(
        "replay.on_device=true algo.view.type=sequences net.memory.type=gru",
        "replay.on_device=true (command line) does not go with algo.view.type=sequences (command line)",
        "Only batches of single steps are stacked on the device.",
        "Leave replay.on_device off, or algo.view.type at steps.",
    ),
    Refused(
        "replay.on_device=true replay.compress=true",
        "replay.on_device=true (command line) does not go with replay.compress=true (command line)",
        "The copy on the device holds every frame uncompressed, so compression would save nothing.",
        "Leave replay.on_device or replay.compress off.",
    ),
    Refused(
        "replay.on_device=true runtime.type=processes runtime.replay_process=true",
        "replay.on_device=true (command line) does not go with runtime.replay_process=true (command line)",
        "The replay process sends whole batches; the copy on the device needs only their indices.",
        "Leave replay.on_device or runtime.replay_process off.",
    ),
    Refused(
        "runtime.type=processes runtime.replay_process=true replay.type=fresh",
        "runtime.replay_process=true (command line) does not go with replay.type=fresh (command line)",
        "Fresh experience is learned from as it comes; there is no replay to keep elsewhere.",
        "Leave runtime.replay_process off, or use replay.type=buffer.",
    ),
    Refused(
        "runtime.type=ray runtime.replay_process=true replay.type=fresh",
        "runtime.replay_process=true (command line) does not go with replay.type=fresh (command line)",
        "Fresh experience is learned from as it comes; there is no replay to keep elsewhere.",
        "Leave runtime.replay_process off, or use replay.type=buffer.",
    ),
    Refused(
        "runtime.type=ray runtime.replay_process=true replay.on_device=true",
        "replay.on_device=true (command line) does not go with runtime.replay_process=true (command line)",
        "The replay process sends whole batches; the copy on the device needs only their indices.",
        "Leave replay.on_device or runtime.replay_process off.",
    ),
    Refused(
        "runtime.type=ray runtime.replay_process=true env.num=2 learners.num=2 learners.bundles=true",
        "learners.bundles=true (command line) does not go with runtime.replay_process=true (command line)",
        "An actor-learner has its replay in its own process.",
        "Leave learners.bundles or runtime.replay_process off.",
    ),
    Refused(
        "runtime.type=processes runtime.inference=central",
        "runtime.inference=central (command line) does not go with actors.num=1 (default)",
        "A single actor already chooses all actions.",
        "Leave runtime.inference out, or set actors.num to 2 or more.",
    ),
    Refused(
        "algo.view.type=sequences",
        "algo.view.type=sequences (command line) does not go with net.memory.type=off (default)",
        "Sequences are unrolled through a memory; without one each step can be learned from by itself.",
        "Set net.memory.type=lstm or gru, or leave algo.view.type at steps.",
    ),
    Refused(
        "net.memory.type=gru",
        "net.memory.type=gru (command line) does not go with algo.view.type=steps (default)",
        "A memory depends on earlier steps, so it must be learned from sequences.",
        "Set algo.view.type=sequences, or net.memory.type=off.",
    ),
    Refused(
        "replay.type=fresh net.memory.type=lstm",
        "replay.type=fresh (command line) does not go with net.memory.type=lstm (command line)",
        "Fresh steps are shuffled before they are learned from, which a memory cannot follow.",
        "Use the replay (replay.type=buffer, algo.view.type=sequences), or net.memory.type=off.",
    ),
    Refused(
        "replay.type=fresh net.head.type=quantile",
        "replay.type=fresh (command line) does not go with net.head.type=quantile (command line)",
        "Q(lambda) returns are numbers, not distributions.",
        "Use net.head.type=scalar, or replay.type=buffer.",
    ),
    Refused(
        "replay.type=fresh algo.rescale=true",
        "replay.type=fresh (command line) does not go with algo.rescale=true (command line)",
        "Q(lambda) returns add rewards and values up, which rescaled values do not allow.",
        "Leave algo.rescale off; env.normalize=reward keeps large rewards small.",
    ),
    Refused(
        "net.decoupled=true net.head.type=categorical",
        "net.decoupled=true (command line) does not go with net.head.type=categorical (command line)",
        "A joint action is worth the mean over its dimensions; the mean of distributions is not one of them.",
        "Use net.head.type=scalar, or leave net.decoupled off.",
    ),
    Refused(
        "net.decoupled=true net.memory.type=lstm algo.view.type=sequences",
        "net.decoupled=true (command line) does not go with net.memory.type=lstm (command line)",
        "A memory sees the previous joint action as one-hot, which many dimensions make far too long.",
        "Use net.memory.type=off, or leave net.decoupled off.",
    ),
    Refused(
        "replay.sampler.type=prioritized replay.sampler.initial=actor net.head.type=categorical",
        "replay.sampler.initial=actor (command line) does not go with net.head.type=categorical (command line)",
        "Actors know errors of values, a categorical head's priorities are divergences: they cannot be compared.",
        "Use replay.sampler.initial=largest, or net.head.type=quantile.",
    ),
    Refused(
        "replay.sampler.type=prioritized replay.sampler.initial=actor env.normalize=both",
        "replay.sampler.initial=actor (command line) does not go with env.normalize=both (command line)",
        "Actors compute errors from raw rewards, but the network's values are on the scale of normalised rewards.",
        "Use replay.sampler.initial=largest, or env.normalize=obs or off.",
    ),
    Refused(
        "replay.type=fresh algo.view.type=sequences",
        "replay.type=fresh (command line) does not go with algo.view.type=sequences (command line)",
        "Fresh steps are shuffled before they are learned from.",
        "Leave algo.view.type at steps, or use replay.type=buffer.",
    ),
    Refused(
        "replay.type=fresh algo.anneal.type=exponential",
        "algo.anneal.type=exponential (command line) does not go with replay.type=fresh (command line)",
        "Q(lambda) returns weigh every number of steps, so there is no n to move: see replay.trace.",
        "Use replay.type=buffer, or leave algo.anneal.type off.",
    ),
    Refused(
        "algo.anneal.type=exponential algo.discount=1",
        "algo.anneal.type=exponential (command line) does not go with algo.discount=1.0 (command line)",
        "1 - discount shrinks by a constant factor, which never ends at zero.",
        "Use algo.discount=0.999, or leave algo.anneal.type off.",
    ),
    Refused(
        "replay.type=fresh steer.batch.type=grow",
        "steer.batch.type=grow (command line) does not go with replay.type=fresh (command line)",
        "Fresh experience is cut into replay.minibatches parts: how large they are follows from that.",
        "Use replay.type=buffer, or leave steer.batch.type off.",
    ),
    Refused(
        "steer.batch.type=grow eval.episodes=0",
        "steer.batch.type=grow (command line) does not go with eval.episodes=0 (command line)",
        "Steering uses validation scores, and there are none with 0 episodes.",
        "Set eval.episodes to 20 or so, or leave steer.batch.type off.",
    ),
    Refused(
        "steer.learning_rate.type=plateau eval.episodes=0",
        "steer.learning_rate.type=plateau (command line) does not go with eval.episodes=0 (command line)",
        "Steering uses validation scores, and there are none with 0 episodes.",
        "Set eval.episodes to 20 or so, or leave steer.learning_rate.type off.",
    ),
    Refused(
        "steer.stop_patience=3 eval.episodes=0",
        "steer.stop_patience=3 (command line) does not go with eval.episodes=0 (command line)",
        "Steering uses validation scores, and there are none with 0 episodes.",
        "Set eval.episodes to 20 or so, or leave steer.stop_patience out.",
    ),
    Refused(
        "replay.filter.type=duplicates algo.view.type=sequences net.memory.type=lstm",
        "replay.filter.type=duplicates (command line) does not go with algo.view.type=sequences (command line)",
        "Sequences must be contiguous, and the filter leaves out repeated steps.",
        "Leave replay.filter.type off, or algo.view.type at steps.",
    ),
    Refused(
        "replay.filter.type=duplicates algo.bonus.type=count",
        "replay.filter.type=duplicates (command line) does not go with algo.bonus.type=count (command line)",
        "The bonus falls with every visit, so no two steps have the same reward and none is a copy.",
        "Leave replay.filter.type or algo.bonus.type off.",
    ),
    Refused(
        "replay.filter.type=duplicates algo.anneal.type=exponential",
        "replay.filter.type=duplicates (command line) does not go with algo.anneal.type=exponential (command line)",
        "While n and discount move, steps that are equal now need not be equal when they are drawn.",
        "Leave replay.filter.type or algo.anneal.type off.",
    ),
    Refused(
        "replay.compress=true runtime.type=processes runtime.replay_process=true",
        "replay.compress=true (command line) does not go with runtime.replay_process=true (command line)",
        "With a replay process two processes read the rows, but only one can read compressed rows.",
        "Leave replay.compress or runtime.replay_process off.",
    ),
    Refused(
        "algo.view.type=sequences net.memory.type=lstm replay.filter.type=duplicates",
        "replay.filter.type=duplicates (command line) does not go with algo.view.type=sequences (command line)",
        "Sequences must be contiguous, and the filter leaves out repeated steps.",
        "Leave replay.filter.type off, or algo.view.type at steps.",
    ),
    Refused(
        "replay.filter.type=duplicates algo.bonus.type=count",
        "replay.filter.type=duplicates (command line) does not go with algo.bonus.type=count (command line)",
        "The bonus falls with every visit, so no two steps have the same reward and none is a copy.",
        "Leave replay.filter.type or algo.bonus.type off.",
    ),
    Refused(
        "replay.filter.type=duplicates algo.anneal.type=exponential",
        "replay.filter.type=duplicates (command line) does not go with algo.anneal.type=exponential (command line)",
        "While n and discount move, steps that are equal now need not be equal when they are drawn.",
        "Leave replay.filter.type or algo.anneal.type off.",
    ),
    Refused(
        "population.num=3 replay.type=fresh",
        "population.num=3 (command line) does not go with replay.type=fresh (command line)",
        "Members share a replay; fresh experience is only of use to the member whose policy made it.",
        "Use replay.type=buffer, or start several runs with --seeds.",
    ),
    Refused(
        "population.num=3 eval.episodes=0",
        "population.num=3 (command line) does not go with eval.episodes=0 (command line)",
        "Validation scores decide which member leads, and there are none with 0 episodes.",
        "Set eval.episodes to 20 or so, or leave population.num at 1.",
    ),
]

ALONE = [
    Refused(
        "sync.type=local",
        "sync.type=local (command line) has no effect",
        "A single learner (learners.num=1) does not synchronise.",
        "Leave sync.type out.",
    ),
    Refused(
        "sync.codec.type=int8",
        "sync.codec.type=int8 (command line) has no effect",
        "With learners.num=1 nothing is sent.",
        "Leave sync.codec.type out.",
    ),
    Refused(
        "learners.backend=gloo",
        "learners.backend=gloo (command line) has no effect",
        "With learners.num=1 there is no other learner to reach.",
        "Leave learners.backend out.",
    ),
    Refused(
        "learners.bundles=true",
        "learners.bundles=true (command line) has no effect",
        "With learners.num=1 there is nothing to divide.",
        "Leave learners.bundles out.",
    ),
    Refused(
        "learners.balance=true",
        "learners.balance=true (command line) has no effect",
        "With learners.num=1 there is nothing to share.",
        "Leave learners.balance out.",
    ),
    Refused(
        "learners.restarts=2",
        "learners.restarts=2 (command line) has no effect",
        "With learners.num=1 there is no other learner that could be lost.",
        "Leave learners.restarts out.",
    ),
    Refused(
        "learners.timeout_seconds=2",
        "learners.timeout_seconds=2.0 (command line) has no effect",
        "With learners.num=1 there is no other learner to wait for.",
        "Leave learners.timeout_seconds out.",
    ),
    Refused(
        "learners.schedule='[5 sync.type=local]'",
        "learners.schedule=[5 sync.type=local] (command line) has no effect",
        "A single learner (learners.num=1) does not synchronise.",
        "Leave learners.schedule out.",
    ),
    Refused(
        "learners.num=2 sync.type=server sync.slow_down=true",
        "sync.slow_down=true (command line) has no effect",
        "Without staleness no gradient is old: see sync.max_staleness.",
        "Leave sync.slow_down out.",
    ),
    Refused(
        "learners.num=2 sync.type=server sync.max_staleness=4 sync.reduce=sum",
        "sync.reduce=sum (command line) has no effect",
        "With staleness every gradient is a step of its own: see sync.type=window.",
        "Leave sync.reduce out.",
    ),
    Refused(
        "learners.num=2 sync.codec.type=sign sync.reduce=sum",
        "sync.reduce=sum (command line) has no effect",
        "Steps are averaged, not gradients: see sync.send.",
        "Leave sync.reduce out.",
    ),
    Refused(
        "learners.num=2 sync.warm_rounds=4",
        "sync.warm_rounds=4 (command line) has no effect",
        "Without sync.codec.type every mean is exact.",
        "Leave sync.warm_rounds out.",
    ),
    Refused(
        "learners.num=2 sync.check_every_rounds=4",
        "sync.check_every_rounds=4 (command line) has no effect",
        "Without sync.codec.type there is nothing to compare.",
        "Leave sync.check_every_rounds out.",
    ),
    Refused(
        "learners.num=2 sync.least_cosine=0.5",
        "sync.least_cosine=0.5 (command line) has no effect",
        "Without sync.codec.type there is nothing to compare.",
        "Leave sync.least_cosine out.",
    ),
    Refused(
        "learners.num=2 sync.type=local sync.outer_momentum=0.5",
        "sync.outer_momentum=0.5 (command line) has no effect",
        "It belongs to the outer step, which only sync.outer_rate makes.",
        "Leave sync.outer_momentum out.",
    ),
    Refused(
        "learners.num=2 learners.backend=mpi learners.restarts=2",
        "learners.restarts=2 (command line) has no effect",
        "MPI starts processes only once: a lost one is not replaced.",
        "Leave learners.restarts out.",
    ),
    Refused(
        "env.rebuilds=2",
        "env.rebuilds=2 (command line) has no effect",
        "Environments are rebuilt in processes of their own: see env.workers.",
        "Leave env.rebuilds out.",
    ),
    Refused(
        "runtime.type=processes runtime.inference=local env.worker_memory_gib=2",
        "env.worker_memory_gib=2.0 (command line) has no effect",
        "It is the memory limit of a process of env.workers.",
        "Leave env.worker_memory_gib out.",
    ),
    *(
        Refused(
            f"{path}={value}",
            f"{path}={value} (command line) has no effect",
            "A single learner (learners.num=1) does not synchronise.",
            f"Leave {path} out.",
        )
        for path, value in (("sync.reduce", "sum"), ("sync.send", "steps"), ("sync.bucket_bytes", "9"))
    ),
    *(
        Refused(
            f"learners.num=2 sync.type=allreduce sync.bucket_bytes=9 {more}",
            "sync.bucket_bytes=9 (command line) has no effect",
            "Gradients go in buckets through sockets and without a codec: see learners.backend.",
            "Leave sync.bucket_bytes out.",
        )
        for more in (
            "",
            "learners.backend=gloo sync.codec.type=int8",
            "learners.backend=gloo sync.send=steps",
            "learners.backend=mpi",
        )
    ),
    Refused(
        "learners.num=2 sync.codec.type=int8 sync.check_every_rounds=0 sync.least_cosine=0.5",
        "sync.least_cosine=0.5 (command line) has no effect",
        "With sync.check_every_rounds=0 nothing is compared.",
        "Leave sync.least_cosine out.",
    ),
    Refused(
        "learners.num=2 sync.codec.type=top_k sync.codec.share=1 sync.codec.sampled=true",
        "sync.codec.sampled=true (command line) has no effect",
        "With sync.codec.share=1 every number is sent.",
        "Leave sync.codec.sampled out.",
    ),
    *(
        Refused(
            f"learners.num=2 sync.type=window sync.num_gradients=1 {path}={value}",
            f"{path}={value} (command line) has no effect",
            "Every gradient is a step of its own: see sync.num_gradients.",
            f"Leave {path} out.",
        )
        for path, value in (("sync.reduce", "sum"), ("sync.window_seconds", "2.0"))
    ),
    Refused(
        "optim.scaling=linear",
        "optim.scaling=linear (command line) has no effect",
        "Without optim.base_batch the learning rate is meant for a batch of any size.",
        "Leave optim.scaling out.",
    ),
    Refused(
        "log.history=true",
        "log.history=true (command line) has no effect",
        "A single inline learner exchanges no messages that could be recorded.",
        "Leave log.history out.",
    ),
    *(
        Refused(
            f"runtime.type=ray env.num=2 learners.num=2 learners.bundles=true runtime.{name}={value}",
            f"runtime.{name}={value} (command line) has no effect",
            "Of a data set nobody acts, and with learners.bundles every learner itself: there are no other actors.",
            f"Leave runtime.{name} out.",
        )
        for name, value in (
            ("chunk_rows", "3"),
            ("slots", "3"),
            ("hung_seconds", "90.0"),
            ("restarts", "3"),
            ("compress", "true"),
            ("actor_cpus", "0.5"),
        )
    ),
    Refused(
        "runtime.type=ray runtime.replay_cpus=0.5",
        "runtime.replay_cpus=0.5 (command line) has no effect",
        "It is the CPUs that the process of runtime.replay_process=true requests.",
        "Leave runtime.replay_cpus out.",
    ),
    Refused(
        "env.worker_memory_gib=2",
        "env.worker_memory_gib=2.0 (command line) has no effect",
        "It is the memory limit of a process of env.workers.",
        "Leave env.worker_memory_gib out.",
    ),
    Refused(
        "learners.num=2 sync.type=server sync.max_staleness=4 sync.spare=1",
        "sync.spare=1 (command line) has no effect",
        "With staleness no learner is waited for: it needs sync.max_staleness=0.",
        "Leave sync.spare out.",
    ),
    Refused(
        "algo.explore.type=softmax algo.explore.steps=500",
        "algo.explore.steps=500 (command line) has no effect",
        "The temperature is constant without algo.explore.end.",
        "Leave algo.explore.steps out.",
    ),
    Refused(
        "algo.explore.type=ladder algo.explore.power=5 env.num=1",
        "algo.explore.power=5.0 (command line) has no effect",
        "A single environment explores with algo.explore.base.",
        "Leave algo.explore.power out.",
    ),
    Refused(
        "algo.bonus.type=count algo.bonus.bits=8 algo.bonus.grid=0.5",
        "algo.bonus.bits=8 (command line) has no effect",
        "Visits are counted by cells of algo.bonus.grid, which have no bits.",
        "Leave algo.bonus.bits out.",
    ),
    Refused(
        "algo.loss=mse net.head.type=implicit",
        "algo.loss=mse (command line) has no effect",
        "A head that describes a distribution has a loss of its own.",
        "Leave algo.loss out.",
    ),
    Refused(
        "net.noisy_sigma=0.1",
        "net.noisy_sigma=0.1 (command line) has no effect",
        "It is the size of the noise of net.noisy=true.",
        "Leave net.noisy_sigma out.",
    ),
    Refused(
        "algo.rule.type=munchausen replay.type=fresh",
        "algo.rule.type=munchausen (command line) has no effect",
        "Fresh experience is learned from by Q(lambda) returns, which take the best action's value.",
        "Leave algo.rule.type out.",
    ),
    Refused(
        "algo.n_step=3 replay.type=fresh",
        "algo.n_step=3 (command line) has no effect",
        "Q(lambda) returns weigh every number of steps: see replay.trace.",
        "Leave algo.n_step out.",
    ),
    Refused(
        "algo.batch_size=32 replay.type=fresh",
        "algo.batch_size=32 (command line) has no effect",
        "replay.minibatches sets into how many parts fresh experience is cut.",
        "Leave algo.batch_size out.",
    ),
    Refused(
        "algo.learn_start_steps=10 replay.type=fresh",
        "algo.learn_start_steps=10 (command line) has no effect",
        "Fresh experience is learned from as soon as it is there.",
        "Leave algo.learn_start_steps out.",
    ),
    Refused(
        "algo.target.type=average replay.type=fresh",
        "algo.target.type=average (command line) has no effect",
        "Without replay there is no target network.",
        "Leave algo.target.type out.",
    ),
    Refused(
        "algo.target.every_updates=10 replay.type=fresh",
        "algo.target.every_updates=10 (command line) has no effect",
        "Without replay there is no target network.",
        "Leave algo.target.every_updates out.",
    ),
    Refused(  # of CartPole, whose own target is an average
        "algo.target.tau=0.1 replay.type=fresh env.id=CartPole-v1",
        "algo.target.tau=0.1 (command line) has no effect",
        "Without replay there is no target network.",
        "Leave algo.target.tau out.",
    ),
    Refused(
        "algo.explore.steps=500 algo.explore.type=softmax",
        "algo.explore.steps=500 (command line) has no effect",
        "The temperature is constant without algo.explore.end.",
        "Leave algo.explore.steps out.",
    ),
    Refused(
        "algo.learn_start_steps=10 replay.type=dataset replay.path=a",
        "algo.learn_start_steps=10 (command line) has no effect",
        "A data set is there from the start.",
        "Leave algo.learn_start_steps out.",
    ),
    *(
        Refused(
            f"{path}=2 replay.type=dataset replay.path=a",
            f"{path}=2 (command line) has no effect",
            "A data set is learned from without acting.",
            f"Leave {path} out.",
        )
        for path in ("env.num", "env.workers")
    ),
    Refused(
        "until.steps=10 until.epochs=1 replay.type=dataset replay.path=a",
        "until.steps=10 (command line) has no effect",
        "The run ends after until.epochs, whose steps are counted when it begins.",
        "Leave until.steps out.",
    ),
    *(
        Refused(
            setting,
            f"{setting} (command line) has no effect",
            why,
            f"Leave {setting.partition('=')[0]} out.",
        )
        for setting, why in (
            ("replay.prefill_share=0.5", "Without replay.prefill there are no recorded steps."),
            (f"replay.prefill_version={'a' * 64}", "Without replay.prefill there is no data set."),
        )
    ),
    *(
        Refused(
            f"{setting} replay.type=dataset replay.path=a replay.order.type=uniform",
            f"{setting} (command line) has no effect",
            "Without epochs the whole data set is in memory: see replay.order.type.",
            f"Leave {setting.partition('=')[0]} out.",
        )
        for setting in ("replay.open_shards=2", "replay.cache_bytes=2000000", "replay.disk_bytes=0")
    ),
    Refused(
        "algo.explore.power=3 algo.explore.type=ladder env.num=1",
        "algo.explore.power=3.0 (command line) has no effect",
        "A single environment explores with algo.explore.base.",
        "Leave algo.explore.power out.",
    ),
    Refused(
        "algo.bonus.bits=9 algo.bonus.type=count algo.bonus.grid=3",
        "algo.bonus.bits=9 (command line) has no effect",
        "Visits are counted by cells of algo.bonus.grid, which have no bits.",
        "Leave algo.bonus.bits out.",
    ),
    Refused(
        "population.every_steps=500",
        "population.every_steps=500 (command line) has no effect",
        "With population.num=1 there is no other member to take weights from.",
        "Leave population.every_steps out.",
    ),
    Refused(
        "population.spread=2",
        "population.spread=2.0 (command line) has no effect",
        "With population.num=1 there is one learning rate, optim.learning_rate.",
        "Leave population.spread out.",
    ),
    *(
        Refused(
            f"{setting} algo.offline.type=bc replay.type=dataset replay.path=a{more}",
            f"{setting} (command line) has no effect",
            "A cloned policy has no values of what follows.",
            f"Leave {setting.partition('=')[0]} out.",
        )
        for setting, more in (
            ("algo.rule.type=max", ""),
            ("algo.n_step=3", ""),
            ("algo.discount=0.5", ""),
            ("algo.loss=mse", ""),
            ("algo.target.type=average", ""),
            ("algo.target.every_updates=10", ""),
            ("algo.target.tau=0.1", " env.id=CartPole-v1"),
        )
    ),
]

NESTED = [
    Refused(
        "replay.type=fresh replay.filter.type=duplicates",
        "replay.filter.type=duplicates has no effect (command line)",
        "replay.type is fresh (command line), which has no filter; filter belongs to buffer.",
        "Add replay.type=buffer, or leave replay.filter.type out.",
    ),
    Refused(
        "algo.explore.type=softmax algo.explore.temperature=0.5 algo.explore.end=2",
        "algo.explore.end=2.0 (command line) is above algo.explore.temperature=0.5 (command line)",
        "Exploration is meant to fall; a hotter choice is a more random one.",
        "Swap them, or leave algo.explore.end out for a constant temperature.",
    ),
    Refused(
        "algo.explore.base=0.3",
        "algo.explore.base=0.3 has no effect (command line)",
        "algo.explore.type is linear (default); base belongs to ladder.",
        "Add algo.explore.type=ladder, or leave algo.explore.base out.",
    ),
    Refused(
        "replay.type=fresh replay.sampler.type=prioritized",
        "replay.sampler.type=prioritized has no effect (command line)",
        "replay.type is fresh (command line), which has no sampler; sampler belongs to buffer.",
        "Add replay.type=buffer, or leave replay.sampler.type out.",
    ),
    Refused(
        "replay.type=fresh replay.sampler.alpha=0.5",
        "replay.sampler.alpha=0.5 has no effect (command line)",
        "replay.type is fresh (command line); alpha belongs to buffer.",
        "Add replay.type=buffer, or leave replay.sampler.alpha out.",
    ),
    Refused(
        "replay.type=fresh replay.capacity=500",
        "replay.capacity=500 has no effect (command line)",
        "replay.type is fresh (command line); capacity belongs to buffer.",
        "Add replay.type=buffer, or leave replay.capacity out.",
    ),
    Refused(
        "replay.epochs=3",
        "replay.epochs=3 has no effect (command line)",
        "replay.type is buffer (default); epochs belongs to fresh.",
        "Add replay.type=fresh, or leave replay.epochs out.",
    ),
    Refused(
        "net.head.atoms=21",
        "net.head.atoms=21 has no effect (command line)",
        "net.head.type is scalar (default); atoms belongs to categorical.",
        "Add net.head.type=categorical, or leave net.head.atoms out.",
    ),
    Refused(
        "net.torso.type=conv net.torso.channels=[8,8]",
        "net.torso.channels=[8, 8] (command line), net.torso.kernels=[4, 4, 3] (default), "
        "net.torso.strides=[2, 2, 2] (default) do not make layers",
        "Each convolution has a number of channels, a kernel size and a stride.",
        "Give each of the three as many numbers, one per layer.",
    ),
    Refused(
        "net.head.type=categorical net.head.low=3 net.head.high=1",
        "net.head.low=3.0 (command line) is not below net.head.high=1.0 (command line)",
        "The atoms of a categorical head stand for returns from low to high.",
        "Give the smallest and the largest discounted return to expect, such as 0 and 100.",
    ),
]


def plan_of(settings: str, preset: str | None = None) -> Plan:
    given = [tuple(setting.split("=", 1)) for setting in shlex.split(settings)]
    env_id = None if any(path == "env.id" for path, _ in given) else "X-v0"
    return compose(env_id, preset, overrides=[(path, text, COMMAND_LINE) for path, text in given]).plan


@pytest.mark.parametrize("refused", [*PAIRED, *ALONE, *NESTED], ids=lambda refused: refused.settings)
def test_the_message_of_every_entry(refused: Refused) -> None:
    for order in (refused.settings, shlex.join(reversed(shlex.split(refused.settings)))):
        with pytest.raises(UsageError) as caught:
            plan_of(order)
        assert (caught.value.what, caught.value.why, caught.value.fix) == refused[1:]


def test_every_entry_of_both_tables_is_tested_here() -> None:
    assert {(pair.reason, pair.fix) for pair in PAIRS} == {(line.why, line.fix) for line in PAIRED}
    assert {(path, reason) for path, _, reason in NO_EFFECT} == {
        (line.what.partition("=")[0], line.why) for line in ALONE
    }


def test_the_tables_name_existing_settings() -> None:
    known = set(paths.index().paths())
    assert {path for pair in PAIRS for path in (pair.first, pair.second)} <= known
    assert {path for path, _, _ in NO_EFFECT} <= known
    assert all(pair.reason.endswith(".") and pair.fix.endswith(".") for pair in PAIRS)


@pytest.mark.parametrize(
    "settings",
    [
        "algo.view.type=sequences net.memory.type=lstm net.head.type=implicit algo.rule.type=munchausen",
        "algo.view.type=sequences net.memory.type=gru algo.rescale=true",
        "replay.type=fresh net.decoupled=true net.noisy=true net.layer_norm=true algo.rule.type=max",
        "replay.type=fresh env.normalize=both",
        "net.decoupled=true algo.rule.type=munchausen net.dueling=true algo.rescale=true",
        "replay.sampler.type=prioritized replay.sampler.initial=actor net.head.type=quantile",
        "replay.sampler.type=prioritized replay.sampler.initial=largest net.head.type=categorical",
        "replay.sampler.type=prioritized replay.sampler.initial=actor env.normalize=obs",
        "net.noisy=true net.noisy_sigma=0.1",
        "algo.loss=mse net.dueling=true",
        "runtime.type=ray runtime.replay_process=true runtime.replay_cpus=0.5 replay.compress=true",
    ],
)
def test_compatible_settings_are_allowed(settings: str) -> None:
    plan_of(settings)


def test_settings_without_effect_are_only_refused_when_the_user_set_them() -> None:
    plan = plan_of("replay.type=fresh", "nstep")  # the preset's n has no effect, and the user did not set it
    assert plan.algo.n_step > 1
    assert plan_of("net.head.type=quantile", "dqn").algo.loss == "huber"


def test_incompatible_pairs_are_refused_from_any_origin() -> None:
    with pytest.raises(UsageError, match=r"net\.head\.type=categorical \(preset c51\)"):
        plan_of("net.decoupled=true", "c51")
