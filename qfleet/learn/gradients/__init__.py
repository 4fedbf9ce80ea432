"""Losses and gradients of batches: how an update is divided between threads."""

from qfleet.learn.gradients.batch_halves import LossAndGradients
from qfleet.learn.gradients.loss_gradients import LossGradients, TdLoss

__all__ = ["LossAndGradients", "LossGradients", "TdLoss"]
