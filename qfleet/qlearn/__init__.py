"""The mathematics of Q-learning as pure functions."""

from qfleet.qlearn.heads import Head, Scalar, make_head
from qfleet.qlearn.returns import lambda_returns
from qfleet.qlearn.rules import Rule, make_rule
from qfleet.qlearn.td import td_loss, td_loss_and_gradient
from qfleet.qlearn.views import StepView, Tensors, View, make_view

__all__ = [
    "Head",
    "Rule",
    "Scalar",
    "StepView",
    "Tensors",
    "View",
    "lambda_returns",
    "make_head",
    "make_rule",
    "make_view",
    "td_loss",
    "td_loss_and_gradient",
]
