"""The components of a run, made from the plan and joined, for every runtime."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import gymnasium
import msgspec
import numpy as np
import torch
from torch import nn

from qfleet.act import Actor, Explore, Explorer, Policy, PopulationPolicy, make_explorer
from qfleet.audit.history import HistoryLog
from qfleet.data import Array, Batch, Report, Rollout, Sequences, Spec, State, World
from qfleet.data.state_reader import saved_count
from qfleet.envs import TRAIN, is_native, make_world
from qfleet.errors import UsageError
from qfleet.learn import (
    BatchSource,
    Learner,
    PopulationLearner,
    ReplaySource,
    dormant_units,
    make_batch_source,
    make_count_bonus,
    make_learner,
    rate_factors,
)
from qfleet.learn.peers import Peers
from qfleet.learn.transfer import with_mirror
from qfleet.nets import ImplicitQuantileHead, QNet, make_net, set_noise
from qfleet.plan.schema import (
    BufferReplay,
    ImplicitHead,
    InlineRuntime,
    PeriodicReset,
    Plan,
    PrioritizedSampler,
    ProcessesRuntime,
    SteadyBatch,
    SteadyRate,
)
from qfleet.plan.validate.placement import actor_learner_plan, has_actor_learners, has_central_inference, num_senders
from qfleet.qlearn import make_head
from qfleet.replay import Mirror, make_replay
from qfleet.replay import Replay as ReplayBuffer
from qfleet.system.child_process import fork_server
from qfleet.system.restart_budget import RestartBudget

ROLES = "qfleet.distributed.actors.main"  # its imports are all that a process of a run needs
# Purposes of random numbers; each has a generator of its own, so that none disturbs another.
WEIGHTS = 101
EXPLORE = 102
SAMPLE = 103
LAYERS = 104
NOVELTY = 105
WORLDS = 106
SYNC = 107
ACTOR_LEARNERS = 109

EnvMaker = Callable[[], "gymnasium.Env[Any, Any]"]


def stream(seed: int, purpose: int, *more: int) -> np.random.Generator:
    """A generator that depends on nothing but the seed and its purpose."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, purpose, *more])))


class ReplayLost(Exception):
    """The process of the replay was lost, and with it what it held since the last commit."""


class ReplayProcess(Protocol):
    """A replay in another process."""

    budget: RestartBudget  # how often it may be started again

    def use_run_folder(self, folder: Path) -> None:
        """Set the folder of the run."""
        ...

    def start(self) -> None:
        """Start the process, with an empty replay."""
        ...

    def flush(self) -> None:
        """Return when all requests are done."""
        ...


class ActorSide(Protocol):
    """What acts for a run: one actor in this process, or many in other processes."""

    is_remote: bool  # do they live in other processes?
    policy: Policy | PopulationPolicy
    explorer: Explorer

    def start(self) -> None:
        """Begin the first episodes."""
        ...

    def state_dict(self) -> State:
        """What must survive a restart."""
        ...

    def load_state_dict(self, state: State) -> Array:
        """Load it; returns the lanes [B] whose environment could not be restored."""
        ...

    def stop(self) -> None:
        """Stop acting until the run goes on, if it does."""
        ...

    def close(self) -> None:
        """Close worlds and processes."""
        ...


class RemoteActors(ActorSide, Protocol):
    """Actors that live in other processes, as the training loop uses them."""

    history: HistoryLog
    keeps_history: bool
    version: int  # of the weights that were published last
    workers: int

    def use_run_folder(self, folder: Path, tell: Callable[..., object]) -> None:
        """Set the folder of the run; `tell` is called with what happens to actors."""
        ...

    def poll(self) -> None:
        """Replace actors that failed."""
        ...

    def publish(self, version: int, weights: Any) -> None:
        """Publish the newest weights to all actors."""
        ...

    def collect(self) -> Rollout | None:
        """The next rollout, if one has arrived."""
        ...

    def insert(self, rollout: Rollout) -> None:
        """Put a rollout into the replay."""
        ...

    def drain_stats(self) -> dict[str, Any]:
        """What happened to actors since the last call."""
        ...

    def counts(self) -> dict[str, int]:
        """Nanoseconds by stage and bytes sent, of all actors so far."""
        ...

    def num_working(self) -> int:
        """Actors that are at work."""
        ...

    def num_given_up(self) -> int:
        """Actors that failed too often and are not started again."""
        ...


@dataclass
class Components:
    """All parts of one run."""

    plan: Plan
    spec: Spec
    actor: ActorSide
    batch_source: BatchSource
    learner: Learner | PopulationLearner
    peers: Peers | None = None  # the group of several learners, which has `learner` as its rank 0
    remote: ReplayProcess | None = None  # the process of the replay, if it has one
    notes: list[str] = field(default_factory=list)  # what was measured and chosen, shown at the start
    inexact_reasons: list[str] = field(default_factory=list)  # why the plan and its seed alone do not decide this run

    @property
    def remote_actors(self) -> RemoteActors | None:
        """The actors, if they are in other processes."""
        return cast("RemoteActors", self.actor) if self.actor.is_remote else None

    @property
    def steps(self) -> int:
        """Environment steps that arrived, those of other learners' own environments too."""
        return self.batch_source.steps + (0 if self.peers is None else self.peers.env_steps)

    @property
    def forgiven(self) -> int:
        """Updates that will never be made."""
        return self.batch_source.limiter.forgiven if isinstance(self.batch_source, ReplaySource) else 0

    @property
    def policy(self) -> Policy:
        """The policy that the run is making: of a population, the leader's."""
        return self.policies[self.learner.leader_index if isinstance(self.learner, PopulationLearner) else 0]

    @property
    def policies(self) -> list[Policy]:
        """Every policy that acts."""
        acting = self.actor.policy
        return acting.policies if isinstance(acting, PopulationPolicy) else [acting]

    def update(self, batch: Batch | Sequences) -> Report:
        """One update, by all learners if there are several."""
        return self.learner.update(batch) if self.peers is None else self.peers.update(batch)

    def state_dict(self) -> State:
        """Everything but weights, moments and replay rows, which have files of their own."""
        drawn = device_rng(self.plan.runtime.device)
        return {
            "actor": self.actor.state_dict(),
            "feed": self.batch_source.state_dict(),
            "updates": self.learner.updates,
            "learning_rate": self.learner.learning_rate,
            "torch": torch.get_rng_state().numpy().copy(),  # a torso's dropout draws from it
            **({} if drawn is None else {"accelerator": drawn}),
            **({} if self.peers is None else {"together": self.peers.state_dict()}),
        }

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> Array:
        """Load it; returns the lanes [B] whose environment could not be restored."""
        self.batch_source.load_state_dict(state["feed"], with_replay=with_replay)
        self.learner.updates = saved_count(state, "updates")
        # Before a rate could be steered it was the plan's own, which the learner has.
        self.learner.learning_rate = float(state.get("learning_rate", self.learner.learning_rate))
        torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
        set_device_rng(self.plan.runtime.device, state.get("accelerator"))
        if self.peers is not None and "together" in state:
            self.peers.load_state_dict(state["together"])
        return self.actor.load_state_dict(state["actor"])

    def dormant(self) -> float | None:
        """The share of units that hardly ever fire, by the policy's network: without its noise it draws nothing."""
        self.policy.noisy = False
        set_noise(self.policy.net, active=False)
        self.policy.refresh_weights()
        return dormant_units(self.policy.net, self.batch_source.replay)

    def current_settings(self) -> State:
        """The present values of settings that the plan lets change."""
        plan = self.plan
        learner = self.learner
        batch_source = self.batch_source
        now: State = {}
        scheduled = plan.optim.decay_updates is not None or plan.optim.warm_updates > 0
        if scheduled or plan.steer.learning_rate != SteadyRate():
            now["learning_rate"] = learner.current_rate()
        if isinstance(batch_source, ReplaySource) and plan.steer.batch != SteadyBatch():
            now["batch_size"] = batch_source.batch_size
        if isinstance(batch_source, ReplaySource) and batch_source.anneal is not None:
            now |= {"n_step": batch_source.replay.fold.n, "discount": batch_source.replay.fold.gamma}
        if learner.reset is not None:
            now["resets"] = learner.reset.number(learner.updates)
        return now

    def wait_until_idle(self) -> None:
        """Return when every learner is idle, and their common weights are in `learner`."""
        if self.peers is not None:
            self.peers.quiesce()

    def close(self) -> None:
        """Close actors, other learners and the replay."""
        self.actor.close()
        if self.peers is not None:
            self.peers.close()
        self.batch_source.replay.close()


def device_rng(device: str | None) -> Array | None:
    """The state of CUDA's generator, which random layers draw from; None on the CPU, which uses torch's own."""
    if device is None or torch.device(device).type != "cuda":
        return None
    state: Array = torch.cuda.get_rng_state(device).cpu().numpy().copy()
    return state


def set_device_rng(device: str | None, state: Array | None) -> None:
    """Restore it, if there is one: a run may have moved to another kind of device."""
    if state is not None and device is not None and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(torch.from_numpy(state.copy()), device)


def make_policy(
    plan: Plan, spec: Spec, device: torch.device, torso: nn.Module | None = None, member: int = 0
) -> Policy:
    """A policy with fresh weights; a torso of the user's own is copied, so that the original does not change."""
    try:
        net = fresh_net(plan, spec, torso, 0, member)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if torso is None:
            raise
        raise UsageError(
            f"the torso cannot read observations of shape {spec.input_shape}",
            f"Shown one, it raised {type(error).__name__}: {str(error).splitlines()[0]}.",
            f"Make its first layer take inputs [N, {', '.join(map(str, spec.input_shape))}].",
        ) from error
    net.eval()  # a torso's dropout and the like are for learning
    if isinstance(plan.net.head, ImplicitHead) and isinstance(net.head, ImplicitQuantileHead):
        net.head.fractions = plan.net.head.act_fractions
        net.head.even = True
    return Policy(net.to(device), make_head(plan, spec), spec.actions, device, spec)


def join_components(
    plan: Plan,
    spec: Spec,
    make_actors: Callable[["LearnerSide"], ActorSide],
    torso: nn.Module | None = None,
    make_replay_for: Callable[[Plan, Spec], ReplayBuffer] | None = None,
) -> Components:
    """Join replay and learner to whoever acts; `spec` is the world's own. `make_replay_for` makes the replay."""
    device = torch.device(plan.runtime.device or "cpu")
    policies = [make_policy(plan, spec, device, torso, member) for member in range(plan.population.num)]
    stored = policy_spec(spec, policies[0])
    learners = make_learners(plan, spec, stored, policies, torso)
    own = actor_learner_plan(plan)
    replay = (make_replay_for or own_replay)(own, stored)
    if isinstance(plan.replay, BufferReplay) and plan.replay.on_device:
        use_mirror(replay, learners, device)
    bonus = make_count_bonus(plan, stored, stream(plan.seed, NOVELTY))
    batch_source = make_batch_source(own, replay, learners[0], own.env.num, bonus)
    learner = learners[0] if len(learners) == 1 else PopulationLearner(learners)
    return Components(
        plan, stored, make_actors(LearnerSide(batch_source, learner, join_policies(policies))), batch_source, learner
    )


def use_mirror(replay: ReplayBuffer, learners: list[Learner], device: torch.device) -> None:
    """Batches hold places of rows, which learners read from a mirror on their device."""
    mirror = Mirror(replay.store, device)
    replay.mirrored = True
    for learner in learners:
        learner.transfer = with_mirror(learner.transfer, mirror)


def own_replay(plan: Plan, spec: Spec) -> ReplayBuffer:
    """A replay in this process."""
    return make_replay(plan, spec, plan.env.num, stream(plan.seed, SAMPLE))


@dataclass
class LearnerSide:
    """The components that learn, as the actors see them."""

    batch_source: BatchSource
    learner: Learner | PopulationLearner
    policy: Policy | PopulationPolicy  # that is evaluated and saved


def join_policies(policies: list[Policy]) -> Policy | PopulationPolicy:
    """The policy, or a population's policies as one."""
    return policies[0] if len(policies) == 1 else PopulationPolicy(policies)


def make_actor(
    plan: Plan,
    world: World,
    policy: Policy | PopulationPolicy,
    explore: Explore | None = None,
    *,
    worker: int = 0,
    incarnation: int = 0,
    exploration_step: Callable[[], int] | None = None,
) -> Actor:
    """An actor in its world, which holds this worker's share of all lanes."""
    part = slice(worker * world.num, (worker + 1) * world.num)
    explorer = make_explorer(plan.algo, world.spec.actions, plan.env.num, explore, part)
    worker_key = (worker, incarnation) if worker or incarnation else ()
    return Actor(
        world,
        policy,
        explorer,
        stream(plan.seed, EXPLORE, *worker_key),
        worker=worker,
        incarnation=incarnation,
        record_values=records_values(plan),
        exploration_step=exploration_step,
    )


def records_values(plan: Plan) -> bool:
    """Do actors send values: for initial priorities, or for the returns of fresh experience?"""
    if not isinstance(plan.replay, BufferReplay):
        return True
    return isinstance(plan.replay.sampler, PrioritizedSampler) and plan.replay.sampler.initial == "actor"


def make_components(
    plan: Plan, world: World, torso: nn.Module | None = None, explore: Explore | None = None
) -> Components:
    """Components with one actor in this process."""
    return join_components(plan, world.spec, lambda learning: make_actor(plan, world, learning.policy, explore), torso)


def make_learners(
    plan: Plan, shown: Spec, spec: Spec, policies: list[Policy], torso: nn.Module | None
) -> list[Learner]:
    """A learner for each policy, with shared normalisation. `shown` is the world's own spec."""
    factors = rate_factors(plan.population.num, plan.population.spread)
    nets = [learner_net(plan, policy) for policy in policies]
    for net in nets:
        net.normalize = nets[0].normalize
        net.rewards = nets[0].rewards
    return [
        make_learner(plan, spec, net, policy.device, make_fresh(plan, shown, torso, member), factor)
        for member, (net, policy, factor) in enumerate(zip(nets, policies, factors, strict=True))
    ]


def fresh_net(plan: Plan, spec: Spec, torso: nn.Module | None, number: int, member: int) -> QNet:
    """A network whose weights depend on the seed, the number of the reset and the member of the population."""
    named = (number, member) if member else (number,) if number else ()
    seed = int(stream(plan.seed, WEIGHTS, *named).integers(2**63))
    return make_net(plan.net, spec, normalize=plan.env.normalize, seed=seed, torso=copy.deepcopy(torso))


def make_fresh(plan: Plan, spec: Spec, torso: nn.Module | None, member: int) -> Callable[[int], QNet]:
    """Makes the network with the fresh weights of a reset, by the number of the reset."""
    reset = plan.algo.reset
    if isinstance(reset, PeriodicReset) and reset.keep < 1.0 and torso is not None:
        raise UsageError(
            f"algo.reset.keep={reset.keep:g} does not go with a torso of your own",
            "A reset moves the torso towards fresh weights, and only your own code could make these.",
            "Set algo.reset.keep=1: then only the head begins anew.",
        )
    return lambda number: fresh_net(plan, spec, torso, number, member)


def policy_spec(spec: Spec, policy: Policy) -> Spec:
    """The world's spec with the size of the policy's memory."""
    memory = policy.net.memory
    return spec if memory is None else replace(spec, state=(memory.state_size,))


def learner_net(plan: Plan, policy: Policy) -> QNet:
    """The policy's network as it is trained: noise, dropout and random fractions are on."""
    net = copy.deepcopy(policy.net).train()
    set_noise(net, active=True)
    if isinstance(plan.net.head, ImplicitHead) and isinstance(net.head, ImplicitQuantileHead):
        net.head.fractions = plan.net.head.fractions
        net.head.even = False
    return net


def make_train_world(plan: Plan, make: EnvMaker | None = None) -> World:
    """The world to train in; where actors have worlds of their own, one lane that shows the spaces."""
    if isinstance(plan.runtime, ProcessesRuntime) or plan.learners.num > 1:
        fork_server(ROLES)  # before environments start one with fewer modules
    num = actor_learner_plan(plan).env.num if isinstance(plan.runtime, InlineRuntime) or has_actor_learners(plan) else 1
    threads = plan.runtime.threads or world_threads(plan, num)
    return make_world(plan.env, seed=plan.seed, stream=TRAIN, num=num, make=make, threads=threads)


def world_threads(plan: Plan, num: int) -> int:
    """Threads of a native world with `num` lanes: every core, if no updates are made while it steps."""
    alone = isinstance(plan.runtime, InlineRuntime) and not isinstance(plan.replay, BufferReplay)
    return min(num, len(os.sched_getaffinity(0))) if alone else 1


def make_own_world(
    plan: Plan, worker: int, incarnation: int, make: EnvMaker | None = None, logs: Path | None = None
) -> World:
    """The world of an actor in a process of its own; every incarnation has other seeds."""
    worker_key = (worker, incarnation)
    num = plan.env.num // num_senders(plan)
    seed = int(stream(plan.seed, WORLDS, *worker_key).integers(2**31)) if any(worker_key) else plan.seed
    env = plan.env
    threads = 1
    if has_central_inference(plan) and is_native(env, make):
        threads = plan.actors.num
    elif has_central_inference(plan):
        env = msgspec.structs.replace(env, workers=max(env.workers, plan.actors.num))
    return make_world(env, seed=seed, stream=TRAIN, num=num, make=make, threads=threads, logs=logs)
