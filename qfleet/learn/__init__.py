"""Learning: batches into better weights, at the gate's pace."""

import copy
from collections.abc import Callable

import torch

from qfleet.data import Spec
from qfleet.learn.batch_source import BatchSource, Diverging, Observer, ReplaySource, drain, learning
from qfleet.learn.compiled_update import make_whole
from qfleet.learn.count_bonus import VisitCounts, make_bonus
from qfleet.learn.fresh_source import FreshSource
from qfleet.learn.learner import Learner, NonFiniteUpdate, Schedule, arrays, restore
from qfleet.learn.optimizer import make_optimizer
from qfleet.learn.plasticity import Anneal, Reset, dormant_units, make_anneal, make_reset
from qfleet.learn.population import PopulationLearner, rate_factors
from qfleet.learn.rate_limiter import RateLimiter
from qfleet.learn.target_network import make_follow, tensors
from qfleet.nets import ImplicitQuantileHead, QNet, constraints
from qfleet.plan import updates_per_step
from qfleet.plan.schema import FreshReplay, ImplicitHead, Plan
from qfleet.plan.validate.placement import num_senders
from qfleet.qlearn import StepView, make_head, make_rule, make_view
from qfleet.replay import Replay


def make_target(plan: Plan, net: QNet) -> QNet:
    """The target network: a copy that is never trained."""
    target = copy.deepcopy(net)
    # One set of running statistics serves both networks.
    target.normalize = net.normalize
    target.rewards = net.rewards
    target.requires_grad_(False).eval()
    for _, makers in constraints(target):
        makers.train()  # its weights change too: spectral norm must go on estimating their largest singular value
    if isinstance(plan.net.head, ImplicitHead) and isinstance(target.head, ImplicitQuantileHead):
        target.head.fractions = plan.net.head.target_fractions
    return target


def make_learner(
    plan: Plan,
    spec: Spec,
    net: QNet,
    device: torch.device,
    fresh: Callable[[int], QNet] | None = None,
    rate_factor: float = 1.0,
) -> Learner:
    """The learner the plan describes, around this network; `fresh` makes the weights of a reset by its number."""
    net.to(device)
    target = make_target(plan, net)
    optimizer = make_optimizer(plan.optim, tensors(p for p in net.parameters() if p.requires_grad))
    head = make_head(plan, spec)
    view = make_view(plan.algo)
    rule = None if isinstance(plan.replay, FreshReplay) else make_rule(plan.algo)
    return Learner(
        net,
        target,
        optimizer,
        head=head,
        rule=rule,
        view=view,
        follow=make_follow(plan),
        clip_norm=plan.optim.clip_norm,
        schedule=make_schedule(plan),
        accumulate=plan.algo.accumulate,
        reset=make_reset(plan.algo, fresh),
        rate_factor=rate_factor,
        device=device,
        reduced=plan.runtime.precision == "bfloat16" and isinstance(view, StepView),
        whole=make_whole(plan, net, target, optimizer, head=head, rule=rule, view=view),
    )


def make_schedule(plan: Plan) -> Schedule:
    """How the plan's learning rate changes, and by how much its batch size multiplies it."""
    optim = plan.optim
    factor = 1.0
    if optim.base_batch is not None:
        factor = (plan.algo.batch_size / optim.base_batch) ** (1.0 if optim.scaling == "linear" else 0.5)
    return Schedule(factor, optim.warm_updates, optim.decay_updates)


def make_batch_source(
    plan: Plan, replay: Replay, learner: Learner, lanes: int, bonus: VisitCounts | None = None
) -> BatchSource:
    """Where the plan's batches come from."""
    observer = Observer(learner.net, lanes, plan.algo.discount, clip=replay.fold.clip)
    width = lanes // num_senders(plan)
    if isinstance(plan.replay, FreshReplay):
        fresh = plan.replay
        settings = {"epochs": fresh.epochs, "minibatches": fresh.minibatches, "trace": fresh.trace, "width": width}
        return FreshSource(replay, learner, observer, bonus, **settings)  # type: ignore[arg-type]
    anneal = make_anneal(plan.algo, replay.fold)
    members = plan.population.num
    return ReplaySource(replay, make_rate_limiter(plan), observer, plan.algo.batch_size, anneal, bonus, members, width)


def make_rate_limiter(plan: Plan) -> RateLimiter:
    """The gate the plan describes."""
    return RateLimiter(updates_per_step(plan), plan.algo.learn_start_steps)


__all__ = [
    "Anneal",
    "BatchSource",
    "Diverging",
    "FreshSource",
    "Learner",
    "NonFiniteUpdate",
    "Observer",
    "PopulationLearner",
    "RateLimiter",
    "ReplaySource",
    "Reset",
    "VisitCounts",
    "arrays",
    "dormant_units",
    "drain",
    "learning",
    "make_batch_source",
    "make_bonus",
    "make_learner",
    "make_optimizer",
    "make_rate_limiter",
    "rate_factors",
    "restore",
]
