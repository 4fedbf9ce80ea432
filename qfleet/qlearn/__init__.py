"""The mathematics of Q-learning as pure functions."""

from qfleet.plan.schema import Algo, DoubleRule
from qfleet.qlearn.heads import Head, Scalar
from qfleet.qlearn.rules import Double, Max, Rule, greedy
from qfleet.qlearn.td import Steps, Tensors, View, td_loss, td_target


def make_rule(algo: Algo) -> Rule:
    """The rule the plan names."""
    return Double() if isinstance(algo.rule, DoubleRule) else Max()


__all__ = [
    "Double",
    "Head",
    "Max",
    "Rule",
    "Scalar",
    "Steps",
    "Tensors",
    "View",
    "greedy",
    "make_rule",
    "td_loss",
    "td_target",
]
