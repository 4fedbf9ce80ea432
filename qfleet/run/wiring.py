"""The assembly line: every part made from the plan and joined, once, for every runtime."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

from qfleet.act import Actor, Policy, make_epsilon
from qfleet.data import Array, Spec, State, World
from qfleet.envs import TRAIN, make_world
from qfleet.errors import UsageError
from qfleet.learn import Feed, Learner, Observer, make_gate, make_learner
from qfleet.nets import make_net
from qfleet.plan.schema import Plan
from qfleet.qlearn import Scalar
from qfleet.replay import make_replay

# Purposes of random numbers; each has a generator of its own, so that none disturbs another.
WEIGHTS, EXPLORE, SAMPLE, LAYERS = 101, 102, 103, 104

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
    learner: Learner

    @property
    def policy(self) -> Policy:
        """The policy that acts."""
        return self.actor.policy

    def state_dict(self) -> State:
        """Everything but weights, moments and replay rows, which have files of their own."""
        return {
            "actor": self.actor.state_dict(),
            "feed": self.feed.state_dict(),
            "updates": self.learner.updates,
            "torch": torch.get_rng_state().numpy().copy(),  # a torso's dropout draws from it
        }

    def load_state_dict(self, state: State, *, with_replay: bool = True) -> Array:
        """Come back; returns the lanes [B] whose world could not."""
        self.feed.load_state_dict(state["feed"], with_replay=with_replay)
        self.learner.updates = int(state["updates"])
        torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
        self.actor.in_flight = 0  # what was under way when a run goes back is forgotten
        return self.actor.load_state_dict(state["actor"])

    def close(self) -> None:
        """Let go of the world."""
        self.world.close()


def make_policy(plan: Plan, spec: Spec, device: torch.device, torso: nn.Module | None = None) -> Policy:
    """A policy with fresh weights; a torso of the user's own is copied, so that theirs stays as it is."""
    seed = int(stream(plan.seed, WEIGHTS).integers(2**63))
    try:
        net = make_net(plan.net, spec, normalize=plan.env.normalize, seed=seed, torso=copy.deepcopy(torso))
    except (RuntimeError, TypeError, ValueError) as error:
        if torso is None:
            raise
        raise UsageError(
            f"the torso cannot read observations of shape {spec.input_shape}",
            f"Shown one, it raised {type(error).__name__}: {str(error).splitlines()[0]}.",
            f"Make its first layer take inputs [N, {', '.join(map(str, spec.input_shape))}].",
        ) from error
    net.eval()  # a torso's dropout and the like are for learning
    return Policy(net.to(device), Scalar(plan.algo.loss), spec.num_actions, device)


def make_line(plan: Plan, world: World, torso: nn.Module | None = None) -> Line:
    """Join actor, replay and learner around a world."""
    device = torch.device(plan.runtime.device or "cpu")
    policy = make_policy(plan, world.spec, device, torso)
    learner = make_learner(plan, copy.deepcopy(policy.net).train(), device)
    replay = make_replay(plan, world.spec, world.num, stream(plan.seed, SAMPLE))
    observer = Observer(learner.net, world.num, plan.algo.discount)
    feed = Feed(replay, make_gate(plan), observer, plan.algo.batch_size)
    actor = Actor(world, policy, make_epsilon(plan.algo), stream(plan.seed, EXPLORE))
    return Line(plan, world.spec, world, actor, feed, learner)


def make_train_world(plan: Plan, make: EnvMaker | None = None) -> World:
    """The world that is learned in."""
    return make_world(plan.env, seed=plan.seed, stream=TRAIN, make=make, threads=plan.runtime.threads or 1)
