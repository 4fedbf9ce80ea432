"""Learning: sources of batches, the rate limiter, and learners that update weights."""

import copy
from collections.abc import Callable
from functools import partial

import torch

from qfleet.data import Spec
from qfleet.learn.batch_source import (
    BatchSource,
    Diverging,
    NormalizationStatistics,
    ReplaySource,
    SizedSource,
    drain,
    run_learner,
)
from qfleet.learn.compiled_update import make_compiled_update
from qfleet.learn.count_bonus import VisitCounts, make_count_bonus
from qfleet.learn.fresh_source import FreshSource
from qfleet.learn.gradients import LossGradients, TdLoss
from qfleet.learn.learner import Learner, NonFiniteUpdate
from qfleet.learn.optimizer import FusedOptimizer, RateSchedule, make_optimizer
from qfleet.learn.plasticity import Anneal, dormant_units, make_anneal, make_reset
from qfleet.learn.population import PopulationLearner, rate_factors
from qfleet.learn.rate_limiter import RateLimiter
from qfleet.learn.target_network import detached, make_target_update
from qfleet.learn.torch_optimizer import OptimizerMaker, TorchOptimizer
from qfleet.nets import ImplicitQuantileHead, QNet, draws_random_numbers, parametrized_layers
from qfleet.plan import updates_per_step
from qfleet.plan.schema import (
    CloningOfflineLoss,
    ConservativeOfflineLoss,
    ConvTorso,
    DatasetReplay,
    ExponentialAnneal,
    FreshReplay,
    ImpalaTorso,
    ImplicitHead,
    NatureTorso,
    PeriodicReset,
    Plan,
)
from qfleet.plan.traits import learns_in_epochs
from qfleet.plan.validate.placement import num_senders
from qfleet.qlearn import (
    CheckedRule,
    CloningLoss,
    ConservativeLoss,
    CustomTdLoss,
    Head,
    Loss,
    Rule,
    StepView,
    make_head,
    make_rule,
    make_view,
    td_loss,
)
from qfleet.replay import Replay
from qfleet.system.parallel_tasks import TaskThread


def make_target(plan: Plan, net: QNet) -> QNet:
    """The target network: a copy that is never trained."""
    target = copy.deepcopy(net)
    # One set of running statistics serves both networks.
    target.normalize = net.normalize
    target.rewards = net.rewards
    target.requires_grad_(False).eval()
    for _, parametrizations in parametrized_layers(target):
        parametrizations.train()  # its weights change too: spectral norm must keep estimating their singular values
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
    *,
    head: Head | None = None,
    rule: Rule | None = None,
    loss: Loss | None = None,
    custom_optimizer: OptimizerMaker | None = None,
) -> Learner:
    """The plan's learner for this network; `fresh` makes a network with new weights from the number of a reset.

    `head`, `rule`, `loss` and `custom_optimizer` are the user's own, in place of the plan's.
    """
    net.to(device)
    target = make_target(plan, net)
    trained = detached(p for p in net.parameters() if p.requires_grad)
    optimizer: FusedOptimizer = make_optimizer(plan.optim, trained)
    if custom_optimizer is not None:
        optimizer = TorchOptimizer(trained, custom_optimizer)
    head = head or make_head(plan, spec)
    rule = make_rule(plan.algo) if rule is None else CheckedRule(rule)
    compute_loss = plan_loss(plan) if loss is None else CustomTdLoss(loss, (net, target))
    compiled_update = None
    if plan.runtime.compile:
        compiled_update = make_compiled_update(
            plan, net, target, optimizer, partial(compute_loss, head, rule, make_view(plan.algo))
        )
    gradients = make_loss_gradients(plan, spec, net, target, head=head, rule=rule, compute_loss=compute_loss)
    return Learner(
        net,
        target,
        optimizer,
        gradients=gradients,
        update_target=make_target_update(plan),
        clip_norm=plan.optim.clip_norm,
        schedule=make_schedule(plan),
        accumulate=plan.algo.accumulate,
        reset=make_reset(plan.algo.reset, fresh) if isinstance(plan.algo.reset, PeriodicReset) else None,
        rate_factor=rate_factor,
        device=device,
        compiled_update=compiled_update,
    )


def plan_loss(plan: Plan) -> TdLoss:
    """The plan's loss: that of TD errors, perhaps with a term for recorded experience."""
    match plan.algo.offline:
        case ConservativeOfflineLoss(alpha=alpha):
            return ConservativeLoss(alpha)
        case CloningOfflineLoss():
            return CloningLoss()
    return td_loss


def make_loss_gradients(
    plan: Plan, spec: Spec, net: QNet, target: QNet, *, head: Head, rule: Rule, compute_loss: TdLoss
) -> LossGradients:
    """What computes the plan's losses and gradients."""
    view = make_view(plan.algo)
    device = next(net.parameters()).device
    return LossGradients(
        net,
        target,
        head=head,
        rule=None if isinstance(plan.replay, FreshReplay) else rule,
        view=view,
        compute_loss=compute_loss,
        device=device,
        reduced=plan.runtime.precision == "bfloat16" and isinstance(view, StepView),
        pixels=spec.dtype == "uint8",
        tasks=make_task_thread(plan, device),
        halves=divides_batches(plan, device),
        draws_random_numbers=draws_random_numbers(plan.net),
    )


def make_task_thread(plan: Plan, device: torch.device) -> TaskThread | None:
    """A second thread for updates, if the plan divides them into tasks; the operations of both use one thread each."""
    runtime = plan.runtime
    if runtime.parallel != "tasks" or (runtime.threads or 1) == 1 or runtime.compile or device.type != "cpu":
        return None
    return TaskThread(partial(torch.set_num_threads, 1))


def divides_batches(plan: Plan, device: torch.device) -> bool:
    """Are batches of pictures computed in two halves, on one thread too?"""
    pictures = isinstance(plan.net.torso, NatureTorso | ConvTorso | ImpalaTorso)
    return pictures and plan.runtime.parallel == "tasks" and device.type == "cpu"


def make_schedule(plan: Plan) -> RateSchedule:
    """The plan's learning-rate schedule, scaled by its batch size."""
    optim = plan.optim
    factor = 1.0
    if optim.base_batch is not None:
        factor = (plan.algo.batch_size / optim.base_batch) ** (1.0 if optim.scaling == "linear" else 0.5)
    return RateSchedule(factor, optim.warm_updates, optim.decay_updates)


def make_batch_source(
    plan: Plan, replay: Replay, learner: Learner, lanes: int, bonus: VisitCounts | None = None
) -> BatchSource:
    """The plan's source of batches."""
    if isinstance(plan.replay, DatasetReplay):
        return make_offline_source(plan, replay)
    normalization = NormalizationStatistics(learner.net, lanes, plan.algo.discount, clip=replay.n_step.clip)
    lanes_per_actor = lanes // num_senders(plan)
    if isinstance(plan.replay, FreshReplay):
        fresh = plan.replay
        return FreshSource(
            replay, learner, normalization, bonus, fresh.epochs, fresh.minibatches, fresh.trace, lanes_per_actor
        )
    limiter = make_rate_limiter(plan)
    anneal = make_anneal(plan.algo, replay.n_step) if isinstance(plan.algo.anneal, ExponentialAnneal) else None
    size = plan.algo.batch_size
    return ReplaySource(replay, limiter, normalization, size, anneal, bonus, plan.population.num, lanes_per_actor)


def make_offline_source(plan: Plan, replay: Replay) -> BatchSource:
    """The source of a plan that does not act; an extra, and most runs act."""
    if learns_in_epochs(plan):
        from qfleet.learn.offline.dataset_source import make_dataset_source

        return make_dataset_source(plan, replay)
    from qfleet.learn.offline.sampled_source import make_sampled_source

    return make_sampled_source(plan, replay)


def make_rate_limiter(plan: Plan) -> RateLimiter:
    """The plan's rate limiter."""
    return RateLimiter(updates_per_step(plan), plan.algo.learn_start_steps)


__all__ = [
    "Anneal",
    "BatchSource",
    "Diverging",
    "FreshSource",
    "Learner",
    "NonFiniteUpdate",
    "NormalizationStatistics",
    "OptimizerMaker",
    "PopulationLearner",
    "RateLimiter",
    "ReplaySource",
    "SizedSource",
    "dormant_units",
    "drain",
    "make_batch_source",
    "make_count_bonus",
    "make_learner",
    "make_optimizer",
    "make_rate_limiter",
    "rate_factors",
    "run_learner",
]
