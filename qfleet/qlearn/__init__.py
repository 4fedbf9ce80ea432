"""The mathematics of Q-learning as pure functions."""

from qfleet.data import Spec
from qfleet.plan.schema import (
    Algo,
    CategoricalHead,
    DoubleRule,
    ImplicitHead,
    MunchausenRule,
    Plan,
    QuantileHead,
    SequencesView,
)
from qfleet.qlearn.heads import Categorical, Decoupled, Head, ImplicitQuantiles, Quantile, Scalar
from qfleet.qlearn.returns import lambda_returns
from qfleet.qlearn.rules import ActionChoice, Double, Max, Munchausen, NextValues, Rule, greedy_probs
from qfleet.qlearn.td import td_loss, td_loss_and_gradient, td_target
from qfleet.qlearn.views import SequenceView, StepView, Tensors, View


def make_rule(algo: Algo) -> Rule:
    """The plan's rule."""
    match algo.rule:
        case DoubleRule():
            return Double()
        case MunchausenRule(alpha=alpha, temperature=temperature, floor=floor):
            return Munchausen(alpha, temperature, floor)
        case _:
            return Max()


def make_head(plan: Plan, spec: Spec) -> Head:
    """The plan's head: the meaning of its network's outputs."""
    rescale = plan.algo.rescale
    match plan.net.head:
        case CategoricalHead(low=low, high=high):
            return Categorical(low, high, rescale)
        case QuantileHead():
            return Quantile(rescale)
        case ImplicitHead():
            return ImplicitQuantiles(rescale)
        case _:
            loss = plan.algo.loss
            return Decoupled(spec.actions, loss, rescale) if plan.net.decoupled else Scalar(loss, rescale)


def make_view(algo: Algo) -> View:
    """The plan's view."""
    if isinstance(algo.view, SequencesView):
        return SequenceView(algo.view.burn_in, algo.view.length, algo.view.eta)
    return StepView()


__all__ = [
    "ActionChoice",
    "Categorical",
    "Decoupled",
    "Double",
    "Head",
    "ImplicitQuantiles",
    "Max",
    "Munchausen",
    "NextValues",
    "Quantile",
    "Rule",
    "Scalar",
    "SequenceView",
    "StepView",
    "Tensors",
    "View",
    "greedy_probs",
    "lambda_returns",
    "make_head",
    "make_rule",
    "make_view",
    "td_loss",
    "td_loss_and_gradient",
    "td_target",
]
