"""The mathematics of Q-learning as pure functions."""

from qfleet.qlearn.custom_loss import CustomTdLoss
from qfleet.qlearn.heads import CustomHead, Head, Scalar, make_head
from qfleet.qlearn.losses import Loss, LossInputs
from qfleet.qlearn.offline import CloningLoss, ConservativeLoss
from qfleet.qlearn.returns import lambda_returns
from qfleet.qlearn.rules import ActionChoice, CheckedRule, NextValues, Rule, greedy_probs, make_rule, masked
from qfleet.qlearn.td import td_loss, td_loss_and_gradient
from qfleet.qlearn.views import SequenceView, StepView, Tensors, View, make_view

__all__ = [
    "ActionChoice",
    "CheckedRule",
    "CloningLoss",
    "ConservativeLoss",
    "CustomHead",
    "CustomTdLoss",
    "Head",
    "Loss",
    "LossInputs",
    "NextValues",
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
    "masked",
    "td_loss",
    "td_loss_and_gradient",
]
