"""The assembly line: every part made from the plan and joined, once, for every runtime."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

from qfleet.act import Actor, Crowd, Explore, Policy, make_explorer
from qfleet.data import Array, Spec, State, World
from qfleet.envs import TRAIN, make_world
from qfleet.errors import UsageError
from qfleet.learn import (
    Feed,
    Learner,
    Members,
    ReplayFeed,
    dormant_units,
    make_bonus,
    make_feed,
    make_learner,
    rate_factors,
)
from qfleet.nets import Implicit, QNet, make_net, set_noise
from qfleet.plan.schema import ImplicitHead, PeriodicReset, Plan, SteadyBatch, SteadyRate
from qfleet.qlearn import make_head
from qfleet.replay import make_replay

# Purposes of random numbers; each has a generator of its own, so that none disturbs another.
WEIGHTS, EXPLORE, SAMPLE, LAYERS, NOVELTY = 101, 102, 103, 104, 105

EnvMaker = Callable[[], "gymnasium.Env[Any, Any]"]


def stream(seed: int, purpose: int, *more: int) -> np.random.Generator:
    """A generator that depends on nothing but the seed and its purpose."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, purpose, *more])))


@dataclass
class Line:
    """All parts of one run."""

    plan: Plan
    spec: Spec
    world: World
    actor: Actor
    feed: Feed
    learner: Learner | Members

    @property
    def policy(self) -> Policy:
        """The policy that the run is making: of a population, the leader's."""
        return self.policies[self.learner.leader if isinstance(self.learner, Members) else 0]

    @property
    def policies(self) -> list[Policy]:
        """Every policy that acts."""
        acting = self.actor.policy
        return acting.policies if isinstance(acting, Crowd) else [acting]

    def state_dict(self) -> State:
        """Everything but weights, moments and replay rows, which have files of their own."""
        drawn = device_rng(self.plan.runtime.device)
        return {
            "actor": self.actor.state_dict(),
            "feed": self.feed.state_dict(),
            "updates": self.learner.updates,
            "learning_rate": self.learner.learning_rate,
            "torch": torch.get_rng_state().numpy().copy(),  # a torso's dropout draws from it
            **({} if drawn is None else {"accelerator": drawn}),
        }

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> Array:
        """Come back; returns the lanes [B] whose world could not."""
        self.feed.load_state_dict(state["feed"], with_replay=with_replay)
        self.learner.updates = int(state["updates"])
        # Before a rate could be steered it was the plan's own, which the learner has.
        self.learner.learning_rate = float(state.get("learning_rate", self.learner.learning_rate))
        torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
        set_device_rng(self.plan.runtime.device, state.get("accelerator"))
        self.actor.in_flight = 0  # what was under way when a run goes back is forgotten
        return self.actor.load_state_dict(state["actor"])

    def dormant(self) -> float | None:
        """The share of units that hardly ever fire, by the policy's network: without its noise it draws nothing."""
        self.policy.noisy = False
        set_noise(self.policy.net, active=False)
        return dormant_units(self.policy.net, self.feed.replay)

    def moving(self) -> State:
        """Settings that do not stand still, as they are now: of those the plan lets move."""
        plan, learner, feed = self.plan, self.learner, self.feed
        now: State = {}
        if plan.optim.decay_updates is not None or plan.steer.learning_rate != SteadyRate():
            now["learning_rate"] = learner.rate()
        if isinstance(feed, ReplayFeed) and plan.steer.batch != SteadyBatch():
            now["batch_size"] = feed.batch_size
        if isinstance(feed, ReplayFeed) and feed.anneal is not None:
            now |= {"n_step": feed.replay.fold.n, "discount": feed.replay.fold.gamma}
        if learner.reset is not None:
            now["resets"] = learner.reset.number(learner.updates)
        return now

    def close(self) -> None:
        """Let go of the world."""
        self.world.close()


def device_rng(device: str | None) -> Array | None:
    """The state of an accelerator's generator: CUDA's has one that random layers draw from, a CPU's is torch's own."""
    if device is None or torch.device(device).type != "cuda":
        return None
    state: Array = torch.cuda.get_rng_state(device).cpu().numpy().copy()
    return state


def set_device_rng(device: str | None, state: Array | None) -> None:
    """Put it back, if there is one: a run may have moved to another kind of device."""
    if state is not None and device is not None and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(torch.from_numpy(state.copy()), device)


def make_policy(
    plan: Plan, spec: Spec, device: torch.device, torso: nn.Module | None = None, member: int = 0
) -> Policy:
    """A policy with fresh weights; a torso of the user's own is copied, so that theirs stays as it is."""
    try:
        net = fresh_net(plan, spec, torso, 0, member)
    except (RuntimeError, TypeError, ValueError) as error:
        if torso is None:
            raise
        raise UsageError(
            f"the torso cannot read observations of shape {spec.input_shape}",
            f"Shown one, it raised {type(error).__name__}: {str(error).splitlines()[0]}.",
            f"Make its first layer take inputs [N, {', '.join(map(str, spec.input_shape))}].",
        ) from error
    net.eval()  # a torso's dropout and the like are for learning
    if isinstance(plan.net.head, ImplicitHead) and isinstance(net.head, Implicit):
        net.head.fractions, net.head.even = plan.net.head.act_fractions, True
    return Policy(net.to(device), make_head(plan, spec), spec.actions, device)


def make_line(plan: Plan, world: World, torso: nn.Module | None = None, explore: Explore | None = None) -> Line:
    """Join actor, replay and learner around a world."""
    device = torch.device(plan.runtime.device or "cpu")
    policies = [make_policy(plan, world.spec, device, torso, member) for member in range(plan.population.num)]
    spec = policy_spec(world.spec, policies[0])
    learners = make_learners(plan, world.spec, spec, policies, torso)
    replay = make_replay(plan, spec, world.num, stream(plan.seed, SAMPLE))
    bonus = make_bonus(plan, spec, stream(plan.seed, NOVELTY))
    feed = make_feed(plan, replay, learners[0], world.num, bonus)
    explorer = make_explorer(plan.algo, spec.actions, world.num, explore)
    tell_values = replay.store.value is not None
    alone = len(policies) == 1
    acts = policies[0] if alone else Crowd(policies)
    actor = Actor(world, acts, explorer, stream(plan.seed, EXPLORE), tell_values=tell_values)
    return Line(plan, spec, world, actor, feed, learners[0] if alone else Members(learners))


def make_learners(
    plan: Plan, shown: Spec, spec: Spec, policies: list[Policy], torso: nn.Module | None
) -> list[Learner]:
    """A learner for each policy; what they normalise by is one and the same. `shown` is the world's own spec."""
    factors = rate_factors(plan.population.num, plan.population.spread)
    nets = [learner_net(plan, policy) for policy in policies]
    for net in nets:
        net.normalize, net.rewards = nets[0].normalize, nets[0].rewards
    return [
        make_learner(plan, spec, net, policy.device, make_fresh(plan, shown, torso, member), factor)
        for member, (net, policy, factor) in enumerate(zip(nets, policies, factors, strict=True))
    ]


def fresh_net(plan: Plan, spec: Spec, torso: nn.Module | None, number: int, member: int) -> QNet:
    """A network whose weights the seed decides, and for a reset its number, and for a population the member's."""
    named = (number, member) if member else (number,) if number else ()
    seed = int(stream(plan.seed, WEIGHTS, *named).integers(2**63))
    return make_net(plan.net, spec, normalize=plan.env.normalize, seed=seed, torso=copy.deepcopy(torso))


def make_fresh(plan: Plan, spec: Spec, torso: nn.Module | None, member: int) -> Callable[[int], QNet]:
    """Makes the network that a reset takes its weights from, by the number of the reset."""
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
    if isinstance(plan.net.head, ImplicitHead) and isinstance(net.head, Implicit):
        net.head.fractions, net.head.even = plan.net.head.fractions, False
    return net


def make_train_world(plan: Plan, make: EnvMaker | None = None) -> World:
    """The world that is learned in."""
    return make_world(plan.env, seed=plan.seed, stream=TRAIN, make=make, threads=plan.runtime.threads or 1)
