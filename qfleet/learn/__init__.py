"""Learning: batches into better weights, at the gate's pace."""

import copy

import torch

from qfleet.learn.feed import Diverging, Feed, Observer, drain, learning
from qfleet.learn.gate import Gate
from qfleet.learn.learner import Learner, NonFiniteUpdate, arrays, restore
from qfleet.learn.optimizer import make_optimizer
from qfleet.learn.target import make_follow, tensors
from qfleet.nets import QNet
from qfleet.plan.schema import Plan
from qfleet.qlearn import Scalar, Steps, make_rule


def make_learner(plan: Plan, net: QNet, device: torch.device) -> Learner:
    """The learner the plan describes, around this network."""
    net.to(device)
    target = copy.deepcopy(net)
    # One set of running statistics serves both networks.
    target.normalize, target.rewards = net.normalize, net.rewards
    target.requires_grad_(False).eval()
    return Learner(
        net,
        target,
        make_optimizer(plan.optim, tensors(p for p in net.parameters() if p.requires_grad)),
        head=Scalar(plan.algo.loss),
        rule=make_rule(plan.algo),
        view=Steps(),
        follow=make_follow(plan.algo),
        clip_norm=plan.optim.clip_norm,
        device=device,
    )


def make_gate(plan: Plan) -> Gate:
    """The gate the plan describes."""
    return Gate(plan.replay.samples_per_insert, plan.algo.batch_size, plan.algo.learn_start_steps)


__all__ = [
    "Diverging",
    "Feed",
    "Gate",
    "Learner",
    "NonFiniteUpdate",
    "Observer",
    "arrays",
    "drain",
    "learning",
    "make_gate",
    "make_learner",
    "make_optimizer",
    "restore",
]
